//! `vmferry daemon`: carries the migrations of this host's libvirt, and other connections, to other
//! hosts and from them.
//!
//! The daemon restricts itself before it accepts connections. Two processes beside it are not
//! restricted and read only from it: its helper and the one that starts receivers.

pub mod agent;
pub mod config;
pub mod domains;
pub mod helper;
pub mod keeper;
mod lines;
pub mod receivers;
mod report;
mod resources;
mod served;
pub mod streams;

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::json;
use vmferry_control::Directories;
use vmferry_proxy::{BoundProxy, Proxy, ProxyConfig, ProxyError, ProxyEvent};
use vmferry_transport::{FileVersion, TransportError};

use super::prepared_directories;
use crate::args::DaemonOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::restrict::restrict_daemon;
use agent::Agent;
use agent::mover::Admitted;
use config::Configuration;
use helper::{Helper, HelperError};
use receivers::ReceiverStarter;
use served::Guests;
use streams::Streams;

/// The libvirt that receives guests, as its clients on this host name it.
const LIBVIRT: &str = "qemu:///system";

/// How often the configuration file is checked for changes.
const CHECK_PERIOD: Duration = Duration::from_secs(1);

/// Runs until a signal.
pub fn run(options: &DaemonOptions, output: &Output) -> Result<(), Failure> {
    // Taken before the file is read, so that a change in between is noticed.
    let seen = FileVersion::of(&options.config);
    let current = Configuration::read(&options.config)?;
    let admitted = Arc::new(Admitted::default());
    let mut config = current.proxy(output, current.qemu_owner()?, &admitted)?;
    if options.check {
        let (peers, forwards) = (current.peers(), current.forwards());
        output.result(&json!({ "ok": true, "peers": peers, "forwards": forwards }), || {
            format!("{} is right: {peers} peers, {forwards} rules", options.config.display())
        });
        return Ok(());
    }
    let directories = prepared_directories()?;
    let beside = Beside::spawn(options, &current, &directories)?;
    beside.helper.attempt().map_err(failed)?;
    beside.equip(&mut config);
    let bound = BoundProxy::bind(config).map_err(unusable)?;
    let socket = streams::bind(current.directory())?;
    // Until here there is only one thread, which `restrict_daemon` needs.
    let restrictions = restrict_daemon(options, &current, &directories)?;
    let (end, ended) = channel();
    let of_helper = end.clone();
    beside.helper.watch(move |status| {
        let _ = of_helper.send(End::Beside(HELPER, status));
    })?;
    if let Some(agent) = &beside.agent {
        let of_agent = end.clone();
        agent.listen(output, Arc::clone(&admitted), move |status| {
            let _ = of_agent.send(End::Beside(AGENT, status));
        })?;
    }
    beside.starter.listen(output)?;
    let guests = Arc::new(Guests::new(directories, Arc::clone(&beside.helper)));
    let streams = Arc::new(Streams::default());
    let (told, of_guests, of_streams) = (output.clone(), Arc::clone(&guests), Arc::clone(&streams));
    let observer = move |event: ProxyEvent| {
        of_guests.hear(&event);
        of_streams.hear(&event);
        // Peers have chosen some of its words, which must not look like another line.
        told.event(&event, || event.to_string().replace(char::is_control, " "));
    };
    let proxy = Arc::new(bound.start(Box::new(observer)).map_err(unusable)?);
    beside.helper.adopt().map_err(failed)?;
    guests.serve(&proxy);
    proxy.report(Arc::clone(&beside.helper) as _);
    let served = streams.serve(socket, &proxy);
    let _server = served.map_err(|error| Failure::of(Code::Internal, error))?;
    crate::signals::on_end(move || {
        let _ = end.send(End::Signal);
    })?;
    let address = proxy.address().to_string();
    let listening = json!({
        "event": "listening", "address": address, "pid": std::process::id(),
        "peers": current.peers(), "sandbox": restrictions,
    });
    output.event(&listening, || {
        let (peers, directory) = (current.peers(), current.directory().display());
        let restricted = restrictions.summary();
        format!(
            "listening on {address}; sockets of {peers} peers are in {directory} ({restricted})"
        )
    });
    let (proxy, beside) = (&proxy, &beside);
    let mut following = Following { options, current, seen, proxy, beside, admitted };
    following.until(&ended, output)
}

/// Why the daemon ends.
enum End {
    Signal,
    /// A process beside it has ended.
    Beside(&'static str, io::Result<ExitStatus>),
}

/// Without it sockets, libvirt and the keeper are out of reach. The next daemon has one, and finds
/// what the keeper holds.
const HELPER: &str = "helper (`vmferry help-daemon`)";

/// Without it no guest can be sent or received with a witness.
const AGENT: &str = "agent (`vmferry join-fleet`)";

/// What other processes do for the daemon.
struct Beside {
    helper: Arc<Helper>,
    starter: Arc<ReceiverStarter>,
    agent: Option<Agent>,
    journals: PathBuf,
}

impl Beside {
    fn spawn(
        options: &DaemonOptions,
        current: &Configuration,
        directories: &Directories,
    ) -> Result<Self, Failure> {
        let helper = Arc::new(Helper::spawn(&options.config)?);
        let starter = ReceiverStarter::spawn(&options.config, directories.runtime())?;
        let agent = current.has_fleet().then(|| Agent::spawn(&options.config)).transpose()?;
        let (starter, journals) = (Arc::new(starter), directories.journals());
        Ok(Self { helper, starter, agent, journals })
    }

    fn equip(&self, config: &mut ProxyConfig) {
        config.journals.clone_from(&self.journals);
        config.domains = Some(Arc::clone(&self.helper) as _);
        config.definition_facts = Some(Arc::clone(&self.helper) as _);
        config.keeper = Some(Arc::clone(&self.helper) as _);
        config.access = Some(Arc::clone(&self.helper) as _);
        config.receivers = Some(Arc::clone(&self.starter) as _);
    }
}

/// Where the keeper of this user's daemon listens.
pub fn keeper_socket(directories: &Directories) -> PathBuf {
    // Without the ending of guests' control sockets.
    directories.runtime().join("keeper")
}

/// Follows the configuration file.
struct Following<'a> {
    options: &'a DaemonOptions,
    current: Configuration,
    seen: Option<FileVersion>,
    proxy: &'a Proxy,
    beside: &'a Beside,
    admitted: Arc<Admitted>,
}

impl Following<'_> {
    fn until(&mut self, ended: &Receiver<End>, output: &Output) -> Result<(), Failure> {
        loop {
            match ended.recv_timeout(CHECK_PERIOD) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(End::Signal) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Ok(End::Beside(which, status)) => return Err(without(which, status)),
            }
            let now = FileVersion::of(&self.options.config);
            if now == self.seen {
                continue;
            }
            self.seen = now;
            let said = match self.reload(output) {
                Ok(()) => "the configuration has changed, and the new one is in use".to_owned(),
                Err(failure) => {
                    format!("the configuration has changed and is not usable: {failure}")
                }
            };
            output.event(&json!({ "event": "configuration", "message": said }), || said.clone());
        }
    }

    fn reload(&mut self, output: &Output) -> Result<(), Failure> {
        let fresh = Configuration::read(&self.options.config)?;
        self.current.check_change(&fresh)?;
        let helper = &self.beside.helper;
        let qemu = helper.attempt().map_err(failed)?;
        let configured = fresh.proxy(output, qemu, &self.admitted).and_then(|mut config| {
            self.beside.equip(&mut config);
            let configured = self.proxy.reconfigure(config);
            configured.map_err(|error| Failure::of(Code::Usage, error))
        });
        if let Err(failure) = configured {
            helper.abandon().map_err(failed)?;
            return Err(failure);
        }
        helper.adopt().map_err(failed)?;
        self.current = fresh;
        Ok(())
    }
}

fn failed(error: HelperError) -> Failure {
    Failure::of(Code::Internal, error)
}

fn without(which: &str, status: io::Result<ExitStatus>) -> Failure {
    let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
    let text =
        format!("the daemon's {which} has ended ({how}), so the daemon ends too: start it again");
    Failure::new(Code::Internal, text)
}

/// Why a proxy can't start.
fn unusable(error: ProxyError) -> Failure {
    let code = match &error {
        ProxyError::Listen(TransportError::AddressInUse { .. }) => Code::Busy,
        ProxyError::Listen(_) => Code::Connect,
        ProxyError::Name { .. } | ProxyError::Twice { .. } | ProxyError::PathTwice { .. } => {
            Code::Usage
        }
        _ => Code::Internal,
    };
    Failure::of(code, error)
}
