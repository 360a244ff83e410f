//! The options of `vmferry send`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{HookOptions, MigrationOptions, RecordOptions, TlsOptions};

/// `vmferry send`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmferry send web --to host-b:7001 --tls /etc/vmferry/tls
  vmferry send web --to host-b:7001 --tls /etc/vmferry/tls --downtime-limit 50ms --max-bandwidth 1G
  vmferry send web --to grpc:proxy:443 --server-name host-b --tls /etc/vmferry/tls
  vmferry send web --to 192.0.2.7:7001 --tls tls-a --destination-id spiffe://vmferry/host/host-b
  vmferry send web --to unix:/run/vmferry/in.sock --verify
  vmferry send web --to fd:3,4,5             # control channel, then two data channels
  vmferry send web --to host-b:7001 --tls /etc/vmferry/tls --compress zstd:3
  vmferry send web --to host-b:7001 --tls /etc/vmferry/tls --throttle 80
  vmferry send --qemu /run/qemu/web.qmp --to host-b:7001 --tls /etc/vmferry/tls
  vmferry send --qemu /run/qemu/web.qmp --mode carried --to host-b:7001 --tls /etc/vmferry/tls")]
pub struct SendOptions {
    /// Name of the guest, or path of its control socket.
    #[arg(required_unless_present = "qemu", conflicts_with = "qemu")]
    pub guest: Option<String>,
    /// Send the guest of the QEMU with this QMP socket.
    #[arg(long, value_name = "QMP_SOCKET")]
    pub qemu: Option<PathBuf>,
    /// How to move a QEMU guest: attached (vmferry reads its memory itself), carried (QEMU's own
    /// migration goes over vmferry's channels), or auto (attached if possible).
    #[arg(long, value_enum, default_value_t = QemuMode::Auto, requires = "qemu")]
    pub mode: QemuMode,
    /// For a carried guest, let QEMU spread memory over this many further streams (its `multifd`),
    /// with a data channel each; by default it has one stream.
    #[arg(long, value_name = "STREAMS", requires = "qemu",
          value_parser = clap::value_parser!(u8).range(1..=15))]
    pub multifd: Option<u8>,
    /// Keep the source's QEMU, stopped, and the pages of its memory files. By default QEMU is quit
    /// and the pages are freed.
    #[arg(long, requires = "qemu")]
    pub keep_source: bool,
    /// The destination: HOST:PORT (TLS), grpc:HOST:PORT or grpc-ack:HOST:PORT (gRPC over TLS,
    /// streamed or acknowledged), unix:PATH, fd:N,N… (connected sockets), or with --plain
    /// tcp:HOST:PORT.
    #[arg(long, value_name = "ADDRESS")]
    pub to: String,
    /// TLS.
    #[command(flatten)]
    pub tls: TlsOptions,
    /// The name that the destination's certificate must have, if it is not the address.
    #[arg(long, value_name = "NAME")]
    pub server_name: Option<String>,
    /// The URI that the destination's certificate must have, such as spiffe://vmferry/host/NAME. No
    /// other name is checked then.
    #[arg(long, value_name = "URI", conflicts_with = "server_name")]
    pub destination_id: Option<String>,
    /// Limits and settings.
    #[command(flatten)]
    pub migration: MigrationOptions,
    /// Hash all guest memory on both sides while the guest is paused, and compare; lengthens the
    /// pause.
    #[arg(long)]
    pub verify: bool,
    /// The hook.
    #[command(flatten)]
    pub hook: HookOptions,
    /// Recording.
    #[command(flatten)]
    pub record: RecordOptions,
}

/// How a QEMU guest is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QemuMode {
    /// Attached if possible, otherwise carried.
    Auto,
    /// vmferry attaches to the process and reads the guest's memory.
    Attached,
    /// vmferry carries the streams of QEMU's own migration.
    Carried,
}

impl From<QemuMode> for vmferry_qemu::Mode {
    fn from(option: QemuMode) -> Self {
        match option {
            QemuMode::Auto => Self::Auto,
            QemuMode::Attached => Self::Attached,
            QemuMode::Carried => Self::Carried,
        }
    }
}
