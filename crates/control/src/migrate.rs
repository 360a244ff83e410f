//! What a migration is asked for with.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vmferry::SourceConfig;
use vmferry::config::WhenStuck;
use vmferry::config::compression::{CompressionWay, WhenBusy};
use vmferry::source::Change;
use vmferry_transport::{Address, Dialer, IdentityFiles, TlsIdentity, TransportError};

/// How to migrate. Only `to` must be said; everything else is as a [`vmferry::SourceConfig`] has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct MigrateRequest {
    /// Where to: an address as `vmferry_transport::Address` reads it. The sockets of `fd:N,N` are
    /// the client's, and come with the request.
    pub to: String,
    /// The files of this host's identity, for `tls:`. Relative paths are the VMM's.
    pub tls: Option<TlsFiles>,
    /// The IP addresses of the host in `to`, if the client has looked its name up: a VMM that was restricted can't.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// Data channels.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 16)))]
    pub channels: u8,
    /// Longest accepted downtime.
    #[serde(rename = "downtime_limit_ms", with = "ms")]
    #[cfg_attr(feature = "schema", schemars(with = "f64", range(min = 0)))]
    pub downtime_limit: Duration,
    /// How long the guest may be paused before the migration is given up; none: by the downtime
    /// limit.
    #[serde(
        rename = "downtime_abort_ms",
        with = "optional_ms",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub downtime_abort: Option<Duration>,
    /// Cap in bytes per second.
    pub max_bandwidth: Option<u64>,
    /// Most rounds with the guest running.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub max_rounds: u32,
    /// For how long a lost link is made again before the migration is given up.
    #[serde(rename = "reconnect_timeout_ms", with = "ms")]
    #[cfg_attr(feature = "schema", schemars(with = "f64", range(min = 0)))]
    pub reconnect_timeout: Duration,
    /// Most time with the guest running.
    #[serde(rename = "timeout_ms", with = "optional_ms")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub timeout: Option<Duration>,
    /// What to do when neither suffices.
    pub when_stuck: WhenStuck,
    /// Do everything but the switchover until it is allowed.
    pub pause_before_switchover: bool,
    /// Most per cent of their time that the vCPUs may lose when the guest outruns the link; 0 for never.
    #[cfg_attr(feature = "schema", schemars(range(max = 99)))]
    pub throttle: u8,
    /// What is done to pages on their way.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub compress: CompressionWay,
    /// What becomes of pages for which no compressor is free.
    pub when_busy: WhenBusy,
    /// Threads that read and compress; none: one for each processor.
    pub workers: Option<u8>,
    /// Most memory for copies of pages that are written again and again, in bytes.
    pub delta_memory: u64,
    /// Don't send pages that the guest hints free.
    pub free_page_hints: bool,
    /// Hash both memories whole before COMMIT.
    pub verify: bool,
    /// The only version of the protocol to be spoken; none: the newest that the destination speaks too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u16>,
    /// Record what the channels carry.
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
            channels: config.channels,
            downtime_limit: config.downtime_limit,
            downtime_abort: config.downtime_abort,
            max_bandwidth: config.max_bandwidth,
            max_rounds: config.max_rounds,
            reconnect_timeout: config.timeouts.reconnect,
            timeout: config.timeout,
            when_stuck: config.when_stuck,
            pause_before_switchover: config.pause_before_switchover,
            throttle: config.throttle,
            compress: config.compression.way,
            when_busy: config.compression.when_busy,
            workers: config.compression.workers,
            delta_memory: config.compression.delta_memory,
            free_page_hints: config.free_page_hints,
            verify: config.verify,
            protocol: None,
            record: None,
        }
    }
}

impl MigrateRequest {
    /// The engine's configuration, with a new session.
    #[must_use]
    pub fn source_config(&self, journal_directory: PathBuf) -> SourceConfig {
        let mut config = SourceConfig::new(journal_directory);
        config.channels = self.channels;
        config.downtime_limit = self.downtime_limit;
        config.downtime_abort = self.downtime_abort;
        config.max_bandwidth = self.max_bandwidth;
        config.max_rounds = self.max_rounds;
        config.timeouts.reconnect = self.reconnect_timeout;
        config.timeout = self.timeout;
        config.when_stuck = self.when_stuck;
        config.pause_before_switchover = self.pause_before_switchover;
        config.throttle = self.throttle;
        config.compression.way = self.compress;
        config.compression.when_busy = self.when_busy;
        config.compression.workers = self.workers;
        config.compression.delta_memory = self.delta_memory;
        config.free_page_hints = self.free_page_hints;
        config.verify = self.verify;
        if let Some(version) = self.protocol {
            config.protocol = version..=version;
        }
        config
    }
}

/// Times as a number of milliseconds.
mod ms {
    use super::{Deserialize, Deserializer, Duration, Serializer};

    pub fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        let ms = time.as_secs_f64() * 1e3;
        // Whole ones, which nearly all are, without a point.
        if ms.fract() == 0.0 { to.serialize_u64(ms as u64) } else { to.serialize_f64(ms) }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        let ms = f64::deserialize(from)?;
        Duration::try_from_secs_f64(ms / 1e3).map_err(serde::de::Error::custom)
    }
}

/// The same where there may be none.
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

/// What changes of a migration under way; what is not said stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ChangeRequest {
    /// Cap in bytes per second from now on; `null` takes the cap back.
    #[serde(deserialize_with = "said", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<u64>"))]
    pub max_bandwidth: Option<Option<u64>>,
    /// Longest accepted downtime.
    #[serde(
        rename = "downtime_limit_ms",
        with = "optional_ms",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub downtime_limit: Option<Duration>,
    /// Most rounds with the guest running.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_rounds: Option<u32>,
    /// Most per cent of their time that the vCPUs may lose.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttle: Option<u8>,
}

/// A member that is there, be it `null`.
fn said<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Option<u64>>, D::Error> {
    Option::deserialize(from).map(Some)
}

impl From<ChangeRequest> for Change {
    fn from(request: ChangeRequest) -> Self {
        Self {
            max_bandwidth: request.max_bandwidth,
            downtime_limit: request.downtime_limit,
            max_rounds: request.max_rounds,
            throttle: request.throttle,
        }
    }
}

/// How a guest is watched to say what a migration would cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct EstimateRequest {
    /// For how long.
    #[serde(rename = "time_ms", with = "ms")]
    #[cfg_attr(feature = "schema", schemars(with = "f64", range(min = 0)))]
    pub time: Duration,
}

impl Default for EstimateRequest {
    fn default() -> Self {
        Self { time: Duration::from_secs(5) }
    }
}

/// Where the VMM records the channels of a migration. Guest memory stands in the files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RecordRequest {
    /// The directory; made, with mode 0700, if it is missing.
    pub directory: PathBuf,
    /// Bytes in all files together.
    pub limit: u64,
}

/// The files of a host's identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    #[serde(default, rename = "clock_skew_ms", with = "optional_ms")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub clock_skew: Option<Duration>,
    /// The name that the destination's certificate must have, if not the address's.
    #[serde(default)]
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
