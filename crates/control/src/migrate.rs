//! The bodies of requests about migrations.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vmferry::SourceConfig;
use vmferry::config::compression::{CompressionWay, WhenBusy};
use vmferry::config::{
    BandwidthCap, ChannelCount, ConfigError, PostCopy, ProtocolVersions, RoundLimit, ThrottleLimit,
    WhenStuck, WorkerCount,
};
use vmferry::source::Change;
use vmferry::witness::Witness;
use vmferry_transport::{Address, Dialer, IdentityFiles, TlsIdentity, TransportError};

use crate::witness::{SocketWitness, WitnessSocketError};

/// Options of a migration. Only `to` is required. The other defaults are those of
/// [`vmferry::SourceConfig`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct MigrateRequest {
    /// The destination, as an address that `vmferry_transport::Address` parses. The sockets in
    /// `fd:N,N` are the client's; it sends them with the request.
    pub to: String,
    /// The files of this host's identity, for `tls:`. The VMM resolves relative paths.
    pub tls: Option<TlsFiles>,
    /// The IP addresses of the host in `to`, if the client has resolved its name. A VMM in a
    /// sandbox cannot resolve names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// Number of data channels.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 16)))]
    pub channels: u8,
    /// Maximum accepted downtime.
    #[serde(rename = "downtime_limit_ms", with = "ms")]
    #[cfg_attr(feature = "schema", schemars(with = "f64", range(min = 0)))]
    pub downtime_limit: Duration,
    /// How long the guest may be paused before the migration is canceled; derived from the downtime
    /// limit if absent.
    #[serde(
        rename = "downtime_abort_ms",
        with = "optional_ms",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub downtime_abort: Option<Duration>,
    /// Bandwidth limit in bytes per second.
    pub max_bandwidth: Option<u64>,
    /// Maximum number of rounds with the guest running.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub max_rounds: u32,
    /// How long the source tries to reestablish a lost link before it gives up.
    #[serde(rename = "reconnect_timeout_ms", with = "ms")]
    #[cfg_attr(feature = "schema", schemars(with = "f64", range(min = 0)))]
    pub reconnect_timeout: Duration,
    /// Maximum time with the guest running.
    #[serde(rename = "timeout_ms", with = "optional_ms")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub timeout: Option<Duration>,
    /// What to do when the rounds or the time are used up.
    pub when_stuck: WhenStuck,
    /// Whether the guest may run at the destination before all its pages have arrived.
    pub post_copy: PostCopy,
    /// Do everything except the switchover, and then wait for permission.
    pub pause_before_switchover: bool,
    /// Maximum share of their time that the vCPUs may lose when the guest outruns the link, in
    /// percent; 0 disables throttling.
    #[cfg_attr(feature = "schema", schemars(range(max = 99)))]
    pub throttle: u8,
    /// The encoding of pages.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub compress: CompressionWay,
    /// What to do with pages for which no compressor is free.
    pub when_busy: WhenBusy,
    /// Number of threads that read and compress; one per processor if absent.
    pub workers: Option<u8>,
    /// Maximum memory for copies of frequently written pages, in bytes.
    pub delta_memory: u64,
    /// Do not send pages that the guest hints are free.
    pub free_page_hints: bool,
    /// Hash the whole memory on both sides before COMMIT.
    pub verify: bool,
    /// The only protocol version to speak; if absent, the newest version that both sides speak.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u16>,
    /// The socket of the witness that decides a handover in doubt; the destination must have the
    /// same witness.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub witness: Option<PathBuf>,
    /// Record the content of the channels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record: Option<RecordRequest>,
}

impl Default for MigrateRequest {
    fn default() -> Self {
        let config = SourceConfig::new(PathBuf::new());
        Self {
            to: String::new(),
            tls: None,
            addresses: Vec::new(),
            channels: config.channels.get(),
            downtime_limit: config.downtime_limit,
            downtime_abort: config.downtime_abort,
            max_bandwidth: config.max_bandwidth.map(BandwidthCap::get),
            max_rounds: config.max_rounds.get(),
            reconnect_timeout: config.timeouts.reconnect,
            timeout: config.timeout,
            when_stuck: config.when_stuck,
            post_copy: config.post_copy,
            pause_before_switchover: config.pause_before_switchover,
            throttle: config.throttle.get(),
            compress: config.compression.way,
            when_busy: config.compression.when_busy,
            workers: config.compression.workers.map(WorkerCount::get),
            delta_memory: config.compression.delta_memory,
            free_page_hints: config.free_page_hints,
            verify: config.verify,
            protocol: None,
            witness: None,
            record: None,
        }
    }
}

impl MigrateRequest {
    /// The engine's configuration, with a new session and without its
    /// [witness](Self::open_witness).
    ///
    /// # Errors
    /// The first option that is out of its range.
    pub fn source_config(&self, journal_directory: PathBuf) -> Result<SourceConfig, ConfigError> {
        // Each option is named, so that the compiler notices one that is not used here.
        let Self {
            to: _,
            tls: _,
            addresses: _,
            record: _,
            witness: _,
            channels,
            downtime_limit,
            downtime_abort,
            max_bandwidth,
            max_rounds,
            reconnect_timeout,
            timeout,
            when_stuck,
            post_copy,
            pause_before_switchover,
            throttle,
            compress,
            when_busy,
            workers,
            delta_memory,
            free_page_hints,
            verify,
            protocol,
        } = self.clone();
        let mut config = SourceConfig::new(journal_directory);
        config.channels = ChannelCount::new(channels)?;
        config.max_bandwidth = max_bandwidth.map(BandwidthCap::new).transpose()?;
        config.throttle = ThrottleLimit::new(throttle)?;
        config.compression.workers = workers.map(WorkerCount::new).transpose()?;
        config.max_rounds = RoundLimit::new(max_rounds)?;
        if let Some(version) = protocol {
            config.protocol = ProtocolVersions::new(version..=version)?;
        }
        config.downtime_limit = downtime_limit;
        config.downtime_abort = downtime_abort;
        config.timeouts.reconnect = reconnect_timeout;
        config.timeout = timeout;
        config.when_stuck = when_stuck;
        config.post_copy = post_copy;
        config.pause_before_switchover = pause_before_switchover;
        config.compression.way = compress;
        config.compression.when_busy = when_busy;
        config.compression.delta_memory = delta_memory;
        config.free_page_hints = free_page_hints;
        config.verify = verify;
        Ok(config)
    }

    /// The witness of a new session, if there is one.
    ///
    /// # Errors
    /// No process answers at the socket.
    pub fn open_witness(&self) -> Result<Option<Arc<dyn Witness>>, WitnessSocketError> {
        let Some(path) = &self.witness else { return Ok(None) };
        Ok(Some(Arc::new(SocketWitness::connect(path)?)))
    }
}

/// Times as a number of milliseconds.
mod ms {
    use super::{Deserialize, Deserializer, Duration, Serializer};

    pub fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        let ms = time.as_secs_f64() * 1e3;
        // Whole numbers, which are the usual case, are written without a decimal point.
        if ms.fract() == 0.0 { to.serialize_u64(ms as u64) } else { to.serialize_f64(ms) }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        let ms = f64::deserialize(from)?;
        Duration::try_from_secs_f64(ms / 1e3).map_err(serde::de::Error::custom)
    }
}

/// Optional times as a number of milliseconds.
mod optional_ms {
    use super::{Deserialize, Deserializer, Duration, Serializer, ms};

    pub fn serialize<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        match time {
            Some(time) => ms::serialize(time, to),
            None => to.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        #[derive(Deserialize)]
        struct Time(#[serde(with = "ms")] Duration);
        Ok(Option::<Time>::deserialize(from)?.map(|Time(time)| time))
    }
}

/// Changes to a running migration. Absent members stay unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ChangeRequest {
    /// New bandwidth limit in bytes per second; `null` removes the limit.
    #[serde(deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<u64>"))]
    pub max_bandwidth: Option<Option<u64>>,
    /// New maximum accepted downtime.
    #[serde(
        rename = "downtime_limit_ms",
        with = "optional_ms",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub downtime_limit: Option<Duration>,
    /// New maximum number of rounds with the guest running.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_rounds: Option<u32>,
    /// New maximum share of their time that the vCPUs may lose, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttle: Option<u8>,
    /// Whether to switch over with post-copy from now on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub post_copy: Option<PostCopy>,
}

/// Distinguishes a present member, which may be `null`, from an absent one.
fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Option<u64>>, D::Error> {
    Option::deserialize(from).map(Some)
}

impl TryFrom<ChangeRequest> for Change {
    type Error = ConfigError;

    fn try_from(request: ChangeRequest) -> Result<Self, ConfigError> {
        let capped = |cap: Option<u64>| cap.map(BandwidthCap::new).transpose();
        Ok(Self {
            max_bandwidth: request.max_bandwidth.map(capped).transpose()?,
            downtime_limit: request.downtime_limit,
            max_rounds: request.max_rounds.map(RoundLimit::new).transpose()?,
            throttle: request.throttle.map(ThrottleLimit::new).transpose()?,
            post_copy: request.post_copy,
        })
    }
}

/// How to watch a guest to estimate the cost of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct EstimateRequest {
    /// How long to watch the guest.
    #[serde(rename = "time_ms", with = "ms")]
    #[cfg_attr(feature = "schema", schemars(with = "f64", range(min = 0)))]
    pub time: Duration,
}

impl Default for EstimateRequest {
    fn default() -> Self {
        Self { time: Duration::from_secs(5) }
    }
}

/// Where the VMM records the channels of a migration. The files contain guest memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RecordRequest {
    /// The directory. It is created with mode 0700 if it is missing.
    pub directory: PathBuf,
    /// Maximum size of all files together, in bytes.
    pub limit: u64,
}

/// The files of a host's identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// Certificates of the trusted authorities, PEM.
    pub ca: PathBuf,
    /// This host's certificate chain, PEM.
    pub certificate: PathBuf,
    /// This host's private key, PEM, readable only by its owner.
    pub key: PathBuf,
    /// Revocation lists of the authorities, PEM.
    #[serde(default)]
    pub revocations: Vec<PathBuf>,
    /// Another revocation list, which may be missing.
    #[serde(default)]
    pub revocations_if_present: Option<PathBuf>,
    /// How long a certificate may be accepted before or after its validity, to allow for clock
    /// differences; 5 min if absent.
    #[serde(default, rename = "clock_skew_ms", with = "optional_ms")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub clock_skew: Option<Duration>,
    /// The name that the destination's certificate must have; the host in the address if absent.
    #[serde(default)]
    pub server_name: Option<String>,
    /// The URI that the destination's certificate must have. With it, no name is required.
    #[serde(default)]
    pub destination_id: Option<String>,
}

impl TlsFiles {
    /// `ca.pem`, `host.pem` and `host.key` in a directory that `vmferry pki` has created, and
    /// `crl.pem` if it exists.
    #[must_use]
    pub fn in_directory(directory: &Path) -> Self {
        IdentityFiles::in_directory(directory).into()
    }

    /// The files in the transport's form.
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
    /// The file that failed, and the reason.
    pub fn identity(&self) -> Result<TlsIdentity, TransportError> {
        TlsIdentity::new(self.files())
    }

    /// A dialer to a destination with this identity.
    ///
    /// # Errors
    /// As [`identity`](Self::identity).
    pub fn dialer(&self, address: Address) -> Result<Dialer, TransportError> {
        self.dialer_opened(address, Vec::new())
    }

    /// Like [`dialer`](Self::dialer), with files that the client has opened, in the order of
    /// [`IdentityFiles::paths`]. The VMM may not be able to open them.
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
