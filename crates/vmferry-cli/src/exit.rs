//! Exit codes. They are part of the interface: numbers are never reused.

use std::fmt;

use vmferry_control::{ClientError, ControlError, ErrorCode};
use vmferry_sandbox::SandboxError;
use vmferry_transport::TransportError;

/// What the exit status says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(test, derive(clap::ValueEnum))]
pub enum Code {
    /// 1: this host, the other host or vmferry itself failed.
    Internal,
    /// 2: the command line makes no sense (clap uses the same number).
    Usage,
    /// 3: no link could be made.
    Connect,
    /// 4: a certificate is wrong, expired or missing, or one side speaks TLS and the other not.
    Authentication,
    /// 5: the peer speaks something else, another version, or broke the protocol.
    Protocol,
    /// 6: another machine type, memory layout or guest identity.
    Incompatible,
    /// 7: a port, socket or host that is in use, or a migration that is going on.
    Busy,
    /// 8: no such guest.
    UnknownGuest,
    /// 9: the guest is not in a state for that.
    WrongState,
    /// 10: the migration does not converge within its limits.
    NotConverging,
    /// 11: cancelled.
    Cancelled,
    /// 12: the link was lost or silent.
    LinkLost,
    /// 13: memory differs, or the guest found itself damaged.
    Corrupt,
    /// 14: in doubt: `vmferry resolve` is the way out.
    InDoubt,
    /// 15: the guest's VMM lives and does not answer.
    NotAnswering,
    /// 16: the process can't be restricted, or not as it was required.
    Sandbox,
    /// 17: `doctor` has found something that should be mended.
    Warnings,
    /// 18: `doctor` has found what keeps guests from moving.
    Errors,
}

impl Code {
    /// The exit status.
    pub fn number(self) -> u8 {
        match self {
            Self::Internal => 1,
            Self::Usage => 2,
            Self::Connect => 3,
            Self::Authentication => 4,
            Self::Protocol => 5,
            Self::Incompatible => 6,
            Self::Busy => 7,
            Self::UnknownGuest => 8,
            Self::WrongState => 9,
            Self::NotConverging => 10,
            Self::Cancelled => 11,
            Self::LinkLost => 12,
            Self::Corrupt => 13,
            Self::InDoubt => 14,
            Self::NotAnswering => 15,
            Self::Sandbox => 16,
            Self::Warnings => 17,
            Self::Errors => 18,
        }
    }

    /// The word in `--json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Internal => "internal",
            Self::Usage => "usage",
            Self::Connect => "connect",
            Self::Authentication => "authentication",
            Self::Protocol => "protocol",
            Self::Incompatible => "incompatible",
            Self::Busy => "busy",
            Self::UnknownGuest => "unknown-guest",
            Self::WrongState => "wrong-state",
            Self::NotConverging => "not-converging",
            Self::Cancelled => "cancelled",
            Self::LinkLost => "link-lost",
            Self::Corrupt => "corrupt",
            Self::InDoubt => "in-doubt",
            Self::NotAnswering => "not-answering",
            Self::Sandbox => "sandbox",
            Self::Warnings => "warnings",
            Self::Errors => "errors",
        }
    }
}

impl From<ErrorCode> for Code {
    fn from(code: ErrorCode) -> Self {
        match code {
            ErrorCode::BadRequest | ErrorCode::NoSuchRequest => Self::Usage,
            ErrorCode::WrongState => Self::WrongState,
            ErrorCode::Connect => Self::Connect,
            ErrorCode::Authentication => Self::Authentication,
            ErrorCode::Protocol => Self::Protocol,
            ErrorCode::Incompatible => Self::Incompatible,
            ErrorCode::Busy => Self::Busy,
            ErrorCode::LinkLost => Self::LinkLost,
            ErrorCode::NotConverging => Self::NotConverging,
            ErrorCode::Cancelled => Self::Cancelled,
            ErrorCode::Corrupt => Self::Corrupt,
            ErrorCode::InDoubt => Self::InDoubt,
            ErrorCode::Internal => Self::Internal,
        }
    }
}

/// Why the command failed.
#[derive(Debug)]
pub struct Failure {
    /// For the exit status.
    pub code: Code,
    /// For people.
    pub error: anyhow::Error,
}

impl Failure {
    /// A failure in one line.
    pub fn new(code: Code, text: impl fmt::Display) -> Self {
        Self { code, error: anyhow::anyhow!("{text}") }
    }

    /// Wraps an error and its causes.
    pub fn of(code: Code, error: impl Into<anyhow::Error>) -> Self {
        Self { code, error: error.into() }
    }
}

impl Failure {
    /// The failure for machines.
    pub fn facts(&self) -> serde_json::Value {
        serde_json::json!({
            "code": self.code.name(), "exit": self.code.number(), "message": self.to_string(),
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let causes: &(dyn std::error::Error + 'static) = self.error.as_ref();
        f.write_str(&vmferry::chain(causes))
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::of(Code::Internal, error)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::of(Code::Internal, error)
    }
}

impl From<vmferry::MigrateError> for Failure {
    fn from(error: vmferry::MigrateError) -> Self {
        Self::of(ErrorCode::from(error.class()).into(), error)
    }
}

impl From<TransportError> for Failure {
    fn from(error: TransportError) -> Self {
        vmferry::MigrateError::from(error).into()
    }
}

impl From<SandboxError> for Failure {
    fn from(error: SandboxError) -> Self {
        Self::of(Code::Sandbox, error)
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        Self::of(error.code.into(), error)
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Refused(error) => error.into(),
            ClientError::NoGuest { .. } => Self::of(Code::UnknownGuest, error),
            ClientError::Silent { .. } => Self::of(Code::NotAnswering, error),
            ClientError::Socket(error) => error.into(),
            ClientError::Vanished { .. }
            | ClientError::Io { .. }
            | ClientError::BadAnswer { .. } => Self::of(Code::Internal, error),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, ValueEnum};

    use super::*;
    use crate::args::Arguments;

    /// A file of the repository.
    fn file(path: &str) -> String {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        std::fs::read_to_string(root.join(path)).unwrap()
    }

    /// What the help says of it, behind its number; and what the README says.
    fn said(code: Code) -> (&'static str, &'static str) {
        match code {
            Code::Internal => ("internal failure", "internal failure"),
            Code::Usage => ("usage", "usage"),
            Code::Connect => ("no connection", "no connection"),
            Code::Authentication => ("authentication or TLS", "authentication or TLS"),
            Code::Protocol => ("protocol or version", "protocol or version"),
            Code::Incompatible => ("incompatible machine", "incompatible machine"),
            Code::Busy => ("in use or busy", "in use, or busy"),
            Code::UnknownGuest => ("unknown guest", "unknown guest"),
            Code::WrongState => ("wrong state", "the guest is in the wrong state"),
            Code::NotConverging => ("does not converge", "does not converge"),
            Code::Cancelled => ("cancelled", "cancelled"),
            Code::LinkLost => ("link lost", "link lost"),
            Code::Corrupt => ("memory or guest corrupted", "memory differs"),
            Code::InDoubt => ("in doubt", "in doubt"),
            Code::NotAnswering => ("the guest's VMM does not answer", "the guest's VMM does not"),
            Code::Sandbox => ("this process can't be restricted as", "the process can't be"),
            Code::Warnings => ("doctor has warnings", "`doctor` has warnings"),
            Code::Errors => ("doctor has found errors", "`doctor` has found errors"),
        }
    }

    #[test]
    fn the_help_and_the_readme_name_every_code() {
        let help = Arguments::command().render_long_help().to_string();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        let (_, help) = help.split_once("Exit status: 0 done, ").unwrap();
        let readme = file("README.md");
        let mut numbers = Vec::new();
        for code in Code::value_variants() {
            let (in_help, in_readme) = said(*code);
            let number = code.number();
            assert!(help.contains(&format!("{number} {in_help}")), "{code:?}: {help}");
            assert!(readme.contains(&format!("| {number} | {in_readme}")), "{code:?}");
            assert_eq!(code.to_possible_value().unwrap().get_name(), code.name());
            numbers.push(number);
        }
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), Code::value_variants().len(), "no number is for two");
    }

    /// What would not start a second time either.
    #[test]
    fn the_unit_is_not_started_again_in_vain() {
        let unit = file("dist/systemd/vmferry-receive.service");
        let (usage, sandbox) = (Code::Usage.number(), Code::Sandbox.number());
        let line = format!("\nRestartPreventExitStatus={usage} {sandbox}\n");
        assert!(unit.contains(&line), "{line}");
        for part in [format!("can't restrict ({sandbox})"), format!("line is wrong ({usage})")] {
            assert!(unit.contains(&part), "the comment says {part}");
        }
    }
}
