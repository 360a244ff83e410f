//! What this host's libvirt says about a domain.

use std::process::Command;

use vmferry_handover::{DomainSeen, GuestIdentity};
use vmferry_proxy::Domains;

/// Asks through `virsh`.
#[derive(Debug)]
pub struct LibvirtDomains;

/// How long virsh may take.
const TIMEOUT_S: &str = "20";

impl Domains for LibvirtDomains {
    fn look(&self, guest: &GuestIdentity) -> DomainSeen {
        let mut virsh = Command::new("timeout");
        virsh.args([TIMEOUT_S, "virsh", "--connect", "qemu:///system", "domstate", "--reason"]);
        let output = virsh.arg(guest.uuid.to_string()).env("LC_ALL", "C").output();
        let Ok(output) = output else { return DomainSeen::NoAnswer };
        let said = String::from_utf8_lossy(&output.stdout);
        let problem = String::from_utf8_lossy(&output.stderr);
        match output.status.success() {
            true => seen(&said),
            false if problem.contains("failed to get domain") => DomainSeen::Gone,
            false => DomainSeen::NoAnswer,
        }
    }
}

/// The meaning of a state and its reason, as `virsh domstate --reason` prints them.
fn seen(said: &str) -> DomainSeen {
    let (state, reason) = said.trim().split_once(" (").unwrap_or((said.trim(), ""));
    let reason = reason.trim_end_matches(')');
    match (state, reason) {
        ("running" | "idle" | "in shutdown" | "crashed" | "pmsuspended", _) => DomainSeen::Runs,
        ("paused", "I/O error" | "ioerror" | "watchdog" | "crashed" | "shutting down") => {
            DomainSeen::Runs
        }
        ("paused" | "no state", _) => DomainSeen::Waits,
        ("shut off", _) => DomainSeen::Gone,
        _ => DomainSeen::NoAnswer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_tell_whether_the_finish_has_succeeded() {
        for (said, expected) in [
            ("running (migrated)\n\n", DomainSeen::Runs),
            ("running (unpaused)", DomainSeen::Runs),
            ("paused (migrating)", DomainSeen::Waits),
            ("paused (I/O error)", DomainSeen::Runs),
            ("paused (user)", DomainSeen::Waits),
            ("shut off (destroyed)", DomainSeen::Gone),
            ("", DomainSeen::NoAnswer),
        ] {
            assert_eq!(seen(said), expected, "{said}");
        }
    }
}
