//! `vmferry receive`: its options.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_memory::MemoryKind;
use vmferry_sandbox::Wanted;

use super::migration::parse_protocol;
use super::{HookOptions, RecordOptions, TlsOptions, parse_bytes};

/// `vmferry receive`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmferry receive --listen 0.0.0.0:7001 --tls /etc/vmferry/tls
  vmferry receive --listen grpc:0.0.0.0:443 --tls /etc/vmferry/tls
  vmferry receive --listen 0.0.0.0:7001 --tls /etc/vmferry/tls --policy /etc/vmferry/policy.toml
  vmferry receive --listen unix:/run/vmferry/in.sock --expect-name web --once
  vmferry receive --listen fd:3,4,5 --once   # sockets that the caller has connected
  vmferry receive --listen 0.0.0.0:7001 --tls /etc/vmferry/tls --qemu /run/qemu/web.qmp
  vmferry receive --listen 0.0.0.0:7001 --tls /etc/vmferry/tls --exec 'qemu-system-x86_64 -m 2G …'")]
pub struct ReceiveOptions {
    /// Where to listen: HOST:PORT (TLS), grpc:HOST:PORT (both ways of gRPC over TLS), unix:PATH, fd:N,N…
    /// (connected sockets), or with --plain tcp:HOST:PORT. Port 0 picks one.
    #[arg(long, value_name = "ADDRESS")]
    pub listen: String,
    /// TLS.
    #[command(flatten)]
    pub tls: TlsOptions,
    /// Take guests only as this file allows (TOML; docs/security.md has the format). Without it, whoever has a
    /// certificate of the authority may send any guest.
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Take this guest only, by name.
    #[arg(long, value_name = "NAME")]
    pub expect_name: Option<String>,
    /// Take this guest only, by UUID.
    #[arg(long, value_name = "UUID")]
    pub expect_uuid: Option<uuid::Uuid>,
    /// Take the guest into the QEMU that has this QMP socket and was started with `-incoming defer`.
    #[arg(long, value_name = "QMP_SOCKET", conflicts_with = "exec")]
    pub qemu: Option<PathBuf>,
    /// Start this QEMU and take the guest into it: the source's command line, without `-incoming`, `-S`
    /// and the QMP socket.
    #[arg(long, value_name = "COMMAND")]
    pub exec: Option<String>,
    /// Take a guest with so much memory only.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, conflicts_with_all = ["qemu", "exec"])]
    pub expect_memory: Option<u64>,
    /// What the guest's memory is made of here: private, memfd, thp, or hugetlb (reserved huge pages).
    #[arg(long, default_value = "private", value_name = "KIND", conflicts_with_all = ["qemu", "exec"])]
    pub memory_kind: MemoryKind,
    /// The dirty log for the guest's next migration: auto, bitmap, clear, ring, or uffd.
    #[arg(long, default_value = "auto", value_name = "LOG", conflicts_with_all = ["qemu", "exec"])]
    pub dirty_log: LogChoice,
    /// How the log of its devices' writes is read then: switch, or to compare get.opt and get.org.
    #[arg(long, default_value = "switch", value_name = "WAY", conflicts_with_all = ["qemu", "exec"])]
    pub device_log: SoftwareWay,
    /// Threads that decode and place pages; by default one for each processor, at most 16.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub workers: Option<u8>,
    /// Speak this version of the protocol only; by default the newest that the source speaks too.
    #[arg(long, value_name = "VERSION", value_parser = parse_protocol())]
    pub protocol: Option<u16>,
    /// End after the first attempt that fails.
    #[arg(long)]
    pub once: bool,
    /// Who is told.
    #[command(flatten)]
    pub hook: HookOptions,
    /// What is recorded.
    #[command(flatten)]
    pub record: RecordOptions,
    /// Give up what a receiver does not need before anybody can connect: capabilities, files, ports, system calls and core
    /// dumps. auto: all that this kernel can refuse; require: all, or don't start; off: nothing.
    #[arg(long, value_enum, default_value_t = SandboxOption::Auto, value_name = "HOW")]
    pub sandbox: SandboxOption,
}

/// How a receiver is restricted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SandboxOption {
    /// As far as this kernel can.
    Auto,
    /// Wholly, or it does not start.
    Require,
    /// Not at all.
    Off,
}

impl From<SandboxOption> for Wanted {
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
    /// Where QEMU is to have its QMP socket.
    #[arg(long, value_name = "QMP_SOCKET", required_unless_present = "beside")]
    pub qmp: Option<PathBuf>,
    /// Start nothing, and look into this QEMU process, which runs already.
    #[arg(long, value_name = "PID", conflicts_with_all = ["qmp", "command"])]
    pub beside: Option<u32>,
    /// QEMU's command line.
    #[arg(required_unless_present = "beside")]
    pub command: Option<String>,
}
