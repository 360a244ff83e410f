//! Why a request failed.

use serde::{Deserialize, Serialize};

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename = "Error"))]
#[error("{message}")]
pub struct ControlError {
    /// What kind of failure it is.
    pub code: ErrorCode,
    /// What happened and what to do, for people.
    pub message: String,
}

impl ControlError {
    /// An error.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Kinds of failures; the command's exit codes follow these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// The request can't be read or makes no sense.
    BadRequest,
    /// This release has no such request.
    NoSuchRequest,
    /// The guest is not in a state for that.
    WrongState,
    /// No link could be made.
    Connect,
    /// The link is not trusted: TLS.
    Authentication,
    /// The peer breaks the protocol or speaks another version.
    Protocol,
    /// Another machine, memory layout or guest.
    Incompatible,
    /// Someone else is at it.
    Busy,
    /// The link was lost or silent.
    LinkLost,
    /// The guest writes faster than the limits allow.
    NotConverging,
    /// Cancelled.
    Cancelled,
    /// Memory differs.
    Corrupt,
    /// COMMIT is written and the destination's word is not known.
    InDoubt,
    /// This host or the other one failed; or a VMM of a newer release has a code that this one does not know.
    #[serde(other)]
    Internal,
}

impl ErrorCode {
    /// The status of an HTTP answer that says it.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::NoSuchRequest => 404,
            Self::WrongState
            | Self::Busy
            | Self::Incompatible
            | Self::InDoubt
            | Self::Cancelled => 409,
            Self::Connect | Self::Authentication | Self::Protocol | Self::LinkLost => 502,
            Self::NotConverging | Self::Corrupt | Self::Internal => 500,
        }
    }
}

impl From<vmferry::ErrorClass> for ErrorCode {
    fn from(class: vmferry::ErrorClass) -> Self {
        use vmferry::ErrorClass as Class;
        match class {
            Class::Connect => Self::Connect,
            Class::Authentication => Self::Authentication,
            Class::Protocol => Self::Protocol,
            Class::Incompatible => Self::Incompatible,
            Class::Busy => Self::Busy,
            Class::LinkLost => Self::LinkLost,
            Class::NotConverging => Self::NotConverging,
            Class::Cancelled => Self::Cancelled,
            Class::GuestState => Self::WrongState,
            Class::Corrupt => Self::Corrupt,
            Class::Internal => Self::Internal,
        }
    }
}

impl From<&vmferry::MigrateError> for ControlError {
    fn from(error: &vmferry::MigrateError) -> Self {
        Self::new(error.class().into(), vmferry::chain(error))
    }
}
