//! The control socket of a QEMU guest that is being sent: `status`, `cancel`, `resolve` and others.

use std::sync::Arc;

use serde_json::{Value, json};
use vmferry::config::ConfigError;
use vmferry::source::Orders;
use vmferry_control::{Answer, ControlError, ErrorCode, Handler, Replies, Request};
use vmferry_handover::OperatorWord;

use super::hooked::Gate;

/// Answers for one guest, in the process that sends it or in its guardian.
pub struct QemuService {
    /// The answer to `status`, without the migration.
    pub about: Value,
    /// Controls the migration.
    pub orders: Orders,
    /// The highest throttling, in percent, that the migration was started with.
    pub throttle: u8,
    /// The hook's gate, if the migration has a hook.
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
                    "this migration was started with --throttle {}, and a QEMU can't be throttled \
                     more than that later",
                    self.throttle
                );
                Err(ControlError::new(ErrorCode::WrongState, text))
            }
            Request::Change(change) => {
                let wrong = |error: ConfigError| {
                    ControlError::new(ErrorCode::BadRequest, error.to_string())
                };
                self.orders.change(change.try_into().map_err(wrong)?);
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
            Request::GiveUp => self.give_up(),
            Request::Migrate(_) | Request::Estimate(_) => {
                let text = "the guest is being migrated: `vmferry status` shows it";
                Err(ControlError::new(ErrorCode::Busy, text))
            }
            Request::Pause
            | Request::Resume
            | Request::Quit
            | Request::Balloon
            | Request::SetBalloon { .. } => {
                let text = "this is a QEMU guest: use QEMU's own monitor";
                Err(ControlError::new(ErrorCode::WrongState, text))
            }
        }
    }
}

impl QemuService {
    fn give_up(&self) -> Result<Answer, ControlError> {
        if self.orders.give_up() {
            return Ok(json!({ "given_up": true }).into());
        }
        let text = "no other host needs pages of this guest, so there is nothing to give up";
        Err(ControlError::new(ErrorCode::WrongState, text))
    }

    fn resolve(&self, word: OperatorWord) -> Result<Answer, ControlError> {
        if self.orders.decide(word) {
            return Ok(json!({ "decided": word }).into());
        }
        let text = "this guest is not in doubt, so there is nothing to decide";
        Err(ControlError::new(ErrorCode::WrongState, text))
    }
}
