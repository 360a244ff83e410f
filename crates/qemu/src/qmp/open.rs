//! Opens a connection: a place in the queue, the greeting, and which process QEMU is.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::events::Events;
use super::lines::Lines;
use super::{ANSWER_TIMEOUT, Qmp, QmpError, Version, process, socket, sockets};
use crate::life::Life;

/// How long another client may take to disconnect. A client that is about to end does so in
/// milliseconds; a permanent one, such as libvirt, never does.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);

impl Qmp {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// If nothing listens, or the listener is no QEMU.
    pub fn connect(path: &Path) -> Result<Self, QmpError> {
        Self::connect_within(path, ANSWER_TIMEOUT)
    }

    /// The same with another timeout for this and each later answer.
    pub(crate) fn connect_within(path: &Path, patience: Duration) -> Result<Self, QmpError> {
        let connect = |patience| {
            socket::connect(path, patience).map_err(|source| {
                let path = path.to_owned();
                QmpError::Io { path, action: "connect", source }
            })
        };
        // A QEMU that is stopped keeps disconnected clients in its queue, so a full queue does not
        // mean that others wait.
        let mut connected = connect(patience.min(BUSY_TIMEOUT))?;
        if connected.is_none() {
            must_be_free(path, None)?;
            let left = patience.saturating_sub(BUSY_TIMEOUT);
            if !left.is_zero() {
                connected = connect(left)?;
            }
        }
        let stream = connected.ok_or_else(|| QmpError::TimedOut {
            path: path.to_owned(),
            // The kernel reports the listener only to clients that have a place in the queue.
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
    /// If the peer is no QEMU.
    pub fn over(stream: UnixStream, path: &Path) -> Result<Self, QmpError> {
        Self::over_within(stream, path, ANSWER_TIMEOUT)
    }

    pub(super) fn over_within(
        stream: UnixStream,
        path: &Path,
        patience: Duration,
    ) -> Result<Self, QmpError> {
        let mut qmp = Self {
            path: path.to_owned(),
            stream,
            lines: Lines::default(),
            version: Version { major: 0, minor: 0, micro: 0 },
            pid: None,
            events: Events::default(),
            life: Life::default(),
            patience,
            number: 0,
            silent: false,
            has_out_of_band: false,
            may_begin_within: false,
        };
        qmp.pid = qmp.listener();
        let begun = Instant::now();
        let mut looked = false;
        let greeting = loop {
            let until = if looked { patience } else { patience.min(BUSY_TIMEOUT) };
            let Some((message, _)) = qmp.read(begun + until)? else {
                if std::mem::replace(&mut looked, true) {
                    return Err(qmp.timed_out("greet a client", patience));
                }
                must_be_free(path, Some(&qmp.stream))?;
                continue;
            };
            // QEMU 10.0 may send an event first to a client that connects right after another one.
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
        let capabilities = greeting["QMP"]["capabilities"].as_array();
        qmp.has_out_of_band =
            capabilities.is_some_and(|all| all.iter().any(|capability| capability == "oob"));
        let enabled: &[&str] = if qmp.has_out_of_band { &["oob"] } else { &[] };
        qmp.execute("qmp_capabilities", json!({ "enable": enabled }))?;
        qmp.pid = qmp.find_pid()?;
        Ok(qmp)
    }

    /// See [`process::find`].
    fn find_pid(&mut self) -> Result<Option<u32>, QmpError> {
        let vcpus = self.execute("query-cpus-fast", json!({}))?;
        let number = |vcpu: &Value| vcpu["thread-id"].as_u64().and_then(|id| id.try_into().ok());
        let threads = vcpus.as_array().into_iter().flatten().filter_map(number).collect();
        Ok(process::find(&self.stream, &threads))
    }
}

/// QMP serves one client at a time. Fails if another client is connected, as waiting may then never
/// end.
fn must_be_free(path: &Path, waiting: Option<&UnixStream>) -> Result<(), QmpError> {
    match sockets::others_at(path, waiting) {
        Some(clients) => Err(QmpError::Busy { path: path.to_owned(), clients }),
        None => Ok(()),
    }
}
