//! The options of `vmferry receive`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_memory::MemoryKind;
use vmferry_sandbox::SandboxMode;

use super::migration::parse_protocol;
use super::{HookOptions, RecordOptions, TlsOptions, WitnessOptions, parse_bytes};

/// `vmferry receive`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmferry receive --listen 0.0.0.0:7001 --tls /etc/vmferry/tls
  vmferry receive --listen grpc:0.0.0.0:443 --tls /etc/vmferry/tls
  vmferry receive --listen 0.0.0.0:7001 --tls /etc/vmferry/tls --policy /etc/vmferry/policy.toml
  vmferry receive --listen unix:/run/vmferry/in.sock --expect-name web --once
  vmferry receive --listen fd:3,4,5 --once   # sockets that the parent process has connected
  vmferry receive --listen 0.0.0.0:7001 --tls /etc/vmferry/tls --qemu /run/qemu/web.qmp
  vmferry receive --listen 0.0.0.0:7001 --tls /etc/vmferry/tls --exec 'qemu-system-x86_64 -m 2G …'\
")]
pub struct ReceiveOptions {
    /// Where to listen: HOST:PORT (TLS), grpc:HOST:PORT (grpc: and grpc-ack: over TLS), unix:PATH,
    /// fd:N,N… (connected sockets), or with --plain tcp:HOST:PORT. Port 0 picks a free port.
    #[arg(long, value_name = "ADDRESS")]
    pub listen: String,
    /// TLS.
    #[command(flatten)]
    pub tls: TlsOptions,
    /// Accept only the guests and sources that this policy allows (TOML; docs/security.md has the
    /// format). Without it, every host with a certificate of the authority may send any guest.
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Accept only the guest with this name.
    #[arg(long, value_name = "NAME")]
    pub expect_name: Option<String>,
    /// Accept only the guest with this UUID.
    #[arg(long, value_name = "UUID")]
    pub expect_uuid: Option<uuid::Uuid>,
    /// Accept only the source with this first name in its certificate.
    #[arg(long, value_name = "NAME", hide = true)]
    pub expect_source: Option<String>,
    /// Exit if no source has offered a guest within this time.
    #[arg(long, value_name = "TIME", hide = true, value_parser = super::parse_duration)]
    pub wait: Option<std::time::Duration>,
    /// Answer for the guest that an earlier receiver has left; without one, exit.
    #[arg(long, hide = true, requires = "exec")]
    pub found_only: bool,
    /// Receive into the QEMU with this QMP socket, which was started with `-incoming defer`.
    #[arg(long, value_name = "QMP_SOCKET", conflicts_with = "exec")]
    pub qemu: Option<PathBuf>,
    /// Start this QEMU and receive into it: the source's command line, without `-incoming`, `-S`
    /// and the QMP socket.
    #[arg(long, value_name = "COMMAND")]
    pub exec: Option<String>,
    /// Accept only a guest with this much memory.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes,
          conflicts_with_all = ["qemu", "exec"])]
    pub expect_memory: Option<u64>,
    /// Kind of guest memory on this host: private, memfd, thp, or hugetlb (reserved huge pages).
    #[arg(long, default_value = "private", value_name = "KIND",
          conflicts_with_all = ["qemu", "exec"])]
    pub memory_kind: MemoryKind,
    /// The dirty log for the guest's next migration: auto, bitmap, clear, ring, or uffd.
    #[arg(long, default_value = "auto", value_name = "LOG", conflicts_with_all = ["qemu", "exec"])]
    pub dirty_log: LogChoice,
    /// How its dirty log of device writes is then read: switch, or for comparison get.opt or
    /// get.org.
    #[arg(long, default_value = "switch", value_name = "WAY",
          conflicts_with_all = ["qemu", "exec"])]
    pub device_log: SoftwareWay,
    /// Threads that decode and place pages; by default one per processor, at most 64.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub workers: Option<u8>,
    /// Speak only this version of the protocol; by default the newest that both sides speak.
    #[arg(long, value_name = "VERSION", value_parser = parse_protocol())]
    pub protocol: Option<u16>,
    /// Exit after the first failed attempt.
    #[arg(long)]
    pub once: bool,
    /// The hook.
    #[command(flatten)]
    pub hook: HookOptions,
    /// The witness.
    #[command(flatten)]
    pub witness: WitnessOptions,
    /// Recording.
    #[command(flatten)]
    pub record: RecordOptions,
    /// Before accepting connections, drop the privileges that a receiver does not need:
    /// capabilities, files, ports, system calls and core dumps. auto: all that this kernel can
    /// restrict; require: all of them, or don't start; off: none.
    #[arg(long, value_enum, default_value_t = SandboxOption::Auto, value_name = "HOW")]
    pub sandbox: SandboxOption,
}

/// How much a receiver restricts itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SandboxOption {
    /// As far as this kernel allows.
    Auto,
    /// Completely; otherwise it does not start.
    Require,
    /// Not at all.
    Off,
}

impl From<SandboxOption> for SandboxMode {
    fn from(option: SandboxOption) -> Self {
        match option {
            SandboxOption::Auto => Self::Auto,
            SandboxOption::Require => Self::Require,
            SandboxOption::Off => Self::Off,
        }
    }
}

/// `vmferry start-qemu`.
#[derive(Debug, Args)]
pub struct StarterOptions {
    /// Path of the QMP socket that QEMU creates.
    #[arg(long, value_name = "QMP_SOCKET", required_unless_present = "beside")]
    pub qmp: Option<PathBuf>,
    /// Start nothing, and inspect this running QEMU process.
    #[arg(long, value_name = "PID", conflicts_with_all = ["qmp", "command"])]
    pub beside: Option<u32>,
    /// QEMU's command line.
    #[arg(required_unless_present = "beside")]
    pub command: Option<String>,
}
