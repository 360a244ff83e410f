//! The software log in each of its ways, with threads that write continuously through `vm-memory`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout, map_slots};

use super::{check, follow_threads};
use crate::{DirtyBitmap, SoftwareLog, SoftwareWay};

/// Not a multiple of a word, and more than one block.
const PAGES: u64 = 1500;

/// Writes random values to random addresses, many of them across two pages, until stopped.
fn write(
    memory: &GuestMemoryMmap<DirtyBitmap>,
    writer: u64,
    stop: &AtomicBool,
    written: &AtomicU64,
) {
    let mut random = fastrand::Rng::with_seed(writer);
    while !stop.load(Ordering::Acquire) {
        let at = random.u64(..PAGES * PAGE_SIZE as u64 - 64);
        memory.write_slice(&random.u64(..).to_le_bytes().repeat(8), GuestAddress(at)).unwrap();
        written.fetch_add(1, Ordering::Release);
    }
}

#[test]
fn every_strategy_follows_writers_that_never_pause() {
    for way in SoftwareWay::ALL {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
        let mapped = map_slots::<DirtyBitmap>(&layout, MemoryKind::Private).unwrap();
        let memory = GuestMemory::from_vm_memory(&mapped).unwrap();
        let log = SoftwareLog::in_way(&mapped, way);
        let followed = follow_threads(&memory, &log, 60, 3, |writer, stop, written| {
            write(&mapped, writer, stop, written);
        });
        check(&memory, followed);
    }
}
