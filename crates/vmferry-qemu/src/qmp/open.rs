//! How a connection begins: a place in the queue, a greeting, and which process it is.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use super::events::Events;
use super::lines::Lines;
use super::{ANSWER_TIMEOUT, Qmp, QmpError, Version, socket};

impl Qmp {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// If nobody listens, or what listens is no QEMU.
    pub fn connect(path: &Path) -> Result<Self, QmpError> {
        Self::connect_within(path, ANSWER_TIMEOUT)
    }

    /// The same with another patience for this and each later answer.
    pub(super) fn connect_within(path: &Path, patience: Duration) -> Result<Self, QmpError> {
        let connected = socket::connect(path, patience).map_err(|source| {
            let path = path.to_owned();
            QmpError::Io { path, action: "connect", source }
        })?;
        // A QEMU that is stopped keeps those in its queue that have gone away again: it need not be many that wait.
        let stream = connected.ok_or_else(|| QmpError::TimedOut {
            path: path.to_owned(),
            // The system tells who listens to those only that have a place.
            pid: None,
            what: "take one connection more".to_owned(),
            after: patience,
            stopped: false,
        })?;
        Self::over_within(stream, path, patience)
    }

    /// Negotiates on a connected socket; `path` is its name in errors.
    ///
    /// # Errors
    /// If what is at the other end is no QEMU.
    pub fn over(stream: UnixStream, path: &Path) -> Result<Self, QmpError> {
        Self::over_within(stream, path, ANSWER_TIMEOUT)
    }

    pub(super) fn over_within(
        stream: UnixStream,
        path: &Path,
        patience: Duration,
    ) -> Result<Self, QmpError> {
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
            events: Events::default(),
            patience,
            number: 0,
            silent: false,
        };
        let deadline = Instant::now() + patience;
        let greeting = loop {
            let Some((message, _)) = qmp.read(deadline)? else {
                return Err(qmp.timed_out("greet a client", patience));
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
}
