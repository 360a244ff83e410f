//! The guest's memory blocks in QEMU, and which of them vmferry carries.
//!
//! With `x-ignore-shared`, QEMU leaves a RAM block out of its own migration if it is shared; from
//! 8.1 on only if it is also a *named file* (`migration/ram.c`, `ramblock_is_ignored`). vmferry
//! carries these blocks. QEMU sends all others (ROMs, video memory) with the device state.

use std::fs::File;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::json;
use vmferry_memory::pagemap::{
    PAGE_IS_PFNZERO, PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PageRegion, Query, scan,
};
use vmferry_memory::{GuestMemory, PAGE_SIZE, SlotId, SlotLayout};

use crate::additions::Additions;
use crate::error::QemuError;
use crate::located::{Listed, Located};
use crate::machine::Machine;
use crate::memory_file::READ_ONLY;
use crate::process::Mapping;
use crate::qmp::{Qmp, Version};
use crate::view::View;

/// The total size of the blocks that QEMU migrates with the device state: they are sent while the
/// guest is paused.
const MAX_STATE_BYTES: u64 = 64 << 20;

/// From this version on, QEMU leaves out named files only.
const NAMED_FILES_ONLY: Version = Version { major: 8, minor: 1, micro: 0 };

/// The party that carries a block to the other host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Carrier {
    /// vmferry, while the guest runs.
    Vmferry,
    /// QEMU, with the device state.
    Qemu,
}

/// A RAM block of QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    /// QEMU's name for it.
    pub name: String,
    /// Bytes in use.
    pub bytes: u64,
    /// The party that carries it.
    pub carrier: Carrier,
    /// Device and inode of its file.
    pub file: (u64, u64),
}

/// A guest's memory.
pub struct Ram {
    /// All blocks.
    pub blocks: Vec<Block>,
    /// The blocks that vmferry carries, mapped into this process.
    pub memory: GuestMemory,
    /// Their addresses in QEMU, for each slot.
    pub ranges: Ranges,
    state_bytes_in_use: u64,
}

/// Host-virtual addresses in QEMU for each slot.
pub type Ranges = Vec<(SlotId, Range<u64>)>;

impl Ram {
    /// Finds the blocks of a QEMU, and maps those that vmferry carries.
    ///
    /// # Errors
    /// If memory can't be carried: the reason, and what to change on QEMU's command line.
    pub fn find(qmp: &mut Qmp, view: &mut dyn View) -> Result<Self, QemuError> {
        let located = Located::find(qmp, view)?;
        Self::of(&located, qmp, view)
    }

    /// The same for a QEMU whose blocks are already located.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub fn of(located: &Located, qmp: &mut Qmp, view: &mut dyn View) -> Result<Self, QemuError> {
        let pid = located.pid;
        let named_only = qmp.version() >= NAMED_FILES_ONLY;
        let backends = &located.backends;
        let mut blocks = Vec::new();
        let mut ours: Vec<(Listed, Mapping)> = Vec::new();
        let (mut state_bytes, mut state_bytes_in_use) = (0, 0);
        let pagemap = view.pagemap(pid)?;
        for (block, mapping) in &located.blocks {
            let ignored = mapping.is_some() && (backends.is_named_file(&block.name) || !named_only);
            blocks.push(Block {
                name: block.name.clone(),
                bytes: block.used,
                carrier: if ignored { Carrier::Vmferry } else { Carrier::Qemu },
                file: mapping.as_ref().map_or((0, 0), |mapping| mapping.file),
            });
            match mapping {
                Some(mapping) if ignored => {
                    let why = backends.use_of(&block.name).why_not();
                    let read_only = (!mapping.writable).then(|| READ_ONLY.to_owned());
                    if let Some(why) = why.or(read_only) {
                        return Err(QemuError::Memory { block: block.name.clone(), why });
                    }
                    ours.push((block.clone(), mapping.clone()));
                }
                found => {
                    if block.used > MAX_STATE_BYTES {
                        let kind = found.as_ref().and_then(|_| backends.kind(&block.name));
                        return Err(not_carried(block, kind, qmp.version()));
                    }
                    state_bytes += block.used;
                    state_bytes_in_use += bytes_in_use(&pagemap, block);
                }
            }
        }
        if state_bytes > MAX_STATE_BYTES {
            let text = format!(
                "{} MiB of ROMs and video memory would be sent while the guest is paused; at most \
                 {} MiB are allowed: choose a display with less video memory",
                state_bytes >> 20,
                MAX_STATE_BYTES >> 20
            );
            return Err(QemuError::Unattachable(text));
        }
        if ours.is_empty() {
            return Err(QemuError::Unattachable(format!("none of its memory is shared: {ADVICE}")));
        }
        let (memory, ranges) = map(pid, ours, view)?;
        Ok(Self { blocks, memory, ranges, state_bytes_in_use })
    }

    /// The blocks that vmferry carries, in slot order.
    pub fn carried(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(|block| block.carrier == Carrier::Vmferry)
    }

    /// Bytes of the blocks that QEMU carries with the device state, without pages that were never
    /// written.
    #[must_use]
    pub fn state_bytes_in_use(&self) -> u64 {
        self.state_bytes_in_use
    }
}

/// Bytes of a block that were ever written; its whole size if QEMU does not report its address.
fn bytes_in_use(pagemap: &File, block: &Listed) -> u64 {
    let Some(start) = block.address else { return block.used };
    let query = Query {
        inverted: PAGE_IS_PFNZERO,
        all: PAGE_IS_PFNZERO,
        any: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        ..Query::default()
    };
    let mut bytes = 0;
    let mut regions = [PageRegion::default(); 64];
    let range = start..start.saturating_add(block.used);
    let scanned = scan(pagemap, range, query, &mut regions, |region| {
        bytes += region.end - region.start;
    });
    if scanned.is_ok() { bytes } else { block.used }
}

const ADVICE: &str = "start QEMU with `-object memory-backend-file,id=ram,size=SIZE,\
                      mem-path=/dev/shm/NAME,share=on -machine memory-backend=ram`";

fn not_carried(block: &Listed, shared: Option<&str>, version: Version) -> QemuError {
    let why = match shared {
        Some(kind) => format!(
            "is a {}, which QEMU {version} would send itself while the guest is paused: \
             {ADVICE}",
            match kind.strip_prefix("memory-backend-") {
                Some("memfd") | None => "memfd",
                Some(_) => kind,
            }
        ),
        None => format!("is private to QEMU: {ADVICE}"),
    };
    QemuError::Memory { block: block.name.clone(), why }
}

/// Maps each block's file. The slots' addresses are those of the blocks laid end to end.
fn map(
    pid: u32,
    ours: Vec<(Listed, Mapping)>,
    view: &mut dyn View,
) -> Result<(GuestMemory, Ranges), QemuError> {
    let mut files: Vec<(SlotLayout, File, u64)> = Vec::new();
    let mut ranges = Ranges::new();
    let mut gpa = 0;
    for (block, mapping) in ours {
        let bad = |why: String| QemuError::Memory { block: block.name.clone(), why };
        let start = block.address.unwrap_or(mapping.range.start);
        let end = start.saturating_add(block.used);
        if end > mapping.range.end || block.used % PAGE_SIZE as u64 != 0 || block.page_bytes < 4096
        {
            return Err(bad("is mapped in pieces, which vmferry can't carry".into()));
        }
        let slot = SlotId(u16::try_from(files.len()).map_err(|_| bad("is one too many".into()))?);
        let pages = block.used / PAGE_SIZE as u64;
        let offset = mapping.offset + (start - mapping.range.start);
        let file = view.open_file(pid, &mapping)?;
        files.push((SlotLayout { slot, gpa, pages }, file, offset));
        ranges.push((slot, start..end));
        gpa += block.used;
    }
    let memory = GuestMemory::map_files(files).map_err(|error| QemuError::Local {
        action: "map the guest's memory",
        source: std::io::Error::other(error),
    })?;
    Ok((memory, ranges))
}

/// What the other side must know of the machine and its blocks, to compare them with its own.
pub fn describe(machine: &Machine, blocks: &[Block], host: &str, additions: &Additions) -> Vec<u8> {
    let mut description = json!({ "host": host, "machine": machine, "blocks": blocks });
    additions.add_to(&mut description);
    description.to_string().into_bytes()
}
