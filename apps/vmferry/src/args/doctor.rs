//! The options of `vmferry doctor`.

use std::path::PathBuf;

use clap::Args;
use vmferry_memory::MemoryKind;

use super::TlsOptions;
use super::units::parse_bytes;

/// `vmferry doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
No guest is moved or paused. With --qemu vmferry attaches to QEMU for a moment, as at the beginning
of a migration, and lets go of it again. With --to the link is loaded for two seconds, through the
`vmferry receive` that waits or hosts a guest there.

Exit status: 0 if all is well, 17 if there is a warning, 18 if there is an error, which keeps
guests from moving.

Examples:
  vmferry doctor
  vmferry doctor --to host-b:7001 --tls /etc/vmferry/tls
  vmferry doctor web --to host-b:7001 --tls /etc/vmferry/tls
  vmferry doctor --qemu /run/qemu/web.qmp --to host-b:7001 --tls /etc/vmferry/tls
  vmferry doctor --memory 8G --memory-kind hugetlb       # would such a guest find room here?
  vmferry doctor --tls /etc/vmferry/tls --policy /etc/vmferry/policy.toml --json")]
pub struct DoctorOptions {
    /// A guest that shall be moved: its name, or the path of its control socket.
    #[arg(conflicts_with = "qemu")]
    pub guest: Option<String>,
    /// The QEMU whose guest shall be moved, by its QMP socket.
    #[arg(long, value_name = "QMP_SOCKET")]
    pub qemu: Option<PathBuf>,
    /// Look at the other host too, through its `vmferry receive` at this address.
    #[arg(long, value_name = "ADDRESS")]
    pub to: Option<String>,
    /// Leave out the two seconds in which the link is loaded.
    #[arg(long, requires = "to")]
    pub no_load: bool,
    /// TLS.
    #[command(flatten)]
    pub tls: TlsOptions,
    /// The name that the destination's certificate must have, if not the address's.
    #[arg(long, value_name = "NAME", requires = "to")]
    pub server_name: Option<String>,
    /// The URI that the destination's certificate must have.
    #[arg(long, value_name = "URI", requires = "to", conflicts_with = "server_name")]
    pub destination_id: Option<String>,
    /// The policy that this host's receiver is to have.
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Memory of a guest that shall come to this host, such as 8G.
    #[arg(long, value_parser = parse_bytes, value_name = "BYTES", conflicts_with = "to")]
    pub memory: Option<u64>,
    /// What to make that guest's memory of: private, memfd, thp or hugetlb.
    #[arg(long, default_value = "private", value_name = "KIND", requires = "memory")]
    pub memory_kind: MemoryKind,
}
