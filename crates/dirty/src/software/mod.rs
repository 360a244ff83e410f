//! The VMM's own writes, marked by `vm-memory` at each write through it.
//!
//! KVM logs the guest's writes, but not what a device of the VMM writes through the mapping. A VMM
//! whose memory is `GuestMemoryMmap<DirtyBitmap>` has those writes marked here; only that type
//! parameter has to change.
//!
//! There is one table of slots, and three published ways to read it (PUBLISHED.md, system 1), which
//! [`SoftwareWay`] describes. In all of them writers never wait and never lose a mark. The cost of
//! a harvest differs by orders of magnitude; `vmferry-bench dirty-log` measures it.
//!
//! `unsafe` is confined to `sync`.

mod marks;
mod pair;
mod slot;
mod sync;

use serde::{Deserialize, Serialize};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap};
use vmferry_memory::{PageSet, SlotId};

pub use self::marks::Marks;
pub use self::slot::DirtyBitmap;
use crate::{DirtyLog, DirtyLogError};

const NAME: &str = "software";

/// How a harvest gets the pages that writers have marked.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    strum::Display,
    strum::EnumString,
)]
#[strum(parse_err_ty = String, parse_err_fn = unknown_way)]
pub enum SoftwareWay {
    /// Each harvest allocates and publishes a new bitmap. The old one is copied out when no writer
    /// can hold it any more. This is for comparison: it is the only log that allocates in every
    /// round.
    #[serde(rename = "get.org")]
    #[strum(serialize = "get.org")]
    GetOrg,
    /// Two bitmaps used alternately, copied out; a clean slot returns at once.
    #[serde(rename = "get.opt")]
    #[strum(serialize = "get.opt")]
    GetOpt,
    /// Two bitmaps used alternately, switched and read in place.
    #[default]
    #[serde(rename = "switch")]
    #[strum(serialize = "switch")]
    Switch,
}

impl SoftwareWay {
    /// All ways, in the order of their publication.
    pub const ALL: [Self; 3] = [Self::GetOrg, Self::GetOpt, Self::Switch];
}

fn unknown_way(text: &str) -> String {
    format!("`{text}` is no way to read the software log: choose get.org, get.opt or switch")
}

/// The log over the bitmaps of a VMM's memory.
#[derive(Debug)]
pub struct SoftwareLog {
    slots: Vec<DirtyBitmap>,
    way: SoftwareWay,
}

impl SoftwareLog {
    /// The log of a memory's regions, numbered by ascending address as in
    /// `vmferry_memory::GuestMemory::from_vm_memory`, read by [`SoftwareWay::Switch`].
    #[must_use]
    pub fn new(memory: &GuestMemoryMmap<DirtyBitmap>) -> Self {
        Self::in_way(memory, SoftwareWay::default())
    }

    /// As `new`, read in the given way.
    #[must_use]
    pub fn in_way(memory: &GuestMemoryMmap<DirtyBitmap>, way: SoftwareWay) -> Self {
        let slots = memory.iter().map(|region| region.get_mmap().bitmap().clone()).collect();
        Self { slots, way }
    }
}

impl DirtyLog for SoftwareLog {
    fn name(&self) -> &'static str {
        NAME
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        let started = self.slots.iter().try_for_each(|slot| slot.start(self.way));
        started.inspect_err(|_| self.slots.iter().for_each(DirtyBitmap::stop))
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        for (number, slot) in (0..).zip(&self.slots) {
            let pages = into.bitmap_mut(SlotId(number));
            match self.way {
                SoftwareWay::GetOrg => slot.get_org(pages),
                SoftwareWay::GetOpt => slot.get_opt(pages),
                SoftwareWay::Switch => {
                    if let Some(marks) = slot.switch() {
                        marks.take_into(pages);
                    }
                }
            }
        }
        Ok(())
    }

    fn collect_last(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        for (number, slot) in (0..).zip(&self.slots) {
            slot.get_rest(into.bitmap_mut(SlotId(number)));
        }
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        self.slots.iter().for_each(DirtyBitmap::stop);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress};
    use vmferry_memory::{GuestMemory, MemoryKind, SlotLayout, map_slots};

    use super::*;

    proptest! {
        #[test]
        fn write_marks_every_page_once(
            writes in prop::collection::vec((0_u64..300 * 4096, 1_usize..10_000), 0..20),
            way in prop::sample::select(&SoftwareWay::ALL)
        ) {
            let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 310 }];
            let memory = map_slots::<DirtyBitmap>(&layout, MemoryKind::Private).unwrap();
            let log = SoftwareLog::in_way(&memory, way);
            memory.write_slice(b"before", GuestAddress(0)).unwrap();
            log.start().unwrap();
            let mut expected = PageSet::for_layout(&layout);
            for (at, length) in writes {
                memory.write_slice(&vec![1; length], GuestAddress(at)).unwrap();
                let (first, last) = (at / 4096, (at + length as u64 - 1) / 4096);
                expected.bitmap_mut(SlotId(0)).set_run(first, last - first + 1);
            }
            let mut found = PageSet::for_layout(&layout);
            log.collect(&mut found).unwrap();
            prop_assert_eq!(&found, &expected);
            found.clear_all();
            log.collect(&mut found).unwrap();
            prop_assert!(found.is_empty());
            log.stop().unwrap();
            memory.write_slice(b"after", GuestAddress(0)).unwrap();
            log.collect(&mut found).unwrap();
            prop_assert!(found.is_empty());
        }
    }

    #[test]
    fn slots_are_numbered_as_in_guest_memory() {
        let layout = [
            SlotLayout { slot: SlotId(0), gpa: 0, pages: 4 },
            SlotLayout { slot: SlotId(1), gpa: 1 << 32, pages: 4 },
        ];
        let mapped = map_slots::<DirtyBitmap>(&layout, MemoryKind::Private).unwrap();
        let memory = GuestMemory::from_vm_memory(&mapped).unwrap();
        let log = SoftwareLog::new(&mapped);
        log.start().unwrap();
        mapped.write_obj(1_u8, GuestAddress((1 << 32) + 4096)).unwrap();
        let mut found = PageSet::for_memory(&memory);
        log.collect(&mut found).unwrap();
        assert!(found.bitmap(SlotId(1)).is_set(1));
        assert_eq!(found.count(), 1);
    }
}
