//! The memory of a QEMU that waits for a guest: whether it may be emptied and filled.

use vmferry::PrepareError;
use vmferry_memory::Backing;

use crate::error::QemuError;
use crate::located::Located;
use crate::memory_file::{self, MemoryFiles};
use crate::qmp::Qmp;
use crate::ram::{Block, Carrier, Ram};
use crate::view::View;

/// The memory of a QEMU that waits, and the files of that memory.
///
/// # Errors
/// If another process has one of the files mapped: no guest may be received then, attached or
/// carried.
pub(super) fn find_memory(
    qmp: &mut Qmp,
    view: &mut dyn View,
) -> Result<(Result<Ram, QemuError>, Option<MemoryFiles>), QemuError> {
    let located = match Located::find(qmp, view) {
        Ok(located) => located,
        Err(error) => return Ok((Err(error), None)),
    };
    let files = MemoryFiles::of(&located, view.examiner());
    files.nobody_else_is_seen()?;
    let ram = Ram::of(&located, qmp, view).and_then(|ram| {
        may_be_emptied(&located, &ram)?;
        files.are_ours_alone()?;
        Ok(ram)
    });
    Ok((ram, Some(files)))
}

/// Checks that the nature of the blocks that guests are put into allows emptying them.
fn may_be_emptied(located: &Located, ram: &Ram) -> Result<(), QemuError> {
    for (block, slot) in ram.carried().zip(ram.memory.slots()) {
        let found = located.blocks.iter().find(|(listed, _)| listed.name == block.name);
        let (Some((_, Some(mapping))), Backing::File { file, .. }) = (found, slot.backing()) else {
            continue;
        };
        let used = located.backends.use_of(&block.name);
        memory_file::may_be_emptied(&block.name, &used, mapping, file)?;
    }
    Ok(())
}

/// Empties the memory, so that no content of an earlier guest or of the firmware is left.
pub(super) fn empty(ram: &Ram, files: Option<&MemoryFiles>) -> Result<(), QemuError> {
    match files {
        Some(files) => files.empty(&ram.memory),
        None => Ok(()),
    }
}

/// The reason why a memory file is left alone, for the source.
pub(super) fn not_ours(error: QemuError) -> PrepareError {
    match error {
        QemuError::FileInUse { .. } | QemuError::Unproved { .. } => {
            PrepareError::InUse(vmferry::chain(&error))
        }
        other => PrepareError::Vm(other.into()),
    }
}

/// Checks that both QEMUs have the same blocks, carried by the same side.
pub(super) fn compare(theirs: &[Block], ours: &[Block]) -> Result<(), PrepareError> {
    let words = |blocks: &[Block]| {
        let all: Vec<String> = blocks
            .iter()
            .filter(|block| block.carrier == Carrier::Vmferry)
            .map(|block| format!("{} of {} MiB", block.name, block.bytes >> 20))
            .collect();
        all.join(", ")
    };
    let carried = |blocks: &[Block]| -> Vec<(String, u64)> {
        let ours = blocks.iter().filter(|block| block.carrier == Carrier::Vmferry);
        ours.map(|block| (block.name.clone(), block.bytes)).collect()
    };
    if carried(theirs) == carried(ours) {
        return Ok(());
    }
    Err(PrepareError::Layout { expected: words(ours), offered: words(theirs) })
}
