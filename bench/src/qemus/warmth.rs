//! Memory as it is while it is used.

use anyhow::{Context, bail};
use vmferry_memory::{GuestMemory, MemoryKind, PageRun, SlotId, SlotLayout};

use super::host::Host;

/// Linux maps so many bytes of a file at a fault (`fault_around_bytes`).
const FAULT_AROUND: usize = 64 << 10;

/// Memory that was free for long has gone back to the host of a virtual machine such as this one, and is slow
/// to come again; and pages that came by a file are in no page table of the QEMU that runs the guest. Both
/// would be charged to whoever comes first.
pub fn warm_up(source: &Host, mib: u64) -> anyhow::Result<()> {
    let pages = mib << 8;
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Thp)?;
    memory.populate(PageRun { slot: SlotId(0), first: 0, pages })?;
    drop(memory);
    let pid = source.qemu.child.id();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let file = std::fs::File::open(format!("/proc/{pid}/mem"))?;
    for line in maps.lines().filter(|line| line.contains("/dev/shm/")) {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let Some((from, to)) = range else { bail!("no mapping: {line}") };
        let (from, to) = (u64::from_str_radix(from, 16)?, u64::from_str_radix(to, 16)?);
        let path = line.find("/dev/shm/").map_or("", |at| &line[at..]);
        touch_data(&file, path, from, to)?;
    }
    Ok(())
}

/// Reads a byte of each page that has content, by the process's own mapping.
fn touch_data(memory: &std::fs::File, path: &str, from: u64, to: u64) -> anyhow::Result<()> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open(path).with_context(|| path.to_owned())?;
    let mut at = 0;
    while let Ok(data) = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
        let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(data))?;
        for page in (data..hole.min(to - from)).step_by(FAULT_AROUND) {
            memory.read_exact_at(&mut [0], from + page)?;
        }
        at = hole;
    }
    Ok(())
}
