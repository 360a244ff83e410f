//! The display of a real guest. Its workload `display` redraws a slot of 32 KiB at 60 Hz and does
//! not write the slot next to it. Each log is harvested every three frames.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use vm_memory::GuestMemoryMmap;
use vmferry_dirty::{
    DEFAULT_RING_ENTRIES, DirtyLog, KvmBitmapLog, KvmClearLog, KvmRingLog, KvmSlot, UffdLog,
};
use vmferry_memory::{GuestMemory, MemoryKind, PageSet, SlotId, map_slots};
use vmferry_microvm::config::GuestConfig;
use vmferry_microvm::kvm::{DirtyRing, KvmBackend, KvmConfig};

use super::guest::GuestLog;
use super::subject::{Sample, traverse};
use crate::machine::{cycles, cycles_since};

/// The slots of the frame buffer and of the clean memory, as in `GuestConfig::layout`.
const SLOTS: [SlotId; 2] = [SlotId(1), SlotId(2)];

/// Time between two harvests: three frames.
const INTERVAL: Duration = Duration::from_millis(50);

/// The samples of the frame buffer and, if the log knows slots, of the clean slot.
pub type Harvests = Vec<Vec<Sample>>;

/// Harvests the display `rounds` times while the guest redraws it.
pub fn measure(log: GuestLog, rounds: usize) -> anyhow::Result<Harvests> {
    let guest = GuestConfig {
        memory_bytes: 64 << 20,
        vcpus: 1,
        command_line: "display ticks".into(),
        balloon: false,
    };
    guest.check()?;
    let mapped: Arc<GuestMemoryMmap<()>> = map_slots(&guest.layout(), MemoryKind::Private)?;
    let memory = GuestMemory::from_vm_memory(&mapped)?;
    let config = KvmConfig {
        vcpus: guest.vcpus,
        command_line: guest.command_line,
        dirty_ring: match log {
            GuestLog::KvmRing => DirtyRing::Required(DEFAULT_RING_ENTRIES),
            _ => DirtyRing::Off,
        },
        ..Default::default()
    };
    let mut machine = KvmBackend::new(config, mapped)?;
    let all = machine.kvm_slots();
    let vm = || Arc::clone(machine.vm());
    // KVM has a bitmap per slot; the other logs cover the whole machine.
    let one = |slot: SlotId| -> Vec<KvmSlot> {
        all.iter().filter(|candidate| candidate.slot == slot).copied().collect()
    };
    let logs: Vec<Arc<dyn DirtyLog>> = match log {
        GuestLog::KvmGet => SLOTS
            .map(|slot| Arc::new(KvmBitmapLog::new(vm(), one(slot))) as Arc<dyn DirtyLog>)
            .into(),
        GuestLog::KvmClear => SLOTS
            .iter()
            .map(|slot| Ok(Arc::new(KvmClearLog::new(vm(), one(*slot))?) as Arc<dyn DirtyLog>))
            .collect::<anyhow::Result<_>>()?,
        GuestLog::KvmRing => {
            let rings = machine.rings().context("the machine has no rings")?;
            vec![Arc::new(KvmRingLog::new(Arc::clone(rings)))]
        }
        GuestLog::Userfaultfd => vec![Arc::new(UffdLog::new(&memory)?)],
    };
    machine.start()?;
    logs.iter().try_for_each(|log| log.start())?;
    let mut pages = PageSet::for_memory(&memory);
    let mut harvests: Harvests = logs.iter().map(|_| Vec::new()).collect();
    let mut drawn = 0;
    let deadline = Instant::now() + Duration::from_secs(60);
    // Harvests before the guest starts drawing are not counted.
    while drawn < rounds {
        if Instant::now() > deadline {
            bail!("the display was redrawn {drawn} times in a minute");
        }
        // The guest draws during this sleep.
        std::thread::sleep(INTERVAL);
        let mut samples = Vec::new();
        for (log_of_slot, slot) in logs.iter().zip(SLOTS) {
            pages.clear_all();
            let begun = cycles();
            log_of_slot.collect(&mut pages)?;
            let mut sample = Sample { call: cycles_since(begun), ..Sample::default() };
            if log == GuestLog::KvmClear {
                let begun = cycles();
                log_of_slot.rearm(slot, 0, pages.bitmap(slot).words())?;
                sample.protect = cycles_since(begun);
            }
            (sample.pages, sample.traverse) = traverse(pages.bitmap(slot));
            samples.push(sample);
        }
        if samples[0].pages == 8 {
            drawn += 1;
            harvests.iter_mut().zip(samples).for_each(|(kept, sample)| kept.push(sample));
        }
    }
    logs.iter().try_for_each(|log| log.stop())?;
    machine.pause()?;
    Ok(harvests)
}
