//! Requests to a running guest, with their methods and paths.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use vmferry::vmm::newer;
use vmferry_handover::OperatorWord;

use crate::error::{ControlError, ErrorCode};
use crate::http::RawRequest;
use crate::migrate::{ChangeRequest, EstimateRequest, MigrateRequest};

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// Shows the machine, the guest's report and the running migration, if any.
    Status,
    /// Pauses the guest.
    Pause,
    /// Resumes a paused guest.
    Resume,
    /// Ends the guest and its VMM.
    Quit,
    /// Migrates the guest.
    Migrate(Box<MigrateRequest>),
    /// Changes the running migration.
    Change(ChangeRequest),
    /// Lets a migration that holds before its switchover continue.
    SwitchOver,
    /// Cancels the running migration. The guest stays here.
    Cancel,
    /// Shows the guest's balloon with new statistics.
    Balloon,
    /// Sets the target size of the guest's balloon, and shows the balloon.
    SetBalloon {
        /// Bytes that the guest must give up.
        target_bytes: u64,
    },
    /// Resolves a handover that is in doubt.
    Resolve {
        /// Which host has the guest.
        word: OperatorWord,
    },
    /// Gives up a guest that runs at the destination and lacks pages of this host's memory, which
    /// is released. The guest is lost.
    GiveUp,
    /// Watches the running guest and estimates the cost of a migration.
    Estimate(EstimateRequest),
}

/// The body of [`Request::SetBalloon`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BalloonBody {
    target_bytes: u64,
}

/// The body of [`Request::Resolve`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResolveBody {
    word: OperatorWord,
}

/// A body without members.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EmptyBody {}

/// Methods and paths of this release, in the order of the OpenAPI document.
#[cfg(test)]
pub const ROUTES: [(&str, &str); 13] = [
    ("GET", "/api/v1/guest"),
    ("PUT", "/api/v1/guest/pause"),
    ("PUT", "/api/v1/guest/resume"),
    ("PUT", "/api/v1/guest/quit"),
    ("GET", "/api/v1/guest/balloon"),
    ("PUT", "/api/v1/guest/balloon"),
    ("PUT", "/api/v1/guest/estimate"),
    ("PUT", "/api/v1/migration"),
    ("PATCH", "/api/v1/migration"),
    ("DELETE", "/api/v1/migration"),
    ("PUT", "/api/v1/migration/switch-over"),
    ("PUT", "/api/v1/migration/resolve"),
    ("PUT", "/api/v1/migration/give-up"),
];

/// The path of the OpenAPI document, which is served in every state of the guest.
pub const OPENAPI_PATH: &str = "/api/v1/openapi.json";

const RELEASE: &str = env!("CARGO_PKG_VERSION");

impl Request {
    /// Parses a request. Members inside `optional` of its body may be unknown.
    ///
    /// # Errors
    /// [`ErrorCode::NoSuchRequest`] and [`ErrorCode::BadRequest`], with the name of the unknown
    /// request or member.
    pub(crate) fn read(raw: &RawRequest) -> Result<Self, ControlError> {
        let (method, path) = (raw.method.as_str(), raw.path.as_str());
        Ok(match (method, path) {
            ("GET", "/api/v1/guest") => Self::Status,
            ("GET", "/api/v1/guest/balloon") => Self::Balloon,
            ("PUT", "/api/v1/guest/pause") => body(raw).map(|EmptyBody {}| Self::Pause)?,
            ("PUT", "/api/v1/guest/resume") => body(raw).map(|EmptyBody {}| Self::Resume)?,
            ("PUT", "/api/v1/guest/quit") => body(raw).map(|EmptyBody {}| Self::Quit)?,
            ("PUT", "/api/v1/guest/balloon") => {
                let BalloonBody { target_bytes } = body(raw)?;
                Self::SetBalloon { target_bytes }
            }
            ("PUT", "/api/v1/guest/estimate") => Self::Estimate(body(raw)?),
            ("PUT", "/api/v1/migration") => Self::Migrate(body(raw)?),
            ("PATCH", "/api/v1/migration") => Self::Change(body(raw)?),
            ("DELETE", "/api/v1/migration") => Self::Cancel,
            ("PUT", "/api/v1/migration/switch-over") => {
                body(raw).map(|EmptyBody {}| Self::SwitchOver)?
            }
            ("PUT", "/api/v1/migration/resolve") => {
                let ResolveBody { word } = body(raw)?;
                Self::Resolve { word }
            }
            ("PUT", "/api/v1/migration/give-up") => body(raw).map(|EmptyBody {}| Self::GiveUp)?,
            _ => {
                let text = format!(
                    "this guest's VMM is vmferry {RELEASE}, which has no request `{method} \
                    {path}`: use that release's command, or see GET /api/v1/openapi.json"
                );
                return Err(ControlError::new(ErrorCode::NoSuchRequest, text));
            }
        })
    }

    /// The method, path and body.
    pub(crate) fn parts(&self) -> (&'static str, &'static str, String) {
        let write = |body: serde_json::Result<String>| body.unwrap_or_default();
        match self {
            Self::Status => ("GET", "/api/v1/guest", String::new()),
            Self::Pause => ("PUT", "/api/v1/guest/pause", String::new()),
            Self::Resume => ("PUT", "/api/v1/guest/resume", String::new()),
            Self::Quit => ("PUT", "/api/v1/guest/quit", String::new()),
            Self::Balloon => ("GET", "/api/v1/guest/balloon", String::new()),
            Self::SetBalloon { target_bytes } => {
                let body = json!({ "target_bytes": target_bytes });
                ("PUT", "/api/v1/guest/balloon", body.to_string())
            }
            Self::Estimate(request) => {
                ("PUT", "/api/v1/guest/estimate", write(serde_json::to_string(request)))
            }
            Self::Migrate(request) => {
                ("PUT", "/api/v1/migration", write(serde_json::to_string(request)))
            }
            Self::Change(request) => {
                ("PATCH", "/api/v1/migration", write(serde_json::to_string(request)))
            }
            Self::Cancel => ("DELETE", "/api/v1/migration", String::new()),
            Self::SwitchOver => ("PUT", "/api/v1/migration/switch-over", String::new()),
            Self::GiveUp => ("PUT", "/api/v1/migration/give-up", String::new()),
            Self::Resolve { word } => {
                ("PUT", "/api/v1/migration/resolve", json!({ "word": word }).to_string())
            }
        }
    }
}

/// Parses a body. An empty one counts as an empty object.
fn body<T: DeserializeOwned>(raw: &RawRequest) -> Result<T, ControlError> {
    let bytes = if raw.body.is_empty() { b"{}" } else { raw.body.as_slice() };
    newer::read(bytes).map_err(|error| {
        let text = format!(
            "this guest's VMM is vmferry {RELEASE}, and can't read this request `{} {}`: {error}; \
            leave the option out, or use that release's command",
            raw.method, raw.path
        );
        ControlError::new(ErrorCode::BadRequest, text)
    })
}

#[cfg(test)]
mod tests;
