//! What is said of a source's memory that could not be given back.

use serde_json::json;
use vmferry_qemu::Release;

use crate::output::Output;

/// Says which memory files of the source's keep their pages.
pub(super) fn tell_kept(release: &Release, output: &Output) {
    for kept in &release.kept {
        let (path, why) = (&kept.path, &kept.why);
        output.event(&json!({ "event": "memory-kept", "path": path, "reason": why }), || {
            format!("{path} keeps the pages of the guest that has left: {why}")
        });
    }
}
