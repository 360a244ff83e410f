//! What can be asked of a running guest.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmferry::compression::{CompressionWay, WhenBusy};
use vmferry::convergence::WhenStuck;
use vmferry::handover::OperatorWord;
use vmferry::newer;
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

/// What every request has, of whatever release.
#[derive(Deserialize)]
struct Kind {
    request: String,
}

/// The requests of this release.
const KINDS: [&str; 9] =
    ["status", "pause", "resume", "quit", "migrate", "set", "cancel", "balloon", "resolve"];

impl Request {
    /// Reads a line. What stands in a member `optional` may be unknown.
    ///
    /// # Errors
    /// [`ErrorCode::BadRequest`], with the name of the request or of the member that this release does not know.
    pub fn read(line: &str) -> Result<Self, ControlError> {
        let bad = |text: String| ControlError::new(ErrorCode::BadRequest, text);
        let kind: Kind = serde_json::from_str(line)
            .map_err(|error| bad(format!("this is no request: {error}")))?;
        let (name, release) = (kind.request, env!("CARGO_PKG_VERSION"));
        if !KINDS.contains(&name.as_str()) {
            let text = format!(
                "this guest's VMM is vmferry {release}, which has no request `{name}`: use that release's command"
            );
            return Err(bad(text));
        }
        newer::read(line.as_bytes()).map_err(|error| {
            bad(format!(
                "this guest's VMM is vmferry {release}, and can't read this request `{name}`: {error}; leave the option \
                 out, or use that release's command"
            ))
        })
    }
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
    /// The IP addresses of the host in `to`, if the client has looked its name up: a VMM that was restricted can't.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
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
    /// The only version of the protocol to be spoken; none: the newest that the destination speaks too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u16>,
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

    /// What they are to the transport.
    #[must_use]
    pub fn files(&self) -> IdentityFiles {
        let mut files = IdentityFiles::new(&self.ca, &self.certificate, &self.key);
        files.revocations.clone_from(&self.revocations);
        files.revocations_if_present.clone_from(&self.revocations_if_present);
        files.clock_skew = self.clock_skew.unwrap_or(files.clock_skew);
        files
    }

    /// Reads the files.
    ///
    /// # Errors
    /// The file, and what is wrong with it.
    pub fn identity(&self) -> Result<TlsIdentity, TransportError> {
        TlsIdentity::new(self.files())
    }

    /// The way to a destination with this identity.
    ///
    /// # Errors
    /// As [`identity`](Self::identity).
    pub fn dialer(&self, address: Address) -> Result<Dialer, TransportError> {
        self.dialer_opened(address, Vec::new())
    }

    /// The same where a client has opened the files, in the order of [`IdentityFiles::paths`]: the VMM may not be able
    /// to.
    ///
    /// # Errors
    /// As [`identity`](Self::identity).
    pub fn dialer_opened(
        &self,
        address: Address,
        opened: Vec<OwnedFd>,
    ) -> Result<Dialer, TransportError> {
        let files = self.files();
        let paths: Vec<_> = files.paths().map(Path::to_owned).collect();
        let opened: Vec<_> = paths.into_iter().zip(opened.into_iter().map(File::from)).collect();
        let identity = TlsIdentity::new_opened(files, &opened)?;
        let mut dialer = Dialer::new(address, Some(Arc::new(identity)));
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
    /// This host or the other one failed; or a VMM of a newer release has a code that this one does not know.
    #[serde(other)]
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
            addresses: vec!["192.0.2.1".parse().unwrap()],
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
            protocol: None,
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
    fn unknown_requests_and_members_are_refused_by_name() {
        for (text, names) in [
            (r#"{"request":"dance"}"#, "no request `dance`"),
            (r#"{"request":"dance","optional":{}}"#, "no request `dance`"),
            (r#"{"request":"status","x":1}"#, "unknown field `x`"),
            (r#"{"request":"set","max_bandwidth":null,"x":1}"#, "unknown field `x`"),
            (r#"{"request":"resolve","word":"nobody"}"#, "unknown variant `nobody`"),
            ("{}", "missing field `request`"),
            ("[]", "no request"),
            ("", "no request"),
        ] {
            let error = Request::read(text).unwrap_err();
            assert_eq!(error.code, ErrorCode::BadRequest);
            assert!(error.message.contains(names), "{text}: {error}");
        }
        let text = r#"{"request":"status","optional":{"x":1}}"#;
        assert_eq!(Request::read(text), Ok(Request::Status {}));
    }

    /// A migration whose options the VMM does not know all must not begin.
    #[test]
    fn an_unknown_option_of_a_migration_is_refused_by_name() {
        let line = GOLDEN[4].1;
        for (golden, later) in [
            (r#""verify":true"#, r#""verify":true,"freeze_disks":true"#),
            (r#""ca":"a""#, r#""ca":"a","pinned":"x""#),
        ] {
            let newer = line.replace(golden, later);
            assert_ne!(newer, line);
            let error = Request::read(&newer).unwrap_err().to_string();
            let name = if later.contains("freeze") { "freeze_disks" } else { "pinned" };
            assert!(error.contains(&format!("unknown field `{name}`")), "{error}");
        }
    }

    /// Requests as this release writes them, and those that it reads of releases before.
    const GOLDEN: [(bool, &str); 12] = [
        (true, r#"{"request":"status"}"#),
        (true, r#"{"request":"pause"}"#),
        (true, r#"{"request":"resume"}"#),
        (true, r#"{"request":"quit"}"#),
        (
            true,
            r#"{"request":"migrate","to":"tls:b:1","tls":{"ca":"a","certificate":"c","key":"k","revocations":[],"revocations_if_present":"r","clock_skew":{"secs":300,"nanos":0},"server_name":null,"destination_id":"spiffe://x"},"channels":2,"downtime_limit":{"secs":0,"nanos":300000000},"max_bandwidth":null,"max_rounds":30,"reconnect_timeout":{"secs":30,"nanos":0},"timeout":null,"when_stuck":"refuse","throttle":80,"compress":"zstd:3","when_busy":"raw","workers":null,"delta_memory":268435456,"free_page_hints":true,"verify":true}"#,
        ),
        (
            true,
            r#"{"request":"migrate","to":"unix:b","tls":null,"channels":16,"downtime_limit":{"secs":1,"nanos":0},"max_bandwidth":9,"max_rounds":1,"reconnect_timeout":{"secs":0,"nanos":0},"timeout":{"secs":60,"nanos":0},"when_stuck":"switch-over","throttle":0,"compress":"auto","when_busy":"wait","workers":3,"delta_memory":0,"free_page_hints":false,"verify":false,"protocol":1}"#,
        ),
        (true, r#"{"request":"set","max_bandwidth":null}"#),
        (true, r#"{"request":"cancel"}"#),
        (true, r#"{"request":"balloon","target_bytes":1048576}"#),
        (true, r#"{"request":"resolve","word":"source-resumes"}"#),
        (true, r#"{"request":"resolve","word":"destination-owns"}"#),
        (false, r#"{"request":"balloon"}"#),
    ];

    #[test]
    fn golden_requests() {
        for (written, line) in GOLDEN {
            let request = Request::read(line).expect(line);
            let text = serde_json::to_string(&request).unwrap();
            assert!(!written || text == line, "{text}");
        }
        for kind in KINDS {
            let line = format!(r#"{{"request":"{kind}""#);
            assert!(GOLDEN.iter().any(|(_, golden)| golden.starts_with(&line)), "{kind}");
        }
    }

    #[test]
    fn golden_answers() {
        let refused = ControlError::new(ErrorCode::WrongState, "no");
        let text = serde_json::to_string(&refused).unwrap();
        assert_eq!(text, r#"{"code":"wrong-state","message":"no"}"#);
        for (code, name) in [
            (ErrorCode::BadRequest, "bad-request"),
            (ErrorCode::Connect, "connect"),
            (ErrorCode::Authentication, "authentication"),
            (ErrorCode::Protocol, "protocol"),
            (ErrorCode::Incompatible, "incompatible"),
            (ErrorCode::Busy, "busy"),
            (ErrorCode::LinkLost, "link-lost"),
            (ErrorCode::NotConverging, "not-converging"),
            (ErrorCode::Cancelled, "cancelled"),
            (ErrorCode::Corrupt, "corrupt"),
            (ErrorCode::InDoubt, "in-doubt"),
            (ErrorCode::Internal, "internal"),
        ] {
            assert_eq!(serde_json::to_string(&code).unwrap(), format!("\"{name}\""));
        }
        // A VMM of a newer release: the words are what counts.
        let newer = r#"{"code":"frozen","message":"thaw it first","since":9}"#;
        let error: ControlError = serde_json::from_str(newer).unwrap();
        assert_eq!((error.code, error.message.as_str()), (ErrorCode::Internal, "thaw it first"));
    }
}
