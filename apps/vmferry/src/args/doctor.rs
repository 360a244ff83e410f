//! The options of `vmferry doctor`.

use std::path::PathBuf;

use clap::Args;
use vmferry_memory::MemoryKind;

use super::TlsOptions;
use super::units::parse_bytes;

/// `vmferry doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
No guest is moved or paused. With --qemu, vmferry attaches to QEMU for a moment, as a migration does
at its start, and detaches again. With --to, it loads the link for two seconds, through the
`vmferry receive` that waits for or hosts a guest there, or with --libvirt through `vmferry daemon`.
With --qemu and --to, it compares both QEMUs as a migration does before it sends anything.

Exit status: 0 without warnings, 17 with a warning, 18 with an error, which prevents a migration.

Examples:
  vmferry doctor
  vmferry doctor --to host-b:7001 --tls /etc/vmferry/tls
  vmferry doctor web --to host-b:7001 --tls /etc/vmferry/tls
  vmferry doctor --qemu /run/qemu/web.qmp --to host-b:7001 --tls /etc/vmferry/tls
  vmferry doctor --libvirt web                           # its libvirt, its devices, the daemon
  vmferry doctor --libvirt web --to host-b
  vmferry doctor --memory 8G --memory-kind hugetlb       # does this host have room for it?
  vmferry doctor --tls /etc/vmferry/tls --policy /etc/vmferry/policy.toml --json")]
pub struct DoctorOptions {
    /// The guest to move: its name, or the path of its control socket.
    #[arg(conflicts_with_all = ["qemu", "libvirt"])]
    pub guest: Option<String>,
    /// The QMP socket of the QEMU whose guest you want to move.
    #[arg(long, value_name = "QMP_SOCKET", conflicts_with = "libvirt")]
    pub qemu: Option<PathBuf>,
    /// The guest that libvirt manages under this name, UUID or ID.
    #[arg(long, value_name = "GUEST",
          conflicts_with_all = ["tls", "ca", "cert", "key", "crl", "plain", "policy", "memory"])]
    pub libvirt: Option<String>,
    /// Check the other host too, through its `vmferry receive` at this address. With --libvirt:
    /// through its `vmferry daemon`, by the name of the peer in the configuration of this host's.
    #[arg(long, value_name = "ADDRESS")]
    pub to: Option<String>,
    /// Skip the two seconds of load on the link.
    #[arg(long, requires = "to")]
    pub no_load: bool,
    /// TLS.
    #[command(flatten)]
    pub tls: TlsOptions,
    /// The name that the destination's certificate must have, if it is not the address.
    #[arg(long, value_name = "NAME", requires = "to", conflicts_with = "libvirt")]
    pub server_name: Option<String>,
    /// The URI that the destination's certificate must have.
    #[arg(long, value_name = "URI", requires = "to",
          conflicts_with_all = ["server_name", "libvirt"])]
    pub destination_id: Option<String>,
    /// The policy file of this host's receiver.
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Memory of a guest that this host is to receive, such as 8G.
    #[arg(long, value_parser = parse_bytes, value_name = "BYTES", conflicts_with = "to")]
    pub memory: Option<u64>,
    /// Kind of that guest's memory: private, memfd, thp or hugetlb.
    #[arg(long, default_value = "private", value_name = "KIND", requires = "memory")]
    pub memory_kind: MemoryKind,
    /// This host's libvirt, as for `virsh`.
    #[arg(long, value_name = "URI", default_value = "qemu:///system", requires = "libvirt")]
    pub connect: String,
    /// The configuration of this host's `vmferry daemon`.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/vmferry/daemon.toml",
        requires = "libvirt"
    )]
    pub daemon_config: PathBuf,
}
