//! Receivers of guests of QEMU, each in a process of its own that outlives the daemon.
//!
//! ```text
//!  daemon <-- socket --> vmferry start-receivers --starts--> vmferry receive, one for each guest
//!     |                                                            ^
//!     +-------- connections with its ticket, as descriptors -------+
//! ```
//! The daemon reads from the network and starts nothing itself. The process that does so takes
//! commands from the configuration file only.

mod messages;
pub mod process;
mod receiver;
mod record;
pub mod template;

use std::collections::HashMap;
use std::io::{BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{
    self, RecvTimeoutError, Sender, SyncSender, TrySendError, channel, sync_channel,
};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use vmferry_handover::SessionId;
use vmferry_proxy::{ReceiveRequest, Receivers};
use vmferry_transport::PeerIdentity;
use vmferry_wire::{Reason, ReasonCode};

use self::messages::{Ask, Order, Said};
use super::lines;
use crate::exit::Failure;
use crate::output::Output;

/// The directory of sockets and records of receivers, in the runtime directory.
pub fn directory(runtime: &Path) -> PathBuf {
    runtime.join("receivers")
}

/// Orders that wait for the process to read them. It reads each at once.
const MAX_ORDERS: usize = 64;

/// How long a request waits for its receiver: longer than the process does, and less than the
/// source, which waits 150 s.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(145);

/// The daemon's end.
#[derive(Debug)]
pub struct ReceiverStarter {
    directory: PathBuf,
    socket: UnixStream,
    orders: SyncSender<Ask>,
    asking: Arc<Mutex<Asking>>,
    /// The process, until [`listen`](Self::listen).
    unheard: Mutex<Option<Unheard>>,
}

/// What no thread reads yet.
#[derive(Debug)]
struct Unheard {
    socket: UnixStream,
    child: Child,
    orders: mpsc::Receiver<Ask>,
}

/// Requests without an answer. It is locked only for moments, and never for the socket.
#[derive(Debug)]
struct Asking {
    number: u64,
    /// `None` once the process has ended.
    waiting: Option<HashMap<u64, Sender<Result<(), Reason>>>>,
}

impl ReceiverStarter {
    /// Starts the process, and no thread. It ends with the daemon.
    pub fn spawn(config: &Path, runtime: &Path) -> Result<Self, Failure> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["start-receivers", "--config"]).arg(std::path::absolute(config)?);
        Self::with(command, runtime)
    }

    fn with(mut command: Command, runtime: &Path) -> Result<Self, Failure> {
        let (ours, theirs) = UnixStream::pair()?;
        // A signal for the daemon's process group must reach neither it nor the receivers.
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).process_group(0);
        let child = command.spawn()?;
        let (orders, to_pass) = sync_channel(MAX_ORDERS);
        let unheard = Unheard { socket: ours.try_clone()?, child, orders: to_pass };
        let asking = Asking { number: 0, waiting: Some(HashMap::new()) };
        Ok(Self {
            directory: directory(runtime),
            socket: ours,
            orders,
            asking: Arc::new(Mutex::new(asking)),
            unheard: Mutex::new(Some(unheard)),
        })
    }

    /// Hears from now on what the process says. Without this, requests get no answer.
    pub fn listen(&self, output: &Output) -> Result<(), Failure> {
        let Some(Unheard { socket, child, orders }) = self.unheard.lock().take() else {
            return Ok(());
        };
        let (asking, output, writer) =
            (Arc::clone(&self.asking), output.clone(), socket.try_clone()?);
        let thread = std::thread::Builder::new().name("orders".into());
        thread.spawn(move || pass_on(&orders, &writer))?;
        let thread = std::thread::Builder::new().name("receivers".into());
        thread.spawn(move || listen(socket, child, &asking, &output))?;
        Ok(())
    }
}

impl Drop for ReceiverStarter {
    fn drop(&mut self) {
        // If it has ended already, so much the better.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

/// A request, which is forgotten when it is dropped.
struct Request<'a> {
    asking: &'a Mutex<Asking>,
    number: u64,
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        if let Some(waiting) = &mut self.asking.lock().waiting {
            waiting.remove(&self.number);
        }
    }
}

impl Receivers for ReceiverStarter {
    fn start(&self, request: &ReceiveRequest, source: &PeerIdentity) -> Result<(), Reason> {
        let ended = || {
            let text = "the process that starts receivers there has ended: start the daemon again";
            Reason::new(ReasonCode::Internal, text)
        };
        let silent = |code, problem: &str| {
            let text = format!(
                "the process that starts receivers there (`vmferry start-receivers`) {problem}: \
                 look whether it is stopped, and try again"
            );
            Reason::new(code, &text)
        };
        let ReceiveRequest { template, guest, session } = request.clone();
        let source = source.names.first().cloned();
        let order = Order { template, guest, session, source };
        let (answer, answered) = channel();
        let number = {
            let mut asking = self.asking.lock();
            asking.number += 1;
            let number = asking.number;
            asking.waiting.as_mut().ok_or_else(ended)?.insert(number, answer);
            number
        };
        let _request = Request { asking: &self.asking, number };
        match self.orders.try_send(Ask { number, order }) {
            Ok(()) => {}
            Err(TrySendError::Disconnected(_)) => return Err(ended()),
            Err(TrySendError::Full(_)) => {
                let problem = format!("has not read {MAX_ORDERS} requests yet");
                return Err(silent(ReasonCode::Busy, &problem));
            }
        }
        match answered.recv_timeout(ANSWER_TIMEOUT) {
            Ok(answered) => answered,
            Err(RecvTimeoutError::Disconnected) => Err(ended()),
            Err(RecvTimeoutError::Timeout) => {
                let problem = format!("has not answered for {} s", ANSWER_TIMEOUT.as_secs());
                Err(silent(ReasonCode::TimedOut, &problem))
            }
        }
    }

    fn socket(&self, session: SessionId) -> PathBuf {
        record::socket(&self.directory, session)
    }
}

/// Writes orders to the process, which may be stopped, until it or the daemon ends.
fn pass_on(orders: &mpsc::Receiver<Ask>, mut socket: &UnixStream) {
    while let Ok(ask) = orders.recv() {
        // Its reader notices that the process has ended.
        if lines::line(&ask).and_then(|line| socket.write_all(&line)).is_err() {
            return;
        }
    }
}

/// Reads what the process says, until it ends.
fn listen(socket: UnixStream, mut child: Child, asking: &Mutex<Asking>, output: &Output) {
    let mut reader = BufReader::new(socket);
    while let Ok(Some(said)) = lines::read(&mut reader) {
        match said {
            Said::Answer { number, refusal } => {
                let answer = match refusal {
                    None => Ok(()),
                    Some((code, text)) => Err(Reason::new(code.into(), &text)),
                };
                let mut asking = asking.lock();
                let waiting = asking.waiting.as_mut().and_then(|all| all.remove(&number));
                if let Some(waiting) = waiting {
                    let _ = waiting.send(answer);
                }
            }
            Said::Event { guest, session, said } => {
                let event = json!({
                    "event": "receiver", "guest": guest, "session": session, "said": said,
                });
                output.event(&event, || format!("receiver of {guest}: {}", in_words(&said)));
            }
        }
    }
    asking.lock().waiting = None;
    // A process that has closed its socket ends.
    let _ = child.wait();
}

/// A receiver's event for people.
fn in_words(said: &Value) -> String {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    if let Some(message) = text(&said["error"]["message"]) {
        return message;
    }
    let name = text(&said["event"]).unwrap_or_else(|| "notice".into());
    let more = ["message", "reason", "why"].iter().find_map(|member| text(&said[*member]));
    more.map_or_else(|| name.clone(), |more| format!("{name}: {more}"))
}

#[cfg(test)]
mod tests;
