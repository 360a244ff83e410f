//! Exit statuses. They are part of the interface: numbers are never reused.

use std::fmt;

use strum::{EnumIter, EnumMessage, IntoEnumIterator, IntoStaticStr};
use vmferry_control::{ClientError, ControlError, ErrorCode};
use vmferry_sandbox::SandboxError;
use vmferry_transport::TransportError;

/// The exit statuses. The number is the discriminant, the word in `--json` is the variant's name,
/// and the text in `--help` is the doc comment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, EnumMessage, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
#[repr(u8)]
pub enum Code {
    /// internal failure
    Internal = 1,
    /// usage
    Usage = 2,
    /// no connection
    Connect = 3,
    /// authentication or TLS
    Authentication = 4,
    /// protocol or version
    Protocol = 5,
    /// incompatible machine, memory layout or guest identity
    Incompatible = 6,
    /// in use or busy
    Busy = 7,
    /// unknown guest
    UnknownGuest = 8,
    /// wrong state
    WrongState = 9,
    /// does not converge
    NotConverging = 10,
    /// cancelled
    Cancelled = 11,
    /// link lost
    LinkLost = 12,
    /// memory or guest corrupted
    Corrupt = 13,
    /// in doubt
    InDoubt = 14,
    /// the guest's VMM does not answer
    NotAnswering = 15,
    /// can't restrict this process as --sandbox require demands
    Sandbox = 16,
    /// doctor has warnings
    Warnings = 17,
    /// doctor has found errors
    Errors = 18,
}

impl Code {
    /// The exit status.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The code in `--json`.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The command's options that the advice in such a failure refers to.
    pub fn options(self) -> Option<&'static str> {
        match self {
            Self::NotConverging => {
                Some("--downtime-limit, --max-bandwidth, --throttle, --when-stuck")
            }
            _ => None,
        }
    }
}

/// The exit statuses for `--help`, in lines of at most 100 columns.
pub fn help() -> String {
    let codes = Code::iter()
        .map(|code| format!("{} {}", code.number(), code.get_documentation().unwrap_or_default()));
    let codes = std::iter::once("0 done".to_owned()).chain(codes).collect::<Vec<_>>();
    let mut lines = vec!["Exit status:".to_owned()];
    for word in format!("{}.", codes.join(", ")).split(' ') {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= 100 => *line += &format!(" {word}"),
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
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
    /// The message and its causes.
    pub error: anyhow::Error,
}

impl Failure {
    /// A failure without a cause.
    pub fn new(code: Code, text: impl fmt::Display) -> Self {
        Self { code, error: anyhow::anyhow!("{text}") }
    }

    /// Wraps an error and its causes.
    pub fn of(code: Code, error: impl Into<anyhow::Error>) -> Self {
        Self { code, error: error.into() }
    }
}

impl Failure {
    /// The failure as JSON.
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
    use clap::CommandFactory;

    use super::*;
    use crate::args::Arguments;

    /// A file of the repository.
    fn file(path: &str) -> String {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        std::fs::read_to_string(root.join(path)).unwrap()
    }

    #[test]
    fn help_and_operations_guide_name_every_code() {
        let help = Arguments::command().render_long_help().to_string();
        let guide = file("docs/operations.md");
        let (_, guide) = guide.split_once("## Exit statuses and --json").unwrap();
        let mut numbers = Vec::new();
        for code in Code::iter() {
            let number = code.number();
            assert!(super::help().contains(&format!("{number} ")), "{code:?}: {help}");
            assert!(guide.contains(&format!("\n| {number} | ")), "{code:?}");
            numbers.push(number);
        }
        assert!(help.contains(&super::help()), "{help}");
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), Code::iter().count(), "no number is used twice");
    }

    /// A wrong command line and a failing sandbox would fail at the next start as well.
    #[test]
    fn units_are_not_restarted_after_permanent_failures() {
        let (usage, sandbox) = (Code::Usage.number(), Code::Sandbox.number());
        for (unit, about_sandbox, about_usage) in [
            ("receive", "cannot restrict it", "line is wrong"),
            ("daemon", "prevents the restrictions", "configuration is wrong"),
        ] {
            let unit = file(&format!("dist/systemd/vmferry-{unit}.service"));
            let line = format!("\nRestartPreventExitStatus={usage} {sandbox}\n");
            assert!(unit.contains(&line), "{line}");
            // Comments have lines of any length.
            let words: Vec<_> =
                unit.split(['#', ' ', '\n']).filter(|word| !word.is_empty()).collect();
            let words = words.join(" ");
            let parts = [(about_sandbox, sandbox), (about_usage, usage)];
            for part in parts.map(|(text, number)| format!("{text} ({number})")) {
                assert!(words.contains(&part), "the comment says {part}");
            }
        }
    }
}
