//! A guest that runs here in a QEMU and lacks pages: its control socket, and the end of its QEMU.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use vmferry::destination::FetchHandle;
use vmferry_control::{
    Answer, ControlError, Directories, ErrorCode, Handler, Replies, Request, Server,
};
use vmferry_qemu::{QemuDestination, StartedQemu, wait_until_gone};
use vmferry_wire::GuestIdentity;

use crate::exit::{Code, Failure};
use crate::output::Output;

/// A QEMU that receives a guest.
pub trait ReceivingQemu {
    /// Its process, if that is visible from here.
    fn process(&self) -> Option<u32>;

    /// Its QMP socket.
    fn monitor(&self) -> &Path;
}

impl ReceivingQemu for QemuDestination {
    fn process(&self) -> Option<u32> {
        self.pid()
    }

    fn monitor(&self) -> &Path {
        self.socket()
    }
}

impl ReceivingQemu for StartedQemu {
    fn process(&self) -> Option<u32> {
        Some(self.pid())
    }

    fn monitor(&self) -> &Path {
        self.socket()
    }
}

/// The guest and its QEMU.
pub struct Guest {
    /// The guest.
    pub identity: GuestIdentity,
    /// The QEMU process, if it is visible from here.
    pub pid: Option<u32>,
    /// The QMP socket.
    pub qmp: PathBuf,
    /// The VMM and its release, for people.
    pub release: String,
    /// Size of the guest's memory.
    pub memory_bytes: u64,
    /// It was paused at the source, and stays paused.
    pub is_paused: bool,
}

/// The guest's control socket. Dropping it removes the socket.
pub struct Shown {
    _server: Server,
}

impl Guest {
    /// Answers on the guest's control socket, and tells the session when QEMU has ended: a process
    /// that waits for a page of a lost host would never notice that by itself. Without a socket,
    /// which is reported, the guest goes on.
    pub fn show(self, places: &Directories, fetch: FetchHandle, output: &Output) -> Option<Shown> {
        let (pid, qmp, handle) = (self.pid, self.qmp.clone(), fetch.clone());
        let watch = move || {
            wait_until_gone(pid, &qmp);
            handle.guest_has_ended();
        };
        let watched = std::thread::Builder::new().name("qemu-watch".into()).spawn(watch);
        let served = watched.map_err(Failure::from).and_then(|_| self.serve(places, fetch));
        served
            .inspect_err(|failure| {
                let reason = failure.to_string();
                let event = json!({ "event": "no-control-socket", "reason": reason });
                output.event(&event, || {
                    format!("`vmferry status` can't show how this guest's pages arrive: {reason}")
                });
            })
            .ok()
    }

    fn serve(self, places: &Directories, fetch: FetchHandle) -> Result<Shown, Failure> {
        let name = super::socket_name(&self.identity, self.pid);
        let about = json!({
            "name": name,
            "uuid": self.identity.uuid,
            "phase": if self.is_paused { "paused" } else { "running" },
            "guest": "qemu",
            "choice": self.release,
            "memory_bytes": self.memory_bytes,
            "memory_kind": "shared",
            "pid": self.pid,
            "qmp": self.qmp,
            "migration": null,
        });
        let service = Arc::new(FetchingService { about, fetch });
        let server = Server::bind(&places.socket(&name), service)
            .map_err(|error| Failure::of(Code::Busy, error))?;
        Ok(Shown { _server: server })
    }
}

/// Answers for the guest.
struct FetchingService {
    about: Value,
    fetch: FetchHandle,
}

impl Handler for FetchingService {
    fn handle(&self, request: Request, _: &Replies) -> Result<Answer, ControlError> {
        let wrong = |text: &str| Err(ControlError::new(ErrorCode::WrongState, text));
        match request {
            Request::Status => {
                let mut status = self.about.clone();
                status["fetch"] = json!(self.fetch.progress());
                Ok(status.into())
            }
            Request::Migrate(_) | Request::Estimate(_) => {
                let left = self.fetch.progress().map(|progress| progress.time_left());
                let text = format!(
                    "the guest lacks pages of the host that it came from: it can't be moved or \
                     watched before it has them ({})",
                    left.as_deref().unwrap_or("the last ones have just arrived")
                );
                Err(ControlError::new(ErrorCode::Busy, text))
            }
            Request::Change(_) | Request::SwitchOver | Request::Cancel => {
                wrong("the guest runs here already, and only fetches its missing pages")
            }
            Request::Resolve { .. } => {
                wrong("this guest is not in doubt: it runs here, so there is nothing to decide")
            }
            Request::GiveUp => wrong(
                "the guest runs here: it is given up by ending its QEMU, which the command \
                 `vmferry resolve --give-up` does",
            ),
            Request::Pause
            | Request::Resume
            | Request::Quit
            | Request::Balloon
            | Request::SetBalloon { .. } => wrong("this is a QEMU guest: use QEMU's own monitor"),
        }
    }
}
