//! Checks of slot layouts before they are mapped.

use crate::error::MemoryError;
use crate::units::{PAGE_SIZE, SlotLayout};

/// Checks that slots are numbered from 0, cover ascending, disjoint guest-physical ranges, and have
/// at least one page each.
pub(crate) fn check(layout: &[SlotLayout]) -> Result<(), MemoryError> {
    let bad = |text: String| Err(MemoryError::Layout(text));
    if layout.is_empty() {
        return bad("no slots".into());
    }
    let mut free_from = 0_u64;
    for (index, slot) in layout.iter().enumerate() {
        let name = slot.slot;
        if usize::from(name.0) != index {
            return bad(format!("{name} is in the place of slot {index}"));
        }
        let end = slot
            .pages
            .checked_mul(PAGE_SIZE as u64)
            .and_then(|bytes| bytes.checked_add(slot.gpa))
            .filter(|end| isize::try_from(*end).is_ok());
        let Some(end) = end else {
            return bad(format!("{name} reaches beyond the address space"));
        };
        if slot.pages == 0 {
            return bad(format!("{name} is empty"));
        }
        if slot.gpa % PAGE_SIZE as u64 != 0 {
            return bad(format!("{name} begins at {:#x}, not at a page", slot.gpa));
        }
        if slot.gpa < free_from {
            return bad(format!("{name} overlaps or precedes the slot before it"));
        }
        free_from = end;
    }
    Ok(())
}
