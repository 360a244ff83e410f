//! What a QEMU guest that is being sent answers on its control socket: `status`, `cancel`, `resolve`.

use std::sync::Arc;

use serde_json::{Value, json};
use vmferry::source::Orders;
use vmferry_control::{Answer, ControlError, ErrorCode, Handler, Replies, Request};
use vmferry_handover::OperatorWord;

use super::hooked::Gate;

/// Answers for one guest, in the process that sends it or that takes over from it.
pub struct QemuService {
    /// What is known of the guest, without the migration.
    pub about: Value,
    /// The migration.
    pub orders: Orders,
    /// The most per cent of its time that the migration may take from the guest.
    pub throttle: u8,
    /// What its switchover waits for beside the user.
    pub gate: Option<Arc<Gate>>,
}

impl Handler for QemuService {
    fn handle(&self, request: Request, _replies: &Replies) -> Result<Answer, ControlError> {
        match request {
            Request::Status => {
                let mut status = self.about.clone();
                status["migration"] = json!(self.orders.progress());
                Ok(status.into())
            }
            Request::Change(change) if change.throttle.is_some_and(|most| most > self.throttle) => {
                let text = format!(
                    "this QEMU's migration was begun with --throttle {}, and a QEMU can't be throttled more than that \
                     later",
                    self.throttle
                );
                Err(ControlError::new(ErrorCode::WrongState, text))
            }
            Request::Change(change) => {
                let changed = self.orders.change(change.into());
                changed
                    .map_err(|error| ControlError::new(ErrorCode::BadRequest, error.to_string()))?;
                Ok(json!(change).into())
            }
            Request::SwitchOver => {
                match &self.gate {
                    Some(gate) => gate.switch_over(),
                    None => self.orders.switch_over(),
                }
                Ok(json!({ "switching_over": true }).into())
            }
            Request::Cancel => {
                self.orders.cancel();
                if let Some(gate) = &self.gate {
                    gate.stop();
                }
                Ok(json!({ "cancelling": true }).into())
            }
            Request::Resolve { word } => self.resolve(word),
            Request::Migrate(_) | Request::Estimate(_) => {
                let text = "the guest is being migrated: `vmferry status` shows it";
                Err(ControlError::new(ErrorCode::Busy, text))
            }
            Request::Pause
            | Request::Resume
            | Request::Quit
            | Request::Balloon
            | Request::SetBalloon { .. } => {
                let text = "this guest is a QEMU's: use QEMU's own monitor";
                Err(ControlError::new(ErrorCode::WrongState, text))
            }
        }
    }
}

impl QemuService {
    fn resolve(&self, word: OperatorWord) -> Result<Answer, ControlError> {
        if self.orders.decide(word) {
            return Ok(json!({ "decided": word }).into());
        }
        let text = "this guest is not in doubt, so there is nothing to decide";
        Err(ControlError::new(ErrorCode::WrongState, text))
    }
}
