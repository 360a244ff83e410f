//! The software log in each of its ways, under threads that write through `vm-memory` for ever.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout, map_slots};

use super::{check, follow};
use crate::{DirtyBitmap, SoftwareLog, SoftwareWay};

/// Not whole words, and more than one block.
const PAGES: u64 = 1500;

/// Writes random values to random places, many of them across two pages, until told to stop.
fn write(
    memory: &GuestMemoryMmap<DirtyBitmap>,
    writer: u64,
    stop: &AtomicBool,
    written: &AtomicU64,
) {
    let mut random = writer + 1;
    while !stop.load(Ordering::Acquire) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let at = (random >> 20) % (PAGES * PAGE_SIZE as u64 - 64);
        memory.write_slice(&random.to_le_bytes().repeat(8), GuestAddress(at)).unwrap();
        written.fetch_add(1, Ordering::Release);
    }
}

#[test]
fn each_way_follows_writers_that_never_pause() {
    for way in SoftwareWay::ALL {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
        let mapped = map_slots::<DirtyBitmap>(&layout, MemoryKind::Private).unwrap();
        let memory = GuestMemory::from_vm_memory(&mapped).unwrap();
        let log = SoftwareLog::in_way(&mapped, way);
        let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
        let followed = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..3)
                .map(|writer| {
                    let (mapped, stop, written) = (&*mapped, &stop, &written);
                    scope.spawn(move || write(mapped, writer, stop, written))
                })
                .collect();
            let wait = || {
                let until = written.load(Ordering::Acquire) + 100;
                while written.load(Ordering::Acquire) < until {
                    std::thread::yield_now();
                }
            };
            follow(&memory, &log, 60, wait, || {
                stop.store(true, Ordering::Release);
                writers.into_iter().for_each(|writer| writer.join().unwrap());
            })
        });
        check(&memory, followed);
    }
}
