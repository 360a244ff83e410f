//! What can be asked of a running guest.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmferry::compression::{CompressionWay, WhenBusy};
use vmferry::convergence::WhenStuck;
use vmferry::handover::OperatorWord;
use vmferry_transport::{Address, Dialer, IdentityFiles, TlsIdentity, TransportError};

/// A request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// The machine, the guest's report and the migration under way, if there is one.
    Status {},
    /// Pauses the guest.
    Pause {},
    /// Lets a paused guest run on.
    Resume {},
    /// Ends the guest and its VMM.
    Quit {},
    /// Migrates the guest.
    Migrate(Box<MigrateRequest>),
    /// Changes the migration under way.
    Set {
        /// Cap in bytes per second from now on; none takes the cap back.
        max_bandwidth: Option<u64>,
    },
    /// Ends the migration under way; the guest stays.
    Cancel {},
    /// Sets how large the guest's balloon shall be, if that is said, and shows it with fresh statistics.
    Balloon {
        /// Bytes that the guest shall do without.
        #[serde(default)]
        target_bytes: Option<u64>,
    },
    /// Decides a hand-over that is in doubt.
    Resolve {
        /// Who has the guest.
        word: OperatorWord,
    },
}

/// How to migrate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// Where to: an address as `vmferry_transport::Address` reads it. The sockets of `fd:N,N` are
    /// the client's, and come with the request.
    pub to: String,
    /// The files of this host's identity, for `tls:`. Relative paths are the VMM's.
    pub tls: Option<TlsFiles>,
    /// Data channels.
    pub channels: u8,
    /// Longest accepted downtime.
    pub downtime_limit: Duration,
    /// Cap in bytes per second.
    pub max_bandwidth: Option<u64>,
    /// Most rounds with the guest running.
    pub max_rounds: u32,
    /// For how long a lost link is made again before the migration is given up.
    pub reconnect_timeout: Duration,
    /// Most time with the guest running.
    pub timeout: Option<Duration>,
    /// What to do when neither suffices.
    pub when_stuck: WhenStuck,
    /// Most per cent of their time that the vCPUs may lose when the guest outruns the link; 0 for never.
    pub throttle: u8,
    /// What is done to pages on their way.
    pub compress: CompressionWay,
    /// What becomes of pages for which no compressor is free.
    pub when_busy: WhenBusy,
    /// Threads that read and compress; none: one for each processor.
    pub workers: Option<u8>,
    /// Most memory for copies of pages that are written again and again, in bytes.
    pub delta_memory: u64,
    /// Don't send pages that the guest hints free.
    #[serde(default = "yes")]
    pub free_page_hints: bool,
    /// Hash both memories whole before COMMIT.
    pub verify: bool,
    /// Record what the channels carry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<RecordRequest>,
}

/// Where the VMM records the channels of a migration. Guest memory stands in the files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordRequest {
    /// The directory; made, with mode 0700, if it is missing.
    pub directory: PathBuf,
    /// Bytes in all files together.
    pub limit: u64,
}

fn yes() -> bool {
    true
}

/// The files of a host's identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// Certificates of the authorities that peers are trusted by, PEM.
    pub ca: PathBuf,
    /// This host's certificate chain, PEM.
    pub certificate: PathBuf,
    /// This host's private key, PEM, readable by its owner only.
    pub key: PathBuf,
    /// Revocation lists of the authorities, PEM.
    #[serde(default)]
    pub revocations: Vec<PathBuf>,
    /// Another one, which need not be there.
    #[serde(default)]
    pub revocations_if_present: Option<PathBuf>,
    /// How far out of date a certificate may be, for clocks that differ; none: the usual 5 min.
    #[serde(default)]
    pub clock_skew: Option<Duration>,
    /// The name that the destination's certificate must have, if not the address's.
    pub server_name: Option<String>,
    /// The URI that the destination's certificate must have; it then needs no other name.
    #[serde(default)]
    pub destination_id: Option<String>,
}

impl TlsFiles {
    /// `ca.pem`, `host.pem` and `host.key` of a directory as `vmferry pki` makes it, and `crl.pem` if it is there.
    #[must_use]
    pub fn in_directory(directory: &Path) -> Self {
        IdentityFiles::in_directory(directory).into()
    }

    /// Reads the files.
    ///
    /// # Errors
    /// The file, and what is wrong with it.
    pub fn identity(&self) -> Result<TlsIdentity, TransportError> {
        let mut files = IdentityFiles::new(&self.ca, &self.certificate, &self.key);
        files.revocations.clone_from(&self.revocations);
        files.revocations_if_present.clone_from(&self.revocations_if_present);
        files.clock_skew = self.clock_skew.unwrap_or(files.clock_skew);
        TlsIdentity::new(files)
    }

    /// The way to a destination with this identity.
    ///
    /// # Errors
    /// As [`identity`](Self::identity).
    pub fn dialer(&self, address: Address) -> Result<Dialer, TransportError> {
        let mut dialer = Dialer::new(address, Some(Arc::new(self.identity()?)));
        dialer.server_name.clone_from(&self.server_name);
        dialer.destination_id.clone_from(&self.destination_id);
        Ok(dialer)
    }
}

impl From<IdentityFiles> for TlsFiles {
    fn from(files: IdentityFiles) -> Self {
        Self {
            ca: files.ca,
            certificate: files.certificate,
            key: files.key,
            revocations: files.revocations,
            revocations_if_present: files.revocations_if_present,
            clock_skew: Some(files.clock_skew),
            server_name: None,
            destination_id: None,
        }
    }
}

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
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
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// The request can't be read or makes no sense.
    BadRequest,
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
    /// This host or the other one failed.
    Internal,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_read_as_they_are_written() {
        let migrate = MigrateRequest {
            to: "tls:b:7001".into(),
            tls: None,
            channels: 2,
            downtime_limit: Duration::from_millis(300),
            max_bandwidth: Some(1 << 20),
            max_rounds: 30,
            reconnect_timeout: Duration::from_secs(30),
            timeout: None,
            when_stuck: WhenStuck::Refuse,
            throttle: 80,
            compress: CompressionWay::Auto,
            when_busy: WhenBusy::Wait,
            workers: Some(3),
            delta_memory: 1 << 20,
            free_page_hints: false,
            verify: true,
            record: Some(RecordRequest { directory: "/r".into(), limit: 7 }),
        };
        let requests = [
            Request::Status {},
            Request::Migrate(Box::new(migrate)),
            Request::Set { max_bandwidth: None },
            Request::Balloon { target_bytes: Some(1 << 20) },
            Request::Resolve { word: OperatorWord::DestinationOwns },
        ];
        for request in requests {
            let text = serde_json::to_string(&request).unwrap();
            assert_eq!(serde_json::from_str::<Request>(&text).unwrap(), request);
        }
        assert_eq!(serde_json::to_string(&Request::Status {}).unwrap(), r#"{"request":"status"}"#);
    }

    #[test]
    fn unknown_requests_and_fields_are_refused() {
        for text in [r#"{"request":"dance"}"#, r#"{"request":"status","x":1}"#, "{}", "[]"] {
            assert!(serde_json::from_str::<Request>(text).is_err(), "{text}");
        }
    }
}
