//! What vmferry asks any QEMU that has a guest: its identity, and whether it can be migrated.

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use serde_json::json;
use vmferry_wire::GuestIdentity;

use crate::carried;
use crate::error::QemuError;
use crate::qmp::{Qmp, QmpError, Version};

/// How long QEMU may take to cancel its own migration.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);

/// How long QEMU may take to obey a `migrate-continue`.
const FOLLOW_TIMEOUT: Duration = Duration::from_secs(2);

/// From this version on, QEMU's own migration tells emulated vCPUs which pages of their first
/// memory block are clean again.
const SEES_THE_FIRST_BLOCK: Version = Version { major: 9, minor: 0, micro: 0 };

/// Bytes that one word of QEMU's dirty log covers.
const WHOLE_WORD: u64 = 64 * 4096;

/// The guest's name and UUID, as they were given to QEMU.
pub fn identity(qmp: &mut Qmp) -> Result<GuestIdentity, QemuError> {
    let name = qmp.execute("query-name", json!({}))?;
    let uuid = qmp.execute("query-uuid", json!({}))?;
    let uuid = uuid["UUID"].as_str().and_then(|text| text.parse().ok()).unwrap_or_default();
    // A guest without a name must not be mistaken for another one.
    let unnamed = || stand_in(qmp);
    Ok(GuestIdentity { uuid, name: name["name"].as_str().map_or_else(unnamed, str::to_owned) })
}

/// The name for a guest without one: from QEMU's PID, or if the process is not visible, from its
/// socket.
fn stand_in(qmp: &Qmp) -> String {
    let socket = || std::fs::metadata(qmp.path()).map_or(0, |about| about.ino());
    qmp.pid().map_or_else(|| format!("qemu-at-{}", socket()), |pid| format!("qemu-{pid}"))
}

/// Checks what QEMU itself reports against a migration.
pub fn must_be_migratable(qmp: &mut Qmp) -> Result<(), QemuError> {
    qmp.take_custody()?;
    let migration = qmp.execute("query-migrate", json!({}))?;
    if let Some(reasons) = migration["blocked-reasons"].as_array()
        && !reasons.is_empty()
    {
        let reasons: Vec<&str> = reasons.iter().filter_map(serde_json::Value::as_str).collect();
        return Err(QemuError::Unsupported(reasons.join("; ")));
    }
    if migration["status"].as_str().is_some_and(is_under_way) {
        return Err(QemuError::State {
            found: "migrating".into(),
            wanted: "left alone: another migration of it goes on",
        });
    }
    Ok(())
}

/// Whether QEMU loses some of its guest's writes while it migrates the guest, so often that the
/// guest must not run meanwhile. With KVM the kernel keeps the dirty log, and none is lost.
///
/// A vCPU that QEMU emulates (TCG) notes a page as dirty when it first writes the page, and then
/// writes it without looking, until QEMU tells it that the page is clean again.
///
/// - QEMU before 9.0 does not tell it when it syncs the dirty log by words, which it does for
///   blocks of a multiple of 64 pages: later writes are not sent. Since 9.0 it does, but with
///   block-relative addresses where global ones are expected, so that only the first block is
///   right. Seen with 7.2, and with 10.0 and two blocks.
/// - Any other block is synced page by page. A vCPU sets a page's bit, and then remembers that the
///   page is dirty. If the migration clears the bit and tells the vCPU between these two, the vCPU
///   forgets that it was told. Seen with 10.0, also with one thread for all vCPUs: in 7 of 200
///   migrations whose threads had to share a CPU a page was lost (`plain_moves` of the QEMU lab).
///
/// The second case can happen with words too. But then the vCPU must be interrupted between the
/// two, and until the whole block is synced. It was not seen in 180 such migrations.
///
/// Sources: QEMU `include/exec/ram_addr.h`, `cpu_physical_memory_sync_dirty_bitmap`, and what it
/// passes to `cpu_physical_memory_dirty_bits_cleared`; the commit "physmem: Fix migration dirty
/// bitmap coherency with TCG memory access" of 2024; `accel/tcg/cputlb.c`, `notdirty_write`.
pub fn loses_writes(qmp: &mut Qmp) -> Result<bool, QmpError> {
    if qmp.execute("query-kvm", json!({}))?["enabled"] == true {
        return Ok(false);
    }
    let backends = qmp.execute("query-memdev", json!({}))?;
    let sizes: Vec<u64> = backends
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|backend| backend["size"].as_u64())
        .collect();
    // QEMU does not report which of several backends is the first.
    let is_synced_right = matches!(sizes[..], [alone] if alone.is_multiple_of(WHOLE_WORD));
    Ok(qmp.version() < SEES_THE_FIRST_BLOCK || !is_synced_right)
}

/// Ends QEMU's own migration, if one is under way. The reader of its streams must read on, or be
/// gone: QEMU waits for its writers, and may answer no client while they wait.
///
/// A migration that was `told_to_finish` ends by itself, and so does any that is sending the last
/// pages. It is never cancelled then: QEMU 7.2 would let the guest write to disks that it has given
/// up, and abort. A post-copy whose streams have ended is completed, as if it had succeeded.
pub fn end_migration(qmp: &mut Qmp, told_to_finish: bool) -> Result<(), QemuError> {
    let begun = Instant::now();
    let mut asked = false;
    loop {
        let migration = qmp.execute("query-migrate", json!({}))?;
        let status = migration["status"].as_str().unwrap_or("none");
        if !is_under_way(status) {
            return Ok(());
        }
        if status == "postcopy-paused" && begun.elapsed() < CANCEL_TIMEOUT {
            carried::complete_paused(qmp)?;
            continue;
        }
        let ends_by_itself = match status {
            "device" | "cancelling" => true,
            // The latter for a moment, until QEMU has noticed that its streams have ended.
            status if status.starts_with("postcopy-") => true,
            // If QEMU does not obey at once, the command was lost.
            "pre-switchover" => told_to_finish && begun.elapsed() < FOLLOW_TIMEOUT,
            _ => false,
        };
        if !ends_by_itself && !std::mem::replace(&mut asked, true) {
            qmp.execute("migrate_cancel", json!({}))?;
        } else if begun.elapsed() >= CANCEL_TIMEOUT {
            return Err(qmp.timed_out("cancel its migration", CANCEL_TIMEOUT).into());
        }
        qmp.look_for("cancel its migration", "MIGRATION")?;
    }
}

/// Whether a status of `query-migrate` means that QEMU migrates.
fn is_under_way(status: &str) -> bool {
    matches!(
        status,
        "setup" | "active" | "device" | "pre-switchover" | "cancelling" | "wait-unplug"
    ) || status.starts_with("postcopy-")
}
