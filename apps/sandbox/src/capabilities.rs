//! Dropping capabilities, of this thread and those that it will start.
//!
//! What needs one (a port below 1024, another user's memory files) is done before, or by a process that reads nothing
//! from the network. But for the sockets of another user's QEMU, which is connected to when a guest comes: for those
//! `CAP_DAC_OVERRIDE` may be kept.

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
};

use crate::error::SandboxError;

/// Empties the ambient, effective, permitted and inheritable sets, but for one that is to be kept and is there; and the
/// bounding one, of a process that may (`CAP_SETPCAP`).
///
/// # Errors
/// If the kernel refuses.
pub fn drop_all_but(kept: CapabilitySet) -> Result<(), SandboxError> {
    let refused =
        |errno: Errno| SandboxError::Refused { what: "to drop capabilities", source: errno.into() };
    for bit in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        match capability_is_in_bounding_set(one) {
            Ok(false) => continue,
            Ok(true) => {}
            // Beyond the kernel's last capability.
            Err(_) => break,
        }
        match remove_capability_from_bounding_set(one) {
            // A user without CAP_SETPCAP keeps the bounding set, which is a bound of what `execve` may give. Without
            // new privileges, and by the filter, it gives nothing.
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
