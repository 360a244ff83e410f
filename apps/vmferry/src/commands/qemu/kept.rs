//! Reports memory files of the source whose pages could not be freed.

use serde_json::json;
use vmferry_qemu::Release;

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
