//! Warms up memory before a migration.

use anyhow::{Context, bail};
use vmferry_memory::{GuestMemory, MemoryKind, PageRun, SlotId, SlotLayout};

use super::host::Host;

/// Bytes of a file that Linux maps per fault (`fault_around_bytes`).
const FAULT_AROUND: usize = 64 << 10;

/// Warms up the host's memory and the source's page tables. A virtual machine returns memory that
/// was free for long to its host, and getting it back is slow. Pages that arrived through a file
/// are not in the page tables of the QEMU that runs the guest. Both costs would be charged to the
/// first method.
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
        let Some((from, to)) = range else {
            bail!("/proc/{pid}/maps has an unexpected line: {line}")
        };
        let (from, to) = (u64::from_str_radix(from, 16)?, u64::from_str_radix(to, 16)?);
        let path = line.find("/dev/shm/").map_or("", |at| &line[at..]);
        touch_data(&file, path, from, to)?;
    }
    Ok(())
}

/// Reads a byte of each populated page through the process's own mapping.
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
