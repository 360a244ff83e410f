//! A small QMP client.
//!
//! Source: QEMU's `docs/interop/qmp-spec.rst` and the QMP reference manual. One command at a time; what
//! comes in between are events, which are kept until somebody waits for them.

mod error;
mod lines;
mod socket;

use std::collections::VecDeque;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;
use serde_json::{Value, json};

pub(crate) use error::shown;
pub use error::{QmpError, Version};
use lines::Lines;

use crate::process;

/// So many bytes are read at a time.
const CHUNK: usize = 16 << 10;

/// Events that nobody has waited for and that are kept, the newest ones: more than QEMU says in a migration.
const MOST_EVENTS: usize = 4096;

/// So many bytes of an unexpected answer are shown.
const MOST_SHOWN: usize = 200;

/// So much is read at once without waiting: whoever says more goes on being read the next time.
const MOST_NEWS: usize = 1 << 20;

/// How long QEMU may take to answer a command. Some stop the guest first.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a QEMU that has not answered in time is listened to before the next order. It gets none before it is heard
/// again: nobody knows when it would follow it.
const SILENT_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection to one QEMU.
pub struct Qmp {
    path: PathBuf,
    stream: UnixStream,
    lines: Lines,
    version: Version,
    pid: u32,
    events: VecDeque<Value>,
    /// The number of the last command; its answer has it too.
    number: u64,
    /// The last command was not answered in time, and nothing was heard since.
    silent: bool,
}

impl Qmp {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// If nobody listens, or what listens is no QEMU.
    pub fn connect(path: &Path) -> Result<Self, QmpError> {
        let io = |action| {
            let path = path.to_owned();
            move |source| QmpError::Io { path, action, source }
        };
        let connected = socket::connect(path, ANSWER_TIMEOUT).map_err(io("connect"))?;
        let Some(stream) = connected else {
            // Its queue is full of others that wait, so who listens there can't be known.
            let source = io::Error::new(io::ErrorKind::TimedOut, "too many wait there already");
            return Err(io("connect")(source));
        };
        Self::over(stream, path)
    }

    /// Negotiates on a connected socket; `path` is its name in errors.
    ///
    /// # Errors
    /// If what is at the other end is no QEMU.
    pub fn over(stream: UnixStream, path: &Path) -> Result<Self, QmpError> {
        let io = |action| {
            let path = path.to_owned();
            move |source| QmpError::Io { path, action, source }
        };
        let listener = rustix::net::sockopt::socket_peercred(&stream)
            .map_err(|errno| io("find the process")(errno.into()))?;
        let mut qmp = Self {
            path: path.to_owned(),
            stream,
            lines: Lines::default(),
            version: Version { major: 0, minor: 0, micro: 0 },
            pid: listener.pid.as_raw_nonzero().get().unsigned_abs(),
            events: VecDeque::new(),
            number: 0,
            silent: false,
        };
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let greeting = loop {
            let Some(message) = qmp.read(deadline)? else {
                return Err(qmp.timed_out("greet a client", ANSWER_TIMEOUT));
            };
            // QEMU 10.0 may send an event first to whoever comes directly behind another client.
            if message.get("event").is_none() {
                break message;
            }
        };
        let number = |part: &str| greeting["QMP"]["version"]["qemu"][part].as_u64();
        let (Some(major), Some(minor), Some(micro)) =
            (number("major"), number("minor"), number("micro"))
        else {
            return Err(qmp.unexpected(&greeting.to_string()));
        };
        qmp.version = Version { major, minor, micro };
        qmp.execute("qmp_capabilities", json!({}))?;
        qmp.pid = qmp.find_pid()?;
        Ok(qmp)
    }

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

    /// QEMU and its version, for people.
    #[must_use]
    pub fn release(&self) -> String {
        format!("QEMU {}", self.version)
    }

    /// The QEMU process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The process that listens on the socket, as the system says; or, if a management tool has made the
    /// socket and passed it on, the one that the first vCPU's thread belongs to.
    fn find_pid(&mut self) -> Result<u32, QmpError> {
        let listener = self.pid;
        let vcpus = self.execute("query-cpus-fast", json!({}))?;
        let Some(thread) = vcpus[0]["thread-id"].as_u64() else { return Ok(listener) };
        if Path::new(&format!("/proc/{listener}/task/{thread}")).exists() {
            return Ok(listener);
        }
        let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
        let process =
            status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
        Ok(process.unwrap_or(listener))
    }

    /// Runs a command and returns what it returns.
    ///
    /// # Errors
    /// QEMU's refusal, or the connection's.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.send(command, arguments, None, |_| false)
    }

    /// Runs a command whose answer may come late. Returns as soon as there is an answer or an event that shows
    /// that the command is followed; it is left for whoever waits for it.
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

    /// Gives QEMU a descriptor under a name.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn give_descriptor(&mut self, name: &str, file: impl AsFd) -> Result<(), QmpError> {
        self.send("getfd", json!({ "fdname": name }), Some(file.as_fd()), |_| false).map(|_| ())
    }

    /// Runs a command of the human monitor and returns its text.
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
    /// [`QmpError::TimedOut`], or the connection's.
    pub fn wait_for(
        &mut self,
        what: &str,
        after: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Value, QmpError> {
        let deadline = Instant::now() + after;
        loop {
            if let Some(at) = self.events.iter().position(&wanted)
                && let Some(event) = self.events.remove(at)
            {
                return Ok(event);
            }
            let Some(message) = self.read(deadline)? else {
                return Err(self.timed_out(what, after));
            };
            self.keep_event(message);
        }
    }

    /// The error for what QEMU has not done in time.
    #[must_use]
    pub fn timed_out(&self, what: &str, after: Duration) -> QmpError {
        QmpError::TimedOut {
            path: self.path.clone(),
            pid: self.pid,
            what: what.to_owned(),
            after,
            stopped: process::is_stopped(self.pid),
        }
    }

    /// An event that has come already, the last of its name.
    pub fn take_event(&mut self, name: &str) -> Option<Value> {
        let at = self.events.iter().rposition(|event| event["event"] == name)?;
        self.events.remove(at)
    }

    /// Forgets the events that came before.
    pub fn forget_events(&mut self) {
        self.events.clear();
    }

    fn send(
        &mut self,
        command: &str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
        is_followed: impl Fn(&Value) -> bool,
    ) -> Result<Value, QmpError> {
        if self.silent {
            let what = format!("answer, so that it could be told to `{command}`,");
            let Some(message) = self.read(Instant::now() + SILENT_TIMEOUT)? else {
                return Err(self.timed_out(&what, SILENT_TIMEOUT));
            };
            self.keep_event(message);
        }
        self.number += 1;
        let mut line =
            json!({ "execute": command, "arguments": arguments, "id": self.number }).to_string();
        line.push('\n');
        socket::write(&self.stream, line.as_bytes(), descriptor)
            .map_err(|source| self.io("send a command", source))?;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            let Some(mut message) = self.read(deadline)? else {
                self.silent = true;
                return Err(self.timed_out(&format!("answer to `{command}`"), ANSWER_TIMEOUT));
            };
            if message.get("event").is_some() {
                let followed = is_followed(&message);
                self.keep_event(message);
                if followed {
                    return Ok(Value::Null);
                }
            } else if message.get("id").is_some_and(|id| *id != self.number) {
                // An answer that nobody has waited for.
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

    /// The next message; `None` if none has come in time.
    fn read(&mut self, deadline: Instant) -> Result<Option<Value>, QmpError> {
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
            match read {
                Ok(read) => self.take_bytes(&bytes[..read])?,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock
                            | io::ErrorKind::TimedOut
                            | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(self.io("read an answer", error)),
            }
        }
    }

    /// Takes the events that have come, those of before too, without waiting for more.
    ///
    /// # Errors
    /// The connection's, such as that of a QEMU that has ended, when all that it has said is taken.
    pub fn events(&mut self) -> Result<Vec<Value>, QmpError> {
        self.look_at_events()?;
        Ok(self.events.drain(..).collect())
    }

    /// Looks at the events that have come and leaves them for whoever waits for them.
    ///
    /// # Errors
    /// As [`events`](Self::events).
    pub fn look_at_events(&mut self) -> Result<&VecDeque<Value>, QmpError> {
        let received = self.receive();
        while let Some(message) = self.next_message()? {
            self.keep_event(message);
        }
        if self.events.is_empty() {
            received?;
        }
        Ok(&self.events)
    }

    /// Reads what has come.
    fn receive(&mut self) -> Result<(), QmpError> {
        for _ in 0..MOST_NEWS / CHUNK {
            let mut bytes = [0; CHUNK];
            match rustix::net::recv(&self.stream, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((read, _)) => self.take_bytes(&bytes[..read])?,
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(self.io("read an answer", errno.into())),
            }
        }
        Ok(())
    }

    /// Whether something has come that nobody has waited for.
    #[must_use]
    pub fn has_news(&self) -> bool {
        !self.events.is_empty() || self.lines.has_whole()
    }

    /// The connection, for whoever waits until something comes.
    ///
    /// # Errors
    /// The system's.
    pub fn descriptor(&self) -> Result<OwnedFd, QmpError> {
        let copy = self.stream.as_fd().try_clone_to_owned();
        copy.map_err(|source| self.io("duplicate the connection", source))
    }

    /// The user that the process at the other end belonged to when it made the socket.
    ///
    /// # Errors
    /// The system's.
    pub fn user(&self) -> Result<u32, QmpError> {
        rustix::net::sockopt::socket_peercred(&self.stream)
            .map(|credentials| credentials.uid.as_raw())
            .map_err(|errno| self.io("find the process", errno.into()))
    }

    fn take_bytes(&mut self, bytes: &[u8]) -> Result<(), QmpError> {
        if bytes.is_empty() {
            let end = io::Error::new(io::ErrorKind::UnexpectedEof, "QEMU closed it");
            return Err(self.io("read an answer", end));
        }
        self.silent = false;
        self.lines.take(bytes);
        Ok(())
    }

    fn next_message(&mut self) -> Result<Option<Value>, QmpError> {
        match self.lines.next() {
            Ok(Some(line)) => match serde_json::from_slice(line) {
                Ok(message) => Ok(Some(message)),
                Err(_) => {
                    let text = String::from_utf8_lossy(line).into_owned();
                    Err(self.unexpected(&text))
                }
            },
            Ok(None) => Ok(None),
            Err(endless) => Err(self.unexpected(&endless.to_string())),
        }
    }

    /// The error for what is no answer, with its beginning.
    fn unexpected(&self, text: &str) -> QmpError {
        let shown = text.floor_char_boundary(MOST_SHOWN);
        let more = if shown < text.len() { "…" } else { "" };
        QmpError::Answer { path: self.path.clone(), text: format!("{}{more}", &text[..shown]) }
    }

    fn keep_event(&mut self, message: Value) {
        if message.get("event").is_some() {
            if self.events.len() == MOST_EVENTS {
                self.events.pop_front();
            }
            self.events.push_back(message);
        }
    }

    fn io(&self, action: &'static str, source: io::Error) -> QmpError {
        QmpError::Io { path: self.path.clone(), action, source }
    }
}
