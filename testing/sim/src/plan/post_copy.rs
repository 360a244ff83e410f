//! Schedules in which the guest is handed over with post-copy.

use vmferry_wire::PROTOCOL_VERSION_MAX;

use super::{Fault, Plan, WriteFault};
use crate::host::Host;

/// Data channels, whether both memories are verified, and the reconnect timeout in seconds.
pub(super) const SHAPES: [(u8, bool, u32); 2] = [(2, false, 0), (1, false, 20)];

/// The destination's journal write that is RUN-INTENT, after OPEN.
const RUN_INTENT: u64 = 1;

/// Whether a random schedule is one with post-copy: a fifth of them are, whatever their faults are.
pub(super) fn is_random(number: u64) -> bool {
    number % 5 == 3
}

impl Plan {
    /// The same schedule with post-copy, without the faults that it can't have.
    #[must_use]
    pub fn with_post_copy(mut self) -> Self {
        self.post_copy = true;
        self.protocol = PROTOCOL_VERSION_MAX;
        self.verify = false;
        self.faults.retain(|fault| !needs_recovery(fault));
        self
    }
}

/// Whether a fault may leave a guest that lacks pages to a process that has to be started again.
/// Such a process can't take up a session with post-copy yet: it would have to learn from the
/// memory, or from the source, which pages are missing.
fn needs_recovery(fault: &Fault) -> bool {
    match *fault {
        Fault::Crash { .. } => true,
        // After a failed write of RUN-INTENT the destination's process ends, and the next one reads
        // the record.
        Fault::Write { host: Host::Destination, number: RUN_INTENT, how, crash } => {
            crash || how == WriteFault::OnDisk
        }
        Fault::Write { crash, .. } => crash,
        _ => false,
    }
}
