//! The interface between the benchmark and each log.

use std::hint::black_box;

use vmferry_memory::PageBitmap;

use crate::machine::{cycles, cycles_since};

/// The cost of one harvest in cycles, and the number of pages it found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    pub call: u64,
    pub protect: u64,
    pub traverse: u64,
    pub pages: u64,
}

/// A unit that a log harvests separately: a slot, or all slots of a machine.
#[derive(Clone, Debug)]
pub struct Unit {
    pub slot: String,
    pub bytes: u64,
}

impl Unit {
    /// One unit per slot.
    pub fn of_slots(slots: &[u64]) -> Vec<Self> {
        let unit = |(slot, bytes): (usize, &u64)| Self { slot: slot.to_string(), bytes: *bytes };
        slots.iter().enumerate().map(unit).collect()
    }
}

/// A dirty log together with its writer.
pub trait Subject {
    fn name(&self) -> &'static str;

    fn units(&self) -> &[Unit];

    fn start(&mut self) -> anyhow::Result<()>;

    /// Writes these pages of a slot once each, from another thread or in a guest.
    fn write(&mut self, slot: usize, pages: &[u64]) -> anyhow::Result<()>;

    /// Writes the first pages of a slot repeatedly while `meanwhile` runs.
    fn write_during(
        &mut self,
        slot: usize,
        pages: u64,
        meanwhile: &mut dyn FnMut(&mut dyn Subject) -> anyhow::Result<()>,
    ) -> anyhow::Result<()>;

    fn harvest(&mut self, unit: usize) -> anyhow::Result<Sample>;

    fn stop(&mut self) -> anyhow::Result<()>;
}

/// Traverses the runs of a bitmap. Returns the pages and the cycles.
pub fn traverse(pages: &PageBitmap) -> (u64, u64) {
    let begun = cycles();
    let mut found = 0;
    pages.runs().for_each(|(first, count)| found += black_box((first, count)).1);
    (found, cycles_since(begun))
}
