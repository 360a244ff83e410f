//! A small QMP client.
//!
//! Source: QEMU's `docs/interop/qmp-spec.rst` and the QMP reference manual. One command is in
//! flight at a time. Events that arrive in between are kept until a caller waits for them.

mod error;
mod events;
mod kept;
mod lines;
mod open;
mod process;
mod socket;
mod sockets;
#[cfg(test)]
mod tests;

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;
use serde_json::{Value, json};
use vmferry::PoweredOff;

pub(crate) use error::shown;
pub use error::{Client, QmpError, Version};
use events::Events;
pub use kept::KeptConnection;
use lines::Lines;
pub(crate) use process::threads_here;
pub(crate) use sockets::{credentials, processes};

use crate::life::Life;
use crate::proc_stat::is_stopped;

/// Bytes per read.
const CHUNK: usize = 16 << 10;

/// Bytes of an unexpected answer that are shown.
const MOST_SHOWN: usize = 200;

/// The most bytes that are read in one go without waiting. The rest is read the next time.
const MOST_NEWS: usize = 1 << 20;

/// How long QEMU may take to answer a command. Some stop the guest first.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long to listen to a QEMU that has not answered in time before the next command. It gets none
/// until it is heard again: it is unknown when it would execute the command.
const SILENT_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection to one QEMU.
pub struct Qmp {
    path: PathBuf,
    stream: UnixStream,
    lines: Lines,
    version: Version,
    /// The process that listens, until it is proven which one QEMU is.
    pid: Option<u32>,
    events: Events,
    /// What it has reported about its guest.
    pub(crate) life: Life,
    /// How long it may take to answer.
    patience: Duration,
    /// The number of the last command, which its answer repeats.
    number: u64,
    /// The last command was not answered in time, and nothing was heard since.
    silent: bool,
    /// It executes some commands out of band.
    has_out_of_band: bool,
    /// An earlier process may have read the first part of the first line.
    may_begin_within: bool,
}

impl Qmp {
    /// The socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// QEMU's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// QEMU and its version, for messages.
    #[must_use]
    pub fn release(&self) -> String {
        format!("QEMU {}", self.version)
    }

    /// The QEMU process, if it is proven which one it is. In another PID namespace it is not
    /// visible.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// The process that listens on the socket, which need not be QEMU.
    pub(crate) fn listener(&self) -> Option<u32> {
        sockets::listener(&self.stream)
    }

    /// Sets how long to wait for each answer.
    pub(crate) fn be_patient_for(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Executes a command and returns its result.
    ///
    /// # Errors
    /// QEMU's refusal, or connection errors.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.send(command, arguments, None, |_| false)
    }

    /// Executes a command that QEMU carries out even while its main loop does nothing, if QEMU has
    /// such commands at this socket.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn execute_out_of_band(
        &mut self,
        command: &str,
        arguments: Value,
    ) -> Result<Value, QmpError> {
        if !self.has_out_of_band {
            return self.execute(command, arguments);
        }
        self.write_line("exec-oob", command, arguments, None)?;
        self.answer(command, |_| false)
    }

    /// Executes a command whose answer may come late. Returns as soon as there is an answer, or an
    /// event that shows that QEMU obeys. The event is kept for later callers.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn order(
        &mut self,
        command: &str,
        arguments: Value,
        is_followed: impl Fn(&Value) -> bool,
    ) -> Result<(), QmpError> {
        self.send(command, arguments, None, is_followed).map(|_| ())
    }

    /// Tells QEMU to quit. QEMU does not promise to answer this command before it ends (`quit` in
    /// its QMP reference), so the end of the connection is an answer, too.
    ///
    /// # Errors
    /// As [`execute`](Self::execute), if the command could not be sent or was not obeyed.
    pub fn quit(&mut self) -> Result<(), QmpError> {
        self.write_command("quit", json!({}), None)?;
        match self.answer("quit", |_| false) {
            Ok(_) | Err(QmpError::Io { .. } | QmpError::Ended { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Passes a descriptor to QEMU under a name.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn give_descriptor(&mut self, name: &str, file: impl AsFd) -> Result<(), QmpError> {
        self.send("getfd", json!({ "fdname": name }), Some(file.as_fd()), |_| false).map(|_| ())
    }

    /// Executes a command of the human monitor and returns its output.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn human(&mut self, line: &str) -> Result<String, QmpError> {
        let text = self.execute("human-monitor-command", json!({ "command-line": line }))?;
        Ok(text.as_str().unwrap_or_default().to_owned())
    }

    /// Waits for an event.
    ///
    /// # Errors
    /// [`QmpError::TimedOut`], or connection errors.
    pub fn wait_for(
        &mut self,
        what: &str,
        after: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Value, QmpError> {
        let deadline = Instant::now() + after;
        loop {
            if let Some(event) = self.events.take(&wanted) {
                return Ok(event);
            }
            let Some((message, bytes)) = self.read(deadline)? else {
                return Err(self.timed_out(what, after));
            };
            self.keep_event(message, bytes);
        }
    }

    /// The error for something that QEMU has not done in time.
    #[must_use]
    pub fn timed_out(&self, what: &str, after: Duration) -> QmpError {
        QmpError::TimedOut {
            path: self.path.clone(),
            pid: self.pid,
            what: what.to_owned(),
            after,
            stopped: self.pid.is_some_and(is_stopped),
        }
    }

    /// Takes the last event of this name that has already come.
    pub fn take_event(&mut self, name: &str) -> Option<Value> {
        self.events.take_last(|event| event["event"] == name)
    }

    /// Drops the events that have come so far.
    pub fn forget_events(&mut self) {
        self.events = Events::default();
    }

    fn send(
        &mut self,
        command: &str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
        is_followed: impl Fn(&Value) -> bool,
    ) -> Result<Value, QmpError> {
        self.write_command(command, arguments, descriptor)?;
        self.answer(command, is_followed)
    }

    fn write_command(
        &mut self,
        command: &str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), QmpError> {
        if self.silent {
            let what = format!("answer, so that it could be told to `{command}`,");
            let Some((message, bytes)) = self.read(Instant::now() + SILENT_TIMEOUT)? else {
                return Err(self.timed_out(&what, SILENT_TIMEOUT));
            };
            self.keep_event(message, bytes);
        }
        self.write_line("execute", command, arguments, descriptor)
    }

    fn write_line(
        &mut self,
        way: &str,
        command: &str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), QmpError> {
        self.number += 1;
        let mut line =
            json!({ way: command, "arguments": arguments, "id": self.number }).to_string();
        line.push('\n');
        let written = socket::write(&self.stream, line.as_bytes(), descriptor);
        written.map_err(|source| self.broken("send a command", source))
    }

    /// Waits for the answer to the last command, or for an event that shows that QEMU obeys it.
    fn answer(
        &mut self,
        command: &str,
        is_followed: impl Fn(&Value) -> bool,
    ) -> Result<Value, QmpError> {
        let deadline = Instant::now() + self.patience;
        loop {
            let Some((mut message, bytes)) = self.read(deadline)? else {
                self.silent = true;
                return Err(self.timed_out(&format!("answer to `{command}`"), self.patience));
            };
            if message.get("event").is_some() {
                let followed = is_followed(&message);
                self.keep_event(message, bytes);
                if followed {
                    return Ok(Value::Null);
                }
            } else if message.get("id").is_some_and(|id| *id != self.number) {
                // A late answer to an earlier command.
            } else if let Some(error) = message.get("error") {
                return Err(QmpError::Refused {
                    command: command.to_owned(),
                    message: error["desc"].as_str().unwrap_or("without a reason").to_owned(),
                });
            } else if message.get("return").is_some() {
                return Ok(message["return"].take());
            } else {
                return Err(self.unexpected(&message.to_string()));
            }
        }
    }

    /// The next message, and the length of its line; `None` if none came in time. After the
    /// deadline nothing more is read: an endless stream of events can't keep the caller here.
    fn read(&mut self, deadline: Instant) -> Result<Option<(Value, usize)>, QmpError> {
        loop {
            if let Some(message) = self.next_message()? {
                return Ok(Some(message));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let mut bytes = [0; CHUNK];
            let read = self
                .stream
                .set_read_timeout(Some(left))
                .and_then(|()| self.stream.read(&mut bytes));
            let taken = match read {
                Ok(read) => self.take_bytes(&bytes[..read]),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock
                            | io::ErrorKind::TimedOut
                            | io::ErrorKind::Interrupted
                    ) =>
                {
                    Ok(())
                }
                Err(error) => Err(error),
            };
            taken.map_err(|source| self.broken("read an answer", source))?;
        }
    }

    /// Takes the events that have come, including earlier ones, without waiting for more.
    ///
    /// # Errors
    /// Connection errors, such as that of a QEMU that has ended, once all events are taken.
    pub fn events(&mut self) -> Result<Vec<Value>, QmpError> {
        self.gather_events()?;
        Ok(self.events.take_all())
    }

    /// Looks at the events that have come and keeps them for later callers.
    ///
    /// # Errors
    /// As [`events`](Self::events).
    pub fn look_at_events(&mut self) -> Result<impl Iterator<Item = &Value>, QmpError> {
        self.gather_events()?;
        Ok(self.events.iter())
    }

    fn gather_events(&mut self) -> Result<(), QmpError> {
        let received = self.receive();
        self.keep_events()?;
        match received {
            Err(source) if self.events.is_empty() => Err(self.broken("read an answer", source)),
            _ => Ok(()),
        }
    }

    /// Keeps the events among the messages that have come, none of which is awaited.
    fn keep_events(&mut self) -> Result<(), QmpError> {
        while let Some((message, bytes)) = self.next_message()? {
            self.keep_event(message, bytes);
        }
        Ok(())
    }

    /// Reads what has come.
    fn receive(&mut self) -> io::Result<()> {
        for _ in 0..MOST_NEWS / CHUNK {
            let mut bytes = [0; CHUNK];
            match rustix::net::recv(&self.stream, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((read, _)) => self.take_bytes(&bytes[..read])?,
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Whether events have come that no caller has taken.
    #[must_use]
    pub fn has_news(&self) -> bool {
        !self.events.is_empty() || self.lines.has_whole()
    }

    /// The connection, for polling.
    ///
    /// # Errors
    /// System call errors.
    pub fn descriptor(&self) -> Result<OwnedFd, QmpError> {
        let copy = self.stream.as_fd().try_clone_to_owned();
        copy.map_err(|source| self.io("duplicate the connection", source))
    }

    /// The user that the peer process had when it created the socket.
    ///
    /// # Errors
    /// System call errors.
    pub fn user(&self) -> Result<u32, QmpError> {
        sockets::credentials(&self.stream)
            .map(|credentials| credentials.uid)
            .map_err(|error| self.io("find the process", error))
    }

    fn take_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "QEMU closed it"));
        }
        self.silent = false;
        self.lines.take(bytes);
        Ok(())
    }

    fn next_message(&mut self) -> Result<Option<(Value, usize)>, QmpError> {
        match self.lines.next() {
            Ok(Some(line)) => match serde_json::from_slice(line) {
                Ok(message) => Ok(Some((message, line.len()))),
                Err(_) if std::mem::take(&mut self.may_begin_within) => self.next_message(),
                Err(_) => {
                    let text = String::from_utf8_lossy(line).into_owned();
                    Err(self.unexpected(&text))
                }
            },
            Ok(None) => Ok(None),
            Err(endless) => Err(self.unexpected(&endless.to_string())),
        }
    }

    /// The error for something that is no answer, with its first bytes.
    fn unexpected(&self, text: &str) -> QmpError {
        let shown = text.floor_char_boundary(MOST_SHOWN);
        let more = if shown < text.len() { "…" } else { "" };
        QmpError::Answer { path: self.path.clone(), text: format!("{}{more}", &text[..shown]) }
    }

    fn keep_event(&mut self, message: Value, bytes: usize) {
        if message.get("event").is_some() {
            self.life.hear(&message);
            self.events.keep(message, bytes);
        }
    }

    /// The error of a connection that has failed. QEMU reports that its guest has powered off
    /// before it ends and closes the connection, and this event may not have been read yet.
    fn broken(&mut self, action: &'static str, source: io::Error) -> QmpError {
        // The connection has failed already: only what was sent before matters.
        let _ = self.receive();
        let _ = self.keep_events();
        if self.life.powered_off {
            return QmpError::Ended { path: self.path.clone(), cause: PoweredOff };
        }
        self.io(action, source)
    }

    fn io(&self, action: &'static str, source: io::Error) -> QmpError {
        QmpError::Io { path: self.path.clone(), action, source }
    }
}
