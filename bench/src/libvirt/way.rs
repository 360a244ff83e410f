//! The ways to migrate a guest between the hosts.

use std::path::Path;

use super::lab::{FORWARDED, Host, PEERS};

/// Who carries the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// QEMU's plain TCP.
    Plain,
    /// QEMU's own TLS.
    Tls,
    /// `socat`: a Unix socket, plain TCP and a Unix socket, as `ssh -L` does.
    Socat,
    /// `vmferry daemon` with TLS.
    Vmferry,
}

impl Way {
    /// In the order of a pass.
    pub const ALL: [Self; 4] = [Self::Plain, Self::Tls, Self::Socat, Self::Vmferry];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "libvirt",
            Self::Tls => "libvirt --tls",
            Self::Socat => "libvirt, socat",
            Self::Vmferry => "vmferry, TLS",
        }
    }

    /// The arguments of `virsh` that migrate a guest. Without a forwarder, libvirt's own connection
    /// is a Unix socket, and does not use the cable.
    pub fn arguments(self, guest: &str, to: &Host, disk: bool) -> Vec<String> {
        let (name, address) = (to.libvirt.name(), to.address);
        let socket = |path: &Path| format!("qemu+unix:///system?socket={}", path.display());
        let (uri, memory, disks) = match self {
            Self::Plain | Self::Tls => (to.libvirt.uri(), format!("tcp://{address}"), None),
            Self::Socat => {
                let directory = Path::new(FORWARDED).join(name);
                let memory = format!("unix://{}", directory.join("memory").display());
                (socket(&directory.join("libvirt")), memory, None)
            }
            Self::Vmferry => {
                let directory = Path::new(PEERS).join(name);
                let unix =
                    |end| format!("unix://{}", directory.join(format!("{guest}.{end}")).display());
                (socket(&directory.join("libvirt")), unix("mig"), Some(unix("nbd")))
            }
        };
        let fixed = ["migrate", "--live", "--p2p", "--domain", guest, "--desturi", &uri];
        let mut arguments: Vec<String> = fixed.map(str::to_owned).into();
        arguments.extend(["--migrateuri".to_owned(), memory]);
        if self == Self::Tls {
            arguments.push("--tls".to_owned());
        }
        if disk {
            arguments.push("--copy-storage-all".to_owned());
            arguments.extend(disks.into_iter().flat_map(|uri| ["--disks-uri".to_owned(), uri]));
        }
        arguments
    }
}
