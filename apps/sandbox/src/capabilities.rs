//! Drops the capabilities of this thread and of the threads that it will start.
//!
//! Work that needs a capability (a port below 1024, another user's memory files) is done earlier,
//! or by a process that does not read from the network. The exception is the socket of another
//! user's QEMU, which is connected to when a guest arrives: `CAP_DAC_OVERRIDE` may be kept for it.

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
};

use crate::error::SandboxError;

/// Empties the ambient, effective, permitted and inheritable sets, except for capabilities in
/// `kept` that the process has. Also empties the bounding set if the process may (`CAP_SETPCAP`).
///
/// # Errors
/// The kernel refused.
pub fn drop_all_but(kept: CapabilitySet) -> Result<(), SandboxError> {
    let refused =
        |errno: Errno| SandboxError::Refused { what: "to drop capabilities", source: errno.into() };
    for bit in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        match capability_is_in_bounding_set(one) {
            Ok(false) => continue,
            Ok(true) => {}
            // After the kernel's last capability.
            Err(_) => break,
        }
        match remove_capability_from_bounding_set(one) {
            // Without CAP_SETPCAP the bounding set stays. It only limits what `execve` may grant.
            // That is nothing, because new privileges are off and the filter forbids `execve`.
            Err(Errno::PERM) => break,
            Ok(()) => {}
            Err(errno) => return Err(refused(errno)),
        }
    }
    clear_ambient_capability_set().map_err(refused)?;
    let had = capabilities(None).map_err(refused)?;
    let kept = had.permitted & kept;
    let inheritable = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })
        .map_err(refused)
}
