//! The options of `vmferry send`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{HookOptions, MigrationOptions, RecordOptions, TlsOptions, WitnessOptions};

/// `vmferry send`.
// Options of one kind of guest require a group: clap does not miss a required option that conflicts
// with a given one.
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
  vmferry send --qemu /run/qemu/web.qmp --mode carried --to host-b:7001 --tls /etc/vmferry/tls
  vmferry send --qemu /run/qemu/web.qmp --to host-b:7002 --template web-class --tls /etc/vmferry/tls

A guest that libvirt manages. `vmferry daemon` runs on both hosts; --to names a peer in its
configuration:
  vmferry send --libvirt web --to host-b
  vmferry send --libvirt web --to host-b --persistent --undefine-source --downtime-limit 100ms
  vmferry send --libvirt web --to host-b --copy-storage-all --migrate-disks vda,vdb
  vmferry send --libvirt web --to host-b --postcopy --max-bandwidth 1Gbit/s
  vmferry send --libvirt web --to host-b --timeout 60s --when-stuck switch-over --json")]
pub struct SendOptions {
    /// Name of the guest, or path of its control socket.
    #[arg(required_unless_present_any = ["qemu", "libvirt"],
          conflicts_with_all = ["qemu", "libvirt"])]
    pub guest: Option<String>,
    /// Send the guest of the QEMU with this QMP socket.
    #[arg(long, value_name = "QMP_SOCKET", groups = ["process", "qmp"])]
    pub qemu: Option<PathBuf>,
    /// Send the guest that libvirt manages under this name, UUID or ID. libvirt moves it, and
    /// `vmferry daemon` carries its connections (docs/libvirt.md).
    #[arg(long, value_name = "GUEST", groups = ["process", "managed"])]
    pub libvirt: Option<String>,
    /// How to move a QEMU guest: attached (vmferry reads its memory itself), carried (QEMU's own
    /// migration goes over vmferry's channels), or auto (attached if possible).
    #[arg(long, value_enum, default_value_t = QemuMode::Auto, requires = "qmp")]
    pub mode: QemuMode,
    /// For a carried guest or one of libvirt, let QEMU spread memory over this many further streams
    /// (its `multifd`), with a data channel each; by default it has one stream.
    #[arg(long, value_name = "STREAMS", requires = "process",
          value_parser = clap::value_parser!(u8).range(1..=15))]
    pub multifd: Option<u8>,
    /// Have the destination's `vmferry daemon` receive the guest by this template, a `[[receive]]`
    /// of its configuration. --to is then the address of the daemon.
    #[arg(long, value_name = "NAME", requires = "qmp")]
    pub template: Option<String>,
    /// Keep the source's QEMU, stopped, and the pages of its memory files. By default QEMU is quit
    /// and the pages are freed.
    #[arg(long, requires = "qmp")]
    pub keep_source: bool,
    /// The disks at the destination may be other images than the source's, with the same sizes and
    /// formats: copies that you have made. By default the guest is refused if they are known to
    /// differ.
    #[arg(long, requires = "qmp")]
    pub disks_differ: bool,
    /// The destination: HOST:PORT (TLS), grpc:HOST:PORT or grpc-ack:HOST:PORT (gRPC over TLS,
    /// streamed or acknowledged), unix:PATH, fd:N,N… (connected sockets), or with --plain
    /// tcp:HOST:PORT. With --libvirt: the name of a peer in the daemon's configuration.
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
    /// The witness.
    #[command(flatten)]
    pub witness: WitnessOptions,
    /// Recording.
    #[command(flatten)]
    pub record: RecordOptions,
    /// A libvirt guest. These options have a heading, so they are the last ones.
    #[command(flatten)]
    pub domain: LibvirtOptions,
}

/// The options of a guest that libvirt manages. Most have the names and meanings of `virsh
/// migrate`.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Options with --libvirt")]
pub struct LibvirtOptions {
    /// This host's libvirt, as for `virsh`.
    #[arg(long, value_name = "URI", default_value = "qemu:///system", requires = "managed")]
    pub connect: String,
    /// The configuration of this host's `vmferry daemon`, which names the directory of its sockets.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/vmferry/daemon.toml",
        requires = "managed"
    )]
    pub daemon_config: PathBuf,
    /// Copy all disks that the hosts do not share. The destination needs an image of the same size
    /// at the same path.
    #[arg(long, requires = "managed", conflicts_with = "copy_storage_inc")]
    pub copy_storage_all: bool,
    /// Copy only what the disks have above a backing image that both hosts have.
    #[arg(long, requires = "managed")]
    pub copy_storage_inc: bool,
    /// Copy only these disks, such as vda,vdb.
    #[arg(long, value_name = "LIST", requires = "managed")]
    pub migrate_disks: Option<String>,
    /// Define the guest at the destination, so that it can be started there again.
    #[arg(long, requires = "managed")]
    pub persistent: bool,
    /// Remove the guest's definition from this host when it has moved.
    #[arg(long, requires = "managed")]
    pub undefine_source: bool,
    /// Let QEMU throttle the vCPUs of a guest that writes faster than the link carries. --throttle
    /// sets it, too; QEMU chooses the percentage.
    #[arg(long, requires = "managed")]
    pub auto_converge: bool,
    /// Run the guest at the destination after the first round, and fetch the rest of its memory
    /// from there (post-copy). From then on the migration can't be cancelled.
    #[arg(long, requires = "managed")]
    pub postcopy: bool,
    /// Several streams of memory, by default two; --multifd sets their number.
    #[arg(long, requires = "managed")]
    pub parallel: bool,
    /// The guest's name at the destination.
    #[arg(long, value_name = "NAME", requires = "managed")]
    pub dname: Option<String>,
    /// The guest's definition at the destination, changed where hosts may differ.
    #[arg(long, value_name = "FILE", requires = "managed")]
    pub xml: Option<PathBuf>,
    /// The definition for later starts at the destination.
    #[arg(long, value_name = "FILE", requires_all = ["managed", "persistent"])]
    pub persistent_xml: Option<PathBuf>,
    /// Move the guest although libvirt considers it unsafe, for example because of the cache mode
    /// of a disk.
    #[arg(long = "unsafe", requires = "managed")]
    pub unsafe_: bool,
    /// Cancel the migration when a disk reports an error.
    #[arg(long, requires = "managed")]
    pub abort_on_error: bool,
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::args::Arguments;

    fn is_accepted(arguments: &[&str]) -> bool {
        let usual = ["vmferry", "send", "--to", "b"];
        Arguments::try_parse_from([&usual[..], arguments].concat()).is_ok()
    }

    #[test]
    fn options_of_one_kind_of_guest_are_refused_for_others() {
        for arguments in [
            &["web"][..],
            &["--qemu", "q", "--mode", "carried", "--multifd", "2", "--keep-source"],
            &["--qemu", "q", "--disks-differ"],
            &["--libvirt", "web", "--connect", "qemu:///session", "--multifd", "2"],
            &["--libvirt", "web", "--persistent", "--persistent-xml", "f", "--unsafe"],
        ] {
            assert!(is_accepted(arguments), "{arguments:?}");
        }
        for arguments in [
            &["web", "--keep-source"][..],
            &["web", "--multifd", "2"],
            &["web", "--connect", "qemu:///session"],
            &["web", "--libvirt", "web"],
            &["--qemu", "q", "--libvirt", "web"],
            &["--qemu", "q", "--copy-storage-all"],
            &["web", "--disks-differ"],
            &["--libvirt", "web", "--disks-differ"],
            &["--libvirt", "web", "--mode", "carried"],
            &["--libvirt", "web", "--keep-source"],
            &["--libvirt", "web", "--persistent-xml", "f"],
            &["--libvirt", "web", "--copy-storage-all", "--copy-storage-inc"],
        ] {
            assert!(!is_accepted(arguments), "{arguments:?}");
        }
    }
}
