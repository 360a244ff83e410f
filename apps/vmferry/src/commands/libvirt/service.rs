//! The control socket of a guest that libvirt moves: `status`, `cancel` and `set`.

use std::sync::mpsc::Sender;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use vmferry_control::{Answer, ChangeRequest, ControlError, ErrorCode, Handler, Replies, Request};

use super::options::mib_per_s;
use super::virsh::{Virsh, VirshError};

/// Why a migration in post-copy can't be canceled.
pub const POSTCOPY: &str = "the guest runs at the destination and the rest of its memory is here, \
                            so libvirt can't abort the migration (post-copy)";

/// What the thread that conducts the migration waits for.
#[derive(Debug)]
pub enum Input {
    /// The user cancels it.
    Cancel,
    /// The downtime limit is this from now on.
    DowntimeLimit(Duration),
    /// The cap is this from now on, in bytes per second.
    Cap(Option<u64>),
    /// `virsh migrate` has ended.
    Ended(Result<(), VirshError>),
}

/// Answers for one guest.
pub struct LibvirtService {
    /// The answer to `status`, without the migration.
    pub about: Value,
    /// The present progress.
    pub progress: Mutex<Value>,
    /// How to ask libvirt.
    pub virsh: Virsh,
    /// The guest's UUID.
    pub uuid: String,
    /// Whether post-copy may follow.
    pub has_postcopy: bool,
    /// To the thread that conducts the migration.
    pub inputs: Sender<Input>,
}

impl Handler for LibvirtService {
    fn handle(&self, request: Request, _replies: &Replies) -> Result<Answer, ControlError> {
        match request {
            Request::Status => {
                let mut status = self.about.clone();
                status["migration"] = self.progress.lock().clone();
                Ok(status.into())
            }
            Request::Change(change) => self.change(change),
            Request::Cancel if self.progress.lock()["phase"] == "post-copy" => {
                refuse(ErrorCode::WrongState, POSTCOPY)
            }
            Request::Cancel => {
                // Without a receiver, the migration has ended.
                let _ = self.inputs.send(Input::Cancel);
                Ok(json!({ "cancelling": true }).into())
            }
            Request::SwitchOver => refuse(
                ErrorCode::WrongState,
                "libvirt has no hold before the switchover, so there is nothing to release",
            ),
            Request::GiveUp => refuse(
                ErrorCode::WrongState,
                "QEMU fetches the pages of this guest, so there is nothing to give up here",
            ),
            Request::Resolve { .. } => refuse(
                ErrorCode::WrongState,
                "this guest is not in doubt, so there is nothing to decide",
            ),
            Request::Migrate(_) | Request::Estimate(_) => {
                refuse(ErrorCode::Busy, "the guest is being migrated: `vmferry status` shows it")
            }
            Request::Pause
            | Request::Resume
            | Request::Quit
            | Request::Balloon
            | Request::SetBalloon { .. } => {
                refuse(ErrorCode::WrongState, "libvirt manages this guest: use `virsh`")
            }
        }
    }
}

fn refuse(code: ErrorCode, text: &str) -> Result<Answer, ControlError> {
    Err(ControlError::new(code, text))
}

impl LibvirtService {
    fn change(&self, change: ChangeRequest) -> Result<Answer, ControlError> {
        if change.max_rounds.is_some() {
            return refuse(ErrorCode::WrongState, "libvirt does not limit the number of rounds");
        }
        if change.post_copy.is_some() {
            let text = "libvirt switches to its own post-copy with `virsh migrate-postcopy`";
            return refuse(ErrorCode::WrongState, text);
        }
        if change.throttle.is_some() {
            let text = "libvirt can't change the throttling of a running migration: start it with \
                        --auto-converge";
            return refuse(ErrorCode::WrongState, text);
        }
        let failed =
            |error: VirshError| ControlError::new(ErrorCode::WrongState, vmferry::chain(&error));
        if let Some(cap) = change.max_bandwidth {
            let wrong = |failure: crate::exit::Failure| {
                ControlError::new(ErrorCode::BadRequest, failure.to_string())
            };
            let mib = mib_per_s(cap).map_err(wrong)?.to_string();
            let plain = ["migrate-setspeed", "--domain", &self.uuid, "--bandwidth", &mib];
            self.virsh.run(&plain).map_err(failed)?;
            if self.has_postcopy {
                self.virsh.run(&[&plain[..], &["--postcopy"]].concat()).map_err(failed)?;
            }
            // Without a receiver, the migration has ended.
            let _ = self.inputs.send(Input::Cap(cap));
        }
        if let Some(limit) = change.downtime_limit {
            set_downtime_limit(&self.virsh, &self.uuid, limit).map_err(failed)?;
            let _ = self.inputs.send(Input::DowntimeLimit(limit));
        }
        Ok(json!(change).into())
    }
}

/// Sets the limit of a running migration. libvirt takes whole milliseconds.
pub fn set_downtime_limit(virsh: &Virsh, uuid: &str, limit: Duration) -> Result<(), VirshError> {
    let ms = ((limit.as_secs_f64() * 1e3).round() as u64).max(1).to_string();
    virsh.run(&["migrate-setmaxdowntime", "--domain", uuid, "--downtime", &ms]).map(drop)
}
