//! The dirty logs of a real guest: KVM's bitmap, KVM's bitmap with manual clear, the dirty ring,
//! and userfaultfd.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::anyhow;
use vmferry_dirty::{
    DirtyLog, DirtyRings, KvmBitmapLog, KvmClearLog, KvmRingLog, KvmSlot, UffdLog, max_ring_entries,
};
use vmferry_kvm_lab::{LabOptions, Machine, WriteLoop};
use vmferry_memory::traverse::next_nonzero;
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageRun, PageSet, SlotId, SlotLayout};

use super::subject::{Sample, Subject, Unit, traverse};
use crate::machine::{cycles, cycles_since};

/// vCPUs of the guest. The reference machine has this many cores.
const VCPUS: usize = 2;

/// A dirty log of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestLog {
    KvmGet,
    KvmClear,
    KvmRing,
    Userfaultfd,
}

impl GuestLog {
    pub const ALL: [Self; 4] = [Self::KvmGet, Self::KvmClear, Self::KvmRing, Self::Userfaultfd];

    pub fn name(self) -> &'static str {
        match self {
            Self::KvmGet => "KVM get",
            Self::KvmClear => "KVM clear",
            Self::KvmRing => "KVM ring",
            Self::Userfaultfd => "userfaultfd",
        }
    }
}

/// Allocates and populates adjacent slots of these lengths in bytes.
pub fn memory(slots: &[u64]) -> anyhow::Result<GuestMemory> {
    let mut layout = Vec::new();
    let mut gpa = 0;
    for (slot, bytes) in (0..).zip(slots) {
        let pages = bytes / PAGE_SIZE as u64;
        layout.push(SlotLayout { slot: SlotId(slot), gpa, pages });
        gpa += bytes;
    }
    let memory = GuestMemory::allocate(&layout, MemoryKind::Private)?;
    for slot in &layout {
        memory.populate(PageRun { slot: slot.slot, first: 0, pages: slot.pages })?;
    }
    Ok(memory)
}

/// A machine and its dirty logs.
pub struct GuestSubject {
    log: GuestLog,
    machine: Machine,
    units: Vec<Unit>,
    logs: Vec<(Arc<dyn DirtyLog>, PageSet)>,
    /// Cycles that the vCPU threads spent on full rings since the last harvest.
    full_rings: Arc<AtomicU64>,
}

impl GuestSubject {
    /// Starts a machine with this memory. userfaultfd gets its own memory: write-protecting shared
    /// memory would remove it from the other machines' page tables, and their logs would have less
    /// to protect.
    pub fn new(log: GuestLog, shared: &GuestMemory) -> anyhow::Result<Self> {
        let lengths: Vec<u64> = shared.slots().iter().map(|slot| slot.len_bytes() as u64).collect();
        let memory = match log {
            GuestLog::Userfaultfd => memory(&lengths)?,
            _ => shared.clone(),
        };
        let mut options = LabOptions::default();
        if log == GuestLog::KvmRing {
            let probe = Machine::over(memory.clone(), 1, LabOptions::default())?;
            options.dirty_ring_entries = Some(max_ring_entries(probe.vm())?);
        }
        let machine = Machine::over(memory, VCPUS, options)?;
        let slots: Vec<KvmSlot> = machine
            .slots()
            .iter()
            .map(|slot| KvmSlot {
                slot: slot.slot,
                kvm_slot: slot.kvm_slot,
                gpa: slot.gpa,
                bytes: slot.bytes,
                host_address: slot.host_address,
            })
            .collect();
        // KVM has a bitmap per slot; the other logs cover the whole machine.
        let alone = |slot: &KvmSlot| {
            let layout =
                [SlotLayout { slot: SlotId(0), gpa: 0, pages: slot.bytes / PAGE_SIZE as u64 }];
            (vec![KvmSlot { slot: SlotId(0), ..*slot }], PageSet::for_layout(&layout))
        };
        let vm = || Arc::clone(machine.vm());
        let full_rings = Arc::new(AtomicU64::new(0));
        let whole = PageSet::for_memory(machine.memory());
        let logs: Vec<(Arc<dyn DirtyLog>, PageSet)> = match log {
            GuestLog::KvmGet | GuestLog::KvmClear => slots
                .iter()
                .map(|slot| {
                    let (slot, pages) = alone(slot);
                    let log: Arc<dyn DirtyLog> = match log {
                        GuestLog::KvmGet => Arc::new(KvmBitmapLog::new(vm(), slot)),
                        _ => Arc::new(KvmClearLog::new(vm(), slot)?),
                    };
                    Ok((log, pages))
                })
                .collect::<anyhow::Result<_>>()?,
            GuestLog::KvmRing => vec![(ring(&machine, options, slots, &full_rings)?, whole)],
            GuestLog::Userfaultfd => vec![(Arc::new(UffdLog::new(machine.memory())?), whole)],
        };
        let units = match logs.len() {
            1 => vec![Unit { slot: "all".into(), bytes: lengths.iter().sum() }],
            _ => Unit::of_slots(&lengths),
        };
        Ok(Self { log, machine, units, logs, full_rings })
    }
}

fn ring(
    machine: &Machine,
    options: LabOptions,
    slots: Vec<KvmSlot>,
    full_rings: &Arc<AtomicU64>,
) -> anyhow::Result<Arc<dyn DirtyLog>> {
    let entries = options.dirty_ring_entries.unwrap_or_default();
    let rings = Arc::new(DirtyRings::new(Arc::clone(machine.vm()), entries, slots)?);
    for vcpu in 0..machine.vcpus() {
        machine.with_vcpu(vcpu, |fd| rings.add_vcpu(fd))??;
    }
    let (reaped, spent) = (Arc::clone(&rings), Arc::clone(full_rings));
    machine.on_ring_full(move |_| {
        let begun = cycles();
        // The next `collect` returns the error.
        let _ = reaped.reap_full();
        spent.fetch_add(cycles_since(begun), Ordering::Relaxed);
    });
    Ok(Arc::new(KvmRingLog::new(rings)))
}

/// Write-protects the collected pages as a lane of the engine does: 128 MiB of the guest in one
/// call.
fn protect(log: &dyn DirtyLog, pages: &PageSet) -> anyhow::Result<()> {
    const WORDS: usize = 512;
    for (slot, bitmap) in pages.iter() {
        for (index, words) in bitmap.words().chunks(WORDS).enumerate() {
            if next_nonzero(words, 0) < words.len() {
                log.rearm(slot, index * WORDS, words)?;
            }
        }
    }
    Ok(())
}

impl Subject for GuestSubject {
    fn name(&self) -> &'static str {
        self.log.name()
    }

    fn units(&self) -> &[Unit] {
        &self.units
    }

    fn start(&mut self) -> anyhow::Result<()> {
        Ok(self.logs.iter().try_for_each(|(log, _)| log.start())?)
    }

    fn write(&mut self, slot: usize, pages: &[u64]) -> anyhow::Result<()> {
        let slot = SlotId(slot as u16);
        let (left, right) = pages.split_at(pages.len() / 2);
        let machine = &self.machine;
        std::thread::scope(|scope| {
            let other = scope.spawn(|| machine.write_pages(1, slot, right.iter().copied()));
            machine.write_pages(0, slot, left.iter().copied())?;
            other.join().map_err(|_| anyhow!("a vCPU thread panicked"))??;
            Ok(())
        })
    }

    fn write_during(
        &mut self,
        slot: usize,
        pages: u64,
        meanwhile: &mut dyn FnMut(&mut dyn Subject) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (slot, half) = (SlotId(slot as u16), pages / 2);
        let loops = [
            self.machine.start_loop(0, slot, 0, half)?,
            self.machine.start_loop(1, slot, half, pages - half)?,
        ];
        let result = meanwhile(self);
        loops.into_iter().try_for_each(WriteLoop::stop)?;
        result
    }

    fn harvest(&mut self, unit: usize) -> anyhow::Result<Sample> {
        let (log, pages) = &mut self.logs[unit];
        let begun = cycles();
        log.collect(pages)?;
        let mut sample = Sample { call: cycles_since(begun), ..Sample::default() };
        if self.log == GuestLog::KvmClear {
            let begun = cycles();
            protect(log.as_ref(), pages)?;
            sample.protect = cycles_since(begun);
        }
        sample.protect += self.full_rings.swap(0, Ordering::Relaxed);
        for (_, bitmap) in pages.iter() {
            let (found, took) = traverse(bitmap);
            sample.pages += found;
            sample.traverse += took;
        }
        pages.clear_all();
        Ok(sample)
    }

    fn stop(&mut self) -> anyhow::Result<()> {
        Ok(self.logs.iter().try_for_each(|(log, _)| log.stop())?)
    }
}
