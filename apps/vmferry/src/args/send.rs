//! The options of `vmferry send`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{HookOptions, MigrationOptions, RecordOptions, TlsOptions};

/// `vmferry send`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmferry send web --to host-b:7001 --tls /etc/vmferry/tls
  vmferry send web --to host-b:7001 --tls /etc/vmferry/tls --downtime-limit 50ms --max-bandwidth 500M
  vmferry send web --to grpc:proxy:443 --server-name host-b --tls /etc/vmferry/tls
  vmferry send web --to 192.0.2.7:7001 --tls /etc/vmferry/tls --destination-id spiffe://vmferry/host/host-b
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
    /// Send the guest of the QEMU that has this QMP socket.
    #[arg(long, value_name = "QMP_SOCKET")]
    pub qemu: Option<PathBuf>,
    /// How the guest of a QEMU is moved: attached (vmferry reads its memory itself), carried (QEMU's own migration goes
    /// over vmferry's channels), or auto: attached if that can be done.
    #[arg(long, value_enum, default_value_t = QemuMode::Auto, requires = "qemu")]
    pub mode: QemuMode,
    /// Have a QEMU that is carried spread memory over so many further streams (its `multifd`), on a data channel
    /// each; by default it has one stream.
    #[arg(long, value_name = "STREAMS", requires = "qemu", value_parser = clap::value_parser!(u8).range(1..=15))]
    pub multifd: Option<u8>,
    /// Leave the QEMU that the guest has left as it is, stopped, and its memory files with all
    /// their pages; by default it is ended, and the pages are given back.
    #[arg(long, requires = "qemu")]
    pub keep_source: bool,
    /// Where to: HOST:PORT (TLS), grpc:HOST:PORT or grpc-ack:HOST:PORT (gRPC over TLS, streamed or
    /// acknowledged), unix:PATH, fd:N,N… (connected sockets), or with --plain tcp:HOST:PORT.
    #[arg(long, value_name = "ADDRESS")]
    pub to: String,
    /// TLS.
    #[command(flatten)]
    pub tls: TlsOptions,
    /// The name that the destination's certificate must have, if not the address's.
    #[arg(long, value_name = "NAME")]
    pub server_name: Option<String>,
    /// The URI that the destination's certificate must have, such as spiffe://vmferry/host/NAME; it then
    /// needs no other name.
    #[arg(long, value_name = "URI", conflicts_with = "server_name")]
    pub destination_id: Option<String>,
    /// Limits and ways.
    #[command(flatten)]
    pub migration: MigrationOptions,
    /// Hash both paused memories whole and compare them; adds to the pause.
    #[arg(long)]
    pub verify: bool,
    /// Who is told.
    #[command(flatten)]
    pub hook: HookOptions,
    /// What is recorded.
    #[command(flatten)]
    pub record: RecordOptions,
}

/// How the guest of a QEMU is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QemuMode {
    /// Attached if that can be done, and carried otherwise.
    Auto,
    /// vmferry attaches to the process and reads the guest's memory.
    Attached,
    /// QEMU's own migration, carried.
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
