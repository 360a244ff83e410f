//! The software logs, which the writer marks: the three published methods and `vm-memory`'s bitmap.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::bitmap::{AtomicBitmap, Bitmap, NewBitmap};
use vmferry_dirty::{DirtyBitmap, SoftwareWay};
use vmferry_memory::{PAGE_SIZE, PageBitmap};

use super::subject::{Sample, Subject, Unit, traverse};
use crate::bitmap::baseline;
use crate::machine::{cycles, cycles_since};

/// Marks pages as `vm-memory` does after each write.
fn mark(bitmap: &impl Bitmap, pages: impl Iterator<Item = u64>) {
    pages.for_each(|page| bitmap.mark_dirty(page as usize * PAGE_SIZE, 8));
}

/// Marks pages from another thread, so that the marks come from another core's cache, as a vCPU's
/// do.
fn mark_elsewhere(bitmap: &(impl Bitmap + Sync), pages: &[u64]) {
    if pages.is_empty() {
        return;
    }
    std::thread::scope(|scope| {
        scope.spawn(|| mark(bitmap, pages.iter().copied()));
    });
}

/// Marks the first pages repeatedly while `meanwhile` runs.
fn mark_during<R>(bitmap: &(impl Bitmap + Sync), pages: u64, meanwhile: impl FnOnce() -> R) -> R {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                mark(bitmap, 0..pages);
            }
        });
        let result = meanwhile();
        done.store(true, Ordering::Relaxed);
        result
    })
}

/// vmferry's software log with one of its methods.
pub struct SoftwareSubject {
    way: SoftwareWay,
    slots: Vec<(DirtyBitmap, PageBitmap)>,
    units: Vec<Unit>,
}

impl SoftwareSubject {
    pub fn new(way: SoftwareWay, slots: &[u64]) -> Self {
        let of = |bytes: &u64| {
            let pages = PageBitmap::new(bytes / PAGE_SIZE as u64);
            (DirtyBitmap::with_len(*bytes as usize), pages)
        };
        Self { way, slots: slots.iter().map(of).collect(), units: Unit::of_slots(slots) }
    }

    /// One subject per method.
    pub fn all(slots: &[u64]) -> Vec<Box<dyn Subject>> {
        SoftwareWay::ALL.map(|way| Box::new(Self::new(way, slots)) as Box<dyn Subject>).into()
    }
}

impl Subject for SoftwareSubject {
    fn name(&self) -> &'static str {
        match self.way {
            SoftwareWay::GetOrg => "get.org",
            SoftwareWay::GetOpt => "get.opt",
            SoftwareWay::Switch => "switch",
        }
    }

    fn units(&self) -> &[Unit] {
        &self.units
    }

    fn start(&mut self) -> anyhow::Result<()> {
        Ok(self.slots.iter().try_for_each(|(bitmap, _)| bitmap.start(self.way))?)
    }

    fn write(&mut self, slot: usize, pages: &[u64]) -> anyhow::Result<()> {
        mark_elsewhere(&self.slots[slot].0, pages);
        Ok(())
    }

    fn write_during(
        &mut self,
        slot: usize,
        pages: u64,
        meanwhile: &mut dyn FnMut(&mut dyn Subject) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let bitmap = self.slots[slot].0.clone();
        mark_during(&bitmap, pages, || meanwhile(self))
    }

    fn harvest(&mut self, unit: usize) -> anyhow::Result<Sample> {
        let (bitmap, pages) = &mut self.slots[unit];
        let mut sample = Sample::default();
        let begun = cycles();
        match self.way {
            SoftwareWay::GetOrg => bitmap.get_org(pages),
            SoftwareWay::GetOpt => bitmap.get_opt(pages),
            SoftwareWay::Switch => {
                let marks = bitmap.switch();
                sample.call = cycles_since(begun);
                // The call copies nothing, so fetching its result is part of the traversal.
                let begun = cycles();
                if let Some(marks) = marks {
                    marks.take_into(pages);
                }
                sample.traverse = cycles_since(begun);
            }
        }
        if self.way != SoftwareWay::Switch {
            sample.call = cycles_since(begun);
        }
        let (found, took) = traverse(pages);
        pages.clear_all();
        Ok(Sample { pages: found, traverse: sample.traverse + took, ..sample })
    }

    fn stop(&mut self) -> anyhow::Result<()> {
        self.slots.iter().for_each(|(bitmap, _)| bitmap.stop());
        Ok(())
    }
}

/// `vm-memory`'s bitmap, harvested by `get_and_reset` and traversed by word.
pub struct AtomicSubject {
    slots: Vec<Arc<AtomicBitmap>>,
    units: Vec<Unit>,
}

impl AtomicSubject {
    pub fn new(slots: &[u64]) -> Self {
        let page = NonZeroUsize::new(PAGE_SIZE).unwrap_or(NonZeroUsize::MIN);
        let of = |bytes: &u64| Arc::new(AtomicBitmap::new(*bytes as usize, page));
        Self { slots: slots.iter().map(of).collect(), units: Unit::of_slots(slots) }
    }
}

impl Subject for AtomicSubject {
    fn name(&self) -> &'static str {
        "AtomicBitmap"
    }

    fn units(&self) -> &[Unit] {
        &self.units
    }

    fn start(&mut self) -> anyhow::Result<()> {
        self.slots.iter().for_each(|bitmap| bitmap.reset());
        Ok(())
    }

    fn write(&mut self, slot: usize, pages: &[u64]) -> anyhow::Result<()> {
        mark_elsewhere(&*self.slots[slot], pages);
        Ok(())
    }

    fn write_during(
        &mut self,
        slot: usize,
        pages: u64,
        meanwhile: &mut dyn FnMut(&mut dyn Subject) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let bitmap = Arc::clone(&self.slots[slot]);
        mark_during(&*bitmap, pages, || meanwhile(self))
    }

    fn harvest(&mut self, unit: usize) -> anyhow::Result<Sample> {
        let begun = cycles();
        let words = self.slots[unit].get_and_reset();
        let call = cycles_since(begun);
        let called = cycles();
        let mut pages = 0;
        baseline::by_word(&words, |page| pages += black_box((page, 1)).1);
        let traverse = cycles_since(called);
        Ok(Sample { call, traverse, pages, ..Sample::default() })
    }

    fn stop(&mut self) -> anyhow::Result<()> {
        Ok(())
    }
}
