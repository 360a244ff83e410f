//! The process that starts receivers, `vmferry start-receivers`. It reads only from its daemon, and
//! ends with it. The receivers live on, and the next daemon's process finds them by their records.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use parking_lot::Mutex;
use vmferry_handover::SessionId;
use vmferry_handover::journal::{self, Side, recover_destination};
use vmferry_proxy::is_plain_name;
use vmferry_wire::{Reason, ReasonCode};

use super::messages::{Ask, Order, Said};
use super::receiver;
use super::record::Record;
use super::template::{self, Purpose};
use crate::args::ReceiverStarterOptions;
use crate::commands::daemon::config::Configuration;
use crate::commands::daemon::lines;
use crate::commands::fleet::witness::witness_socket;
use crate::commands::prepared_directories;
use crate::exit::Failure;

/// Events that wait for a daemon that does not read. More are dropped, so that no receiver waits.
const MAX_SAID: usize = 256;

/// What all threads of the process share.
pub struct Shared {
    config: PathBuf,
    pub directory: PathBuf,
    /// Where the agent provides the witness, if this host is in a fleet.
    witness: PathBuf,
    journals: PathBuf,
    receivers: Mutex<HashMap<SessionId, ()>>,
    said: SyncSender<Said>,
}

/// The entry of a receiver, until it has ended.
pub struct Place {
    shared: Arc<Shared>,
    session: SessionId,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.receivers.lock().remove(&self.session);
    }
}

/// Serves the daemon at the other end of standard input.
pub fn serve(options: &ReceiverStarterOptions) -> Result<(), Failure> {
    // It ends when the daemon does.
    crate::signals::ignore()?;
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let directories = prepared_directories()?;
    let directory = super::directory(directories.runtime());
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
    let (said, to_say) = sync_channel(MAX_SAID);
    let shared = Arc::new(Shared {
        config: options.config.clone(),
        directory,
        witness: witness_socket(&directories),
        journals: directories.journals(),
        receivers: Mutex::default(),
        said,
    });
    let writer = socket.try_clone()?;
    std::thread::Builder::new().name("said".into()).spawn(move || say(&writer, &to_say))?;
    for record in Record::all(&shared.directory)? {
        let session = record.order.session;
        shared.receivers.lock().insert(session, ());
        let place = Place { shared: Arc::clone(&shared), session };
        receiver::follow(record, place)?;
    }
    let mut reader = BufReader::new(socket);
    while let Some(Ask { number, order }) = lines::read(&mut reader)? {
        let of_thread = Arc::clone(&shared);
        let spawned = std::thread::Builder::new().name("start".into()).spawn(move || {
            let refusal = start(&of_thread, order).err();
            let refusal = refusal.map(|reason| (reason.code.into(), reason.text));
            // If the daemon has gone, so has its source's connection.
            let _ = of_thread.said.send(Said::Answer { number, refusal });
        });
        if let Err(error) = spawned {
            let refusal = Some((ReasonCode::Internal.into(), error.to_string()));
            let _ = shared.said.send(Said::Answer { number, refusal });
        }
    }
    Ok(())
}

fn say(mut socket: &UnixStream, to_say: &Receiver<Said>) {
    while let Ok(said) = to_say.recv() {
        let written = lines::line(&said).and_then(|line| socket.write_all(&line));
        if written.is_err() {
            return;
        }
    }
}

impl Shared {
    /// Tells the daemon of an event, unless it is far behind.
    pub fn tell(&self, said: Said) {
        let _ = self.said.try_send(said);
    }

    /// The arguments of a receiver. The file is read each time, because it may have changed.
    pub fn arguments(
        &self,
        order: &Order,
        socket: &Path,
        purpose: Purpose,
    ) -> Option<Vec<OsString>> {
        let config = Configuration::read(&self.config).ok()?;
        let found = config.template(&order.template);
        let mut link = config.receiver_options().ok()?;
        // A recovery answers for what a receiver has left, without asking.
        if config.has_fleet() && purpose == Purpose::Receive {
            link.extend(["--witness".into(), self.witness.clone().into()]);
        }
        Some(template::arguments(found, order, socket, link, purpose))
    }

    /// Makes an entry for a receiver, if there may be one more.
    fn enter(self: &Arc<Self>, session: SessionId, most: usize) -> Result<Place, Reason> {
        let busy = |text: String| Reason::new(ReasonCode::Busy, &text);
        let mut receivers = self.receivers.lock();
        if receivers.contains_key(&session) {
            return Err(busy(format!("session {session} has a receiver there already")));
        }
        // Those whose guest is here wait for its end, and take nothing.
        let arriving = receivers.keys().filter(|session| !self.has_arrived(**session)).count();
        if arriving >= most {
            return Err(busy(format!(
                "{arriving} guests are arriving there already, and its daemon allows {most} \
                 (`max_receivers`): try again later"
            )));
        }
        receivers.insert(session, ());
        Ok(Place { shared: Arc::clone(self), session })
    }

    fn has_arrived(&self, session: SessionId) -> bool {
        let records = journal::read(&self.journals, session, Side::Destination);
        let state = records.ok().and_then(|records| recover_destination(&records));
        state.is_some_and(|(state, _)| state.may_run())
    }
}

impl Place {
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

fn start(shared: &Arc<Shared>, order: Order) -> Result<(), Reason> {
    let incompatible = |text: &str| Reason::new(ReasonCode::Incompatible, text);
    let config = Configuration::read(&shared.config)
        .map_err(|failure| Reason::new(ReasonCode::Internal, &failure.to_string()))?;
    // The daemon has checked both, unless somebody else speaks for it.
    if !is_plain_name(&order.template) || !is_plain_name(&order.guest.name) {
        return Err(incompatible("a name is not allowed"));
    }
    if config.template(&order.template).is_none() {
        return Err(incompatible(&format!(
            "its daemon has no template {:?}: add a `[[receive]]` with this name to its \
             configuration, or ask for another one",
            order.template
        )));
    }
    let place = shared.enter(order.session, config.max_receivers())?;
    receiver::start(order, place)
}
