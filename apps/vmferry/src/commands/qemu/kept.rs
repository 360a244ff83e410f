//! Reports what is left of a guest at its source: memory files whose pages could not be freed,
//! and a QEMU that could not be quit.

use serde_json::json;
use vmferry::MigrateError;
use vmferry_qemu::{QemuError, Release};

use crate::output::Output;

/// Reports the memory files of the source that keep their pages.
pub(super) fn report_kept(release: &Release, output: &Output) {
    for kept in &release.kept {
        let (path, why) = (&kept.path, &kept.why);
        output.event(&json!({ "event": "memory-kept", "path": path, "reason": why }), || {
            format!("{path} keeps the pages of the guest that has moved: {why}")
        });
    }
}

/// Reports that the QEMU of a guest that has moved could not be quit.
pub(super) fn report_not_ended(error: &QemuError, output: &Output) {
    let reason = vmferry::chain(error);
    output.event(&json!({ "event": "not-ended", "reason": reason }), || {
        format!("the source's QEMU could not be quit; do not resume its guest: {reason}")
    });
}

/// Whether the source's QEMU has ended, and the guest's memory with it.
pub(super) fn has_ended(lost: &MigrateError) -> bool {
    matches!(lost, MigrateError::PagesLost { .. })
}
