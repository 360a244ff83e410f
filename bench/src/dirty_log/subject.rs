//! What the benchmark does to each log.

use std::hint::black_box;

use vmferry_memory::PageBitmap;

use crate::machine::{cycles, cycles_since};

/// What one harvest cost, in cycles, and how many pages it found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    pub call: u64,
    pub protect: u64,
    pub traverse: u64,
    pub pages: u64,
}

/// What a log harvests by itself: a slot, or all of a machine's.
#[derive(Clone, Debug)]
pub struct Unit {
    pub slot: String,
    pub bytes: u64,
}

impl Unit {
    /// One for each slot.
    pub fn of_slots(slots: &[u64]) -> Vec<Self> {
        let unit = |(slot, bytes): (usize, &u64)| Self { slot: slot.to_string(), bytes: *bytes };
        slots.iter().enumerate().map(unit).collect()
    }
}

/// A log under somebody who writes.
pub trait Subject {
    fn name(&self) -> &'static str;

    fn units(&self) -> &[Unit];

    fn start(&mut self) -> anyhow::Result<()>;

    /// Writes these pages of a slot, once each, from another thread or in a guest.
    fn write(&mut self, slot: usize, pages: &[u64]) -> anyhow::Result<()>;

    /// Writes the first pages of a slot over and over while something else is done.
    fn write_for_ever(
        &mut self,
        slot: usize,
        pages: u64,
        meanwhile: &mut dyn FnMut(&mut dyn Subject) -> anyhow::Result<()>,
    ) -> anyhow::Result<()>;

    fn harvest(&mut self, unit: usize) -> anyhow::Result<Sample>;

    fn stop(&mut self) -> anyhow::Result<()>;
}

/// Goes through the runs of a bitmap and clears it; pages and cycles.
pub fn traverse(pages: &PageBitmap) -> (u64, u64) {
    let begun = cycles();
    let mut found = 0;
    pages.runs().for_each(|(first, count)| found += black_box((first, count)).1);
    (found, cycles_since(begun))
}
