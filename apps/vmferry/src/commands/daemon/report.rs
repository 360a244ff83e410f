//! What the daemon reports about this host to hosts that may send guests here.

use std::time::Duration;

use vmferry::probe::{HostFacts, LibvirtFacts};
use vmferry_proxy::HostReport;

use crate::commands::doctor::this_host;
use crate::commands::libvirt::{Releases, Virsh};

/// How long libvirt may take: less than the host that asks waits.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reports the host with its libvirt.
#[derive(Debug)]
pub struct DaemonHost {
    virsh: Virsh,
    /// What does not change.
    host: HostFacts,
}

impl DaemonHost {
    /// This host with the libvirt at a connection URI.
    pub fn new(libvirt: &str) -> Self {
        Self { virsh: Virsh::new(libvirt).with_patience(PATIENCE), host: this_host() }
    }
}

impl HostReport for DaemonHost {
    fn facts(&self) -> HostFacts {
        let libvirt = match Releases::ask(&self.virsh) {
            Ok(Releases { libvirt, qemu }) => {
                LibvirtFacts { libvirt, qemu, ..LibvirtFacts::default() }
            }
            Err(error) => {
                let problem = Some(vmferry::chain(&error));
                LibvirtFacts { problem, ..LibvirtFacts::default() }
            }
        };
        HostFacts { libvirt: Some(libvirt), ..self.host.clone() }
    }
}
