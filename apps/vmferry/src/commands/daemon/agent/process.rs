//! The agent's process, `vmferry join-fleet`.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmferry::probe::HostFacts;
use vmferry::witness::Witness;
use vmferry_control::{Directories, WitnessServer};
use vmferry_fleet::{EtcdWitness, FleetError, Host, HostName, Membership};

use super::guests::{self, Found};
use super::host;
use super::mover::Mover;
use super::parent::{Parent, Rested};
use super::qemus::Qemus;
use super::reports::Reports;
use crate::args::AgentOptions;
use crate::commands::daemon::config::Configuration;
use crate::commands::fleet::config::FleetTable;
use crate::commands::fleet::witness::witness_socket;
use crate::commands::prepared_directories;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// How often the journals are looked at. A source in doubt waits for what they say.
const PERIOD: Duration = Duration::from_millis(500);

/// How often the host says that it is there, in periods: three times before its lease ends.
const KEEP_EVERY: u32 = 6;

/// How often the fleet's object is read, in periods: nothing else may be written for long.
const CHECK_EVERY: u32 = 20;

/// Pause between attempts to join.
const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// Represents this host in the fleet until the daemon ends.
pub fn serve(options: &AgentOptions, output: &Output) -> Result<(), Failure> {
    // It ends when the daemon does.
    crate::signals::ignore()?;
    let daemon = Rc::new(Parent::listen()?);
    let directories = prepared_directories()?;
    let config = Configuration::read(&options.config)?;
    let (table, host) = config.fleet()?;
    // Guests that were received by templates have their sockets in the runtime directory.
    let mut sockets = host.qemu.clone();
    sockets.push(directories.runtime().to_owned());
    let guests = guests::watch(directories.clone(), Qemus::new(sockets, directories.journals()))?;
    let agent = Agent {
        config: &options.config,
        table,
        about: host::describe(&config, &host, directories.state())?,
        name: host.name,
        guests,
        directories,
        daemon,
        output,
    };
    agent.run()
}

/// What the agent works with.
struct Agent<'a> {
    config: &'a Path,
    table: &'a FleetTable,
    name: HostName,
    about: Host,
    directories: Directories,
    guests: Found,
    daemon: Rc<Parent>,
    output: &'a Output,
}

/// Why the host is not in the fleet any more.
enum Left {
    DaemonEnded,
    Failed(Failure),
}

impl Agent<'_> {
    fn run(&self) -> Result<(), Failure> {
        let mut told = String::new();
        loop {
            match self.join() {
                // The operator is told once, whatever the number of attempts.
                Err(failure) if failure.to_string() != told => {
                    told = failure.to_string();
                    self.tell(json!({ "event": "fleet-absent" }), &told);
                }
                Err(_) => {}
                Ok(Left::DaemonEnded) => return Ok(()),
                Ok(Left::Failed(failure)) => {
                    self.tell(json!({ "event": "fleet-left" }), &failure.to_string());
                    told.clear();
                }
            }
            // It is not told when etcd serves again.
            if self.daemon.rest(Instant::now() + RETRY_PERIOD) == Rested::DaemonEnded {
                return Ok(());
            }
        }
    }

    /// Joins the fleet, and returns why this host is not in it any more.
    fn join(&self) -> Result<Left, Failure> {
        let fleet = Arc::new(self.table.join()?);
        let member = Membership::begin(Arc::clone(&fleet), self.name.clone(), self.about.clone())?;
        let witness = Arc::new(EtcdWitness::new(Arc::clone(&fleet), self.name.clone()));
        let (path, id) = (witness_socket(&self.directories), witness.id());
        let server = WitnessServer::bind(&path, Arc::clone(&witness) as Arc<dyn Witness>);
        let _server = server.map_err(|error| {
            let text = format!("the witness can't be provided at {}", path.display());
            Failure::of(Code::Busy, anyhow::Error::new(error).context(text))
        })?;
        let (name, prefix, socket) = (&self.name, fleet.prefix(), path.display());
        let message = format!("joined {prefix} as {name}; the witness is at {socket}");
        let joined = json!({
            "event": "fleet-joined", "prefix": prefix.to_string(), "host": name.to_string(),
            "witness": id, "socket": path,
        });
        self.tell(joined, &message);
        let reports = Reports::new(self.directories.journals(), witness);
        let mover = Mover::new(
            self.config.to_owned(),
            self.name.clone(),
            self.about.clone(),
            self.directories.clone(),
            Arc::clone(&self.guests),
            Rc::clone(&self.daemon),
        );
        Ok(self.follow(member, reports, mover))
    }

    /// Publishes what this host is and has, reports what its journals say, and moves guests.
    fn follow(&self, mut member: Membership, mut reports: Reports, mut mover: Mover) -> Left {
        let _watch = member.fleet().follow_migrations(self.daemon.waker());
        let (mut turn, mut next) = (0, Instant::now());
        let (mut told, mut reported, mut published) = (None, None, None);
        loop {
            if Instant::now() >= next {
                turn += 1;
                let done = reports.turn(&mut |event, message| self.tell(event, message));
                reported = done.err().map(|failure| failure.to_string());
                published = self.publish(&mut member, turn).err();
                next = Instant::now() + PERIOD;
            }
            let mut moved = None;
            // An object that can't be read keeps nothing else from going on.
            if matches!(published, None | Some(FleetError::Object(_))) {
                let tell = &mut |event, message: &str| self.tell(event, message);
                moved = mover.turn(member.fleet(), tell).err();
            }
            let is_lasting = |error: &mut FleetError| error.is_lasting();
            if let Some(error) = published.take_if(is_lasting).or(moved.take_if(is_lasting)) {
                return Left::Failed(error.into());
            }
            let words = |error: &FleetError| vmferry::chain(error);
            let problem = published.as_ref().or(moved.as_ref()).map(words);
            let problem = reported.clone().or(problem);
            if let Some(problem) = problem.as_ref().filter(|_| problem != told) {
                self.tell(json!({ "event": "fleet-silent" }), problem);
            }
            told = problem;
            if self.daemon.rest(next) == Rested::DaemonEnded {
                // Otherwise the host counts as present until its lease ends.
                let _ = member.end();
                return Left::DaemonEnded;
            }
        }
    }

    fn publish(&self, member: &mut Membership, turn: u32) -> Result<(), FleetError> {
        if turn.is_multiple_of(KEEP_EVERY) || turn == 1 {
            member.keep(HostFacts::default().with_memory().memory_available)?;
        }
        if turn.is_multiple_of(CHECK_EVERY) {
            member.check()?;
        }
        let guests = self.guests.lock().clone();
        let published = guests.map_or(Ok(()), |guests| member.publish(guests));
        if turn.is_multiple_of(CHECK_EVERY)
            // While the file is wrong, the host says what it said before.
            && let Ok(config) = Configuration::read(self.config)
        {
            let templates = config.template_names();
            member.describe(Host { templates, ..self.about.clone() })?;
        }
        published
    }

    fn tell(&self, mut event: Value, message: &str) {
        event["message"] = message.into();
        self.output.event(&event, || message.to_owned());
    }
}
