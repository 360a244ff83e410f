//! Errors of requests.

use serde::{Deserialize, Serialize};

/// A failed request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename = "Error"))]
#[error("{message}")]
pub struct ControlError {
    /// The kind of failure.
    pub code: ErrorCode,
    /// What happened and what to do, for people.
    pub message: String,
}

impl ControlError {
    /// Creates an error.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Kinds of failures. The exit codes of the command follow these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// The request cannot be parsed, or its values are invalid.
    BadRequest,
    /// This release has no such request.
    NoSuchRequest,
    /// The guest's state does not allow the request.
    WrongState,
    /// The connection to the destination could not be established.
    Connect,
    /// The TLS peer is not trusted.
    Authentication,
    /// The peer violates the protocol or speaks another version.
    Protocol,
    /// The machine, memory layout or guest differs.
    Incompatible,
    /// Another migration or client is using the guest.
    Busy,
    /// The link was lost or silent.
    LinkLost,
    /// The guest writes faster than the limits allow.
    NotConverging,
    /// The request was canceled.
    Cancelled,
    /// The memory of source and destination differs.
    Corrupt,
    /// COMMIT is written and the destination's word is unknown.
    InDoubt,
    /// This host or the other one failed, or a VMM of a newer release sent an unknown code.
    #[serde(other)]
    Internal,
}

impl ErrorCode {
    /// The status of an HTTP answer with this code.
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
