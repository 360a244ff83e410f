//! Checks for a guest that libvirt manages: its libvirt and its definition, `vmferry daemon` of
//! this host, and the peer's daemon with its libvirt.

mod daemon;
mod definition;
mod disks;
mod here;
mod peer;

use serde_json::Value;
use vmferry::probe::HostFacts;

use super::{Findings, certificates, host};
use crate::args::DoctorOptions;
use crate::commands::libvirt::Virsh;
use crate::exit::Failure;
use crate::output::Output;

/// Checks this host for the guest, and with `--to` the peer. Returns the peer's facts.
pub fn look(
    guest: &str,
    options: &DoctorOptions,
    ours: &HostFacts,
    output: &Output,
    findings: &mut Findings,
) -> Result<Value, Failure> {
    host::look_for_libvirt(ours, findings);
    let virsh = Virsh::new(&options.connect);
    let libvirt = here::look(&virsh, guest, findings)?;
    let Some(daemon) = daemon::look(&options.daemon_config, output, findings) else {
        return Ok(Value::Null);
    };
    if let Some(tls) = daemon.configuration.tls() {
        certificates::look_at(&tls, options.tls.clock_skew, findings);
    }
    if let Some(libvirt) = &libvirt {
        daemon.look_at_user(libvirt.qemu_user, findings);
    }
    let Some(to) = &options.to else {
        daemon.look_at_peers(findings);
        return Ok(Value::Null);
    };
    let hosts = peer::Hosts { ours, libvirt: libvirt.as_ref(), daemon: &daemon };
    peer::look(to, options, &hosts, output, findings)
}
