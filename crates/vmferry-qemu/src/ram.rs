//! The guest's memory, as QEMU has it: which blocks there are, and which of them vmferry carries.
//!
//! QEMU leaves a RAM block out of its own migration with `x-ignore-shared` if it is shared, and from
//! 8.1 on only if it is a *named file* (`migration/ram.c`, `ramblock_is_ignored`). Those are ours. All others
//! (ROMs, video memory) are QEMU's, and travel with the device state.

use std::fs::File;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::json;
use vmferry::newer;
use vmferry_memory::pagemap::{
    PAGE_IS_PFNZERO, PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PageRegion, Query, scan,
};
use vmferry_memory::{GuestMemory, PAGE_SIZE, SlotId, SlotLayout};

use crate::error::QemuError;
use crate::machine::Machine;
use crate::memory_file::{Backends, READ_ONLY};
use crate::process::Mapping;
use crate::qmp::{Qmp, QmpError, Version};
use crate::starter::View;
use crate::vcpu::{self, Vcpu};

/// Blocks that QEMU migrates with the device state may have so many bytes together: they travel
/// while the guest stands still.
const MAX_STATE_BYTES: u64 = 64 << 20;

/// From this version on QEMU leaves out named files only.
const NAMED_FILES_ONLY: Version = Version { major: 8, minor: 1, micro: 0 };

/// Who carries a block to the other host.
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
    /// QEMU's name of it.
    pub name: String,
    /// Bytes in use.
    pub bytes: u64,
    /// Who carries it.
    pub carrier: Carrier,
    /// Device and inode of its file.
    pub file: (u64, u64),
}

/// A guest's memory.
pub struct Ram {
    /// All blocks.
    pub blocks: Vec<Block>,
    /// Those that vmferry carries, mapped into this process.
    pub memory: GuestMemory,
    /// Where QEMU has mapped them, for each slot.
    pub ranges: Ranges,
    state_bytes_in_use: u64,
}

/// Host-virtual addresses in QEMU for each slot.
pub type Ranges = Vec<(SlotId, Range<u64>)>;

/// A line of `info ramblock`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// QEMU's name of the block.
    pub name: String,
    page_bytes: u64,
    /// Bytes in use.
    pub used: u64,
    /// What it may grow to, in bytes.
    pub total: u64,
    /// Host-virtual address in QEMU; 7.2 does not list it.
    address: Option<u64>,
}

/// All blocks of a QEMU, and where they are.
pub struct Located {
    /// QEMU's process.
    pub pid: u32,
    /// The blocks, and the mappings of those that are in shared files.
    pub blocks: Vec<(Listed, Option<Mapping>)>,
    /// What they are made of.
    pub backends: Backends,
}

impl Located {
    /// Looks at a QEMU.
    ///
    /// # Errors
    /// QMP's, or if the process can't be looked into.
    pub fn find(qmp: &mut Qmp, view: &mut dyn View) -> Result<Self, QemuError> {
        let unseen = || QemuError::Unseen { path: qmp.path().to_owned() };
        let pid = view.process(qmp).ok_or_else(unseen)?;
        let listed = list_with_addresses(qmp)?;
        let mappings = view.shared_mappings(pid)?;
        let place_of = |block: &Listed| {
            let at = block.address?;
            mappings.iter().find(|mapping| mapping.range.contains(&at)).cloned()
        };
        let blocks = listed.into_iter().map(|block| {
            let mapping = place_of(&block);
            (block, mapping)
        });
        Ok(Self { pid, blocks: blocks.collect(), backends: Backends::read(qmp)? })
    }
}

impl Ram {
    /// Finds the blocks of a QEMU, and maps those that are ours.
    ///
    /// # Errors
    /// If memory can't be carried: what is wrong with it, and what to change on QEMU's command line.
    pub fn find(qmp: &mut Qmp, view: &mut dyn View) -> Result<Self, QemuError> {
        let located = Located::find(qmp, view)?;
        Self::of(&located, qmp, view)
    }

    /// The same, of a QEMU whose blocks were found before.
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
                "{} MiB of ROMs and video memory would travel while the guest stands still; \
                 at most {} MiB may: choose a display with less video memory",
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

    /// The blocks that vmferry carries, in the order of the slots.
    pub fn carried(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(|block| block.carrier == Carrier::Vmferry)
    }

    /// Bytes of blocks that QEMU carries with the device state, without pages that were never written.
    #[must_use]
    pub fn state_bytes_in_use(&self) -> u64 {
        self.state_bytes_in_use
    }
}

/// All blocks, in the same order on both sides, whatever QEMU's versions list first.
pub fn list(qmp: &mut Qmp) -> Result<Vec<Listed>, QmpError> {
    let mut listed = parse_blocks(&qmp.human("info ramblock")?);
    listed.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(listed)
}

/// The same, with the addresses of those that QEMU has at one.
pub fn list_with_addresses(qmp: &mut Qmp) -> Result<Vec<Listed>, QemuError> {
    let mut listed = list(qmp)?;
    if listed.iter().any(|block| block.address.is_none()) {
        find_addresses(qmp, &mut listed)?;
    }
    Ok(listed)
}

/// Bytes of a block that were ever written; all of it, if QEMU does not say where it is.
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

/// Maps each block's file; the slots' addresses are those of the blocks laid end to end.
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

/// Asks for the addresses of the blocks that the guest sees, one by one.
fn find_addresses(qmp: &mut Qmp, blocks: &mut [Listed]) -> Result<(), QemuError> {
    let tree = qmp.human("info mtree -f")?;
    for block in blocks {
        let Some((gpa, offset)) = place_of(&tree, &block.name) else { continue };
        let text = qmp.human(&format!("gpa2hva {gpa:#x}"))?;
        // `Host virtual address for 0x0 (ram) is 0x7f…`
        let found = text.rsplit_once(&format!("({}) is 0x", block.name));
        let address = found.and_then(|(_, hex)| u64::from_str_radix(hex.trim(), 16).ok());
        block.address = address.and_then(|address| address.checked_sub(offset));
    }
    Ok(())
}

/// The guest-physical address at which a block is first seen, and the offset in it, in bytes. A line is
/// `0000000100000000-000000013fffffff (prio 0, ram): ram @0000000080000000 KVM`.
fn place_of(tree: &str, name: &str) -> Option<(u64, u64)> {
    tree.lines().find_map(|line| {
        let (range, region) = line.split_once(" (prio ")?;
        let region = region.split_once(", ram): ")?.1;
        let rest = region
            .strip_prefix(name)
            .filter(|rest| rest.is_empty() || rest.starts_with(" @") || rest.starts_with(" KVM"))?;
        let offset = rest.strip_prefix(" @").map_or(Some(0), |rest| {
            u64::from_str_radix(rest.split_whitespace().next()?, 16).ok()
        })?;
        let start = u64::from_str_radix(range.trim().split_once('-')?.0, 16).ok()?;
        Some((start, offset))
    })
}

/// Reads `info ramblock`: name, page size, offset, used, total and, in newer QEMUs, host address of each
/// block. Names may contain blanks.
fn parse_blocks(text: &str) -> Vec<Listed> {
    text.lines().skip(1).filter_map(parse_block).collect()
}

fn parse_block(line: &str) -> Option<Listed> {
    let hex = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let words: Vec<&str> = line.split_whitespace().collect();
    let first = words.iter().position(|word| word.starts_with("0x"))?;
    // Name, then the page size as a number and its unit.
    let unit = match *words.get(first.checked_sub(1)?)? {
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => 1,
    };
    let page_bytes = words.get(first.checked_sub(2)?)?.parse::<u64>().ok()?.checked_mul(unit)?;
    Some(Listed {
        name: words[..first - 2].join(" "),
        page_bytes,
        used: hex(words.get(first + 1)?)?,
        total: hex(words.get(first + 2)?)?,
        address: words.get(first + 3).and_then(|text| hex(text)),
    })
}

/// What the other side must know of the machine and its blocks, to see whether it has the same.
pub fn describe(machine: &Machine, vcpu: Option<&Vcpu>, blocks: &[Block], host: &str) -> Vec<u8> {
    let mut description = json!({ "host": host, "machine": machine, "blocks": blocks });
    if let Some(vcpu) = vcpu {
        newer::add_optional(&mut description, vcpu::MEMBER, vcpu);
    }
    description.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_blocks_is_read() {
        let text = "              Block Name    PSize              Offset               Used              Total                HVA  RO\n\
                    \x20                    ram    4 KiB  0x0000000000000000 0x0000000020000000 0x0000000020000000 0x00007f54c7fff000  rw\n\
                    \x20   /rom@etc/acpi/tables    2 MiB  0x0000000020080000 0x0000000000020000 0x0000000000200000 0x00007f54c6200000  ro\n\n";
        let blocks = parse_blocks(text);
        assert_eq!(
            blocks,
            [
                Listed {
                    name: "ram".into(),
                    page_bytes: 4096,
                    used: 512 << 20,
                    total: 512 << 20,
                    address: Some(0x7f54_c7ff_f000)
                },
                Listed {
                    name: "/rom@etc/acpi/tables".into(),
                    page_bytes: 2 << 20,
                    used: 0x20000,
                    total: 0x20_0000,
                    address: Some(0x7f54_c620_0000)
                },
            ]
        );
    }

    #[test]
    fn older_qemus_list_no_addresses() {
        let line = "                     ram    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000";
        let found = parse_block(line).unwrap();
        assert_eq!((found.name.as_str(), found.used, found.address), ("ram", 256 << 20, None));
        let tree = "FlatView #1\n\
                    \x20 00000000000a0000-00000000000bffff (prio 1, i/o): ram-like\n\
                    \x20 0000000000100000-000000007fffffff (prio 0, ram): ram @0000000000100000 KVM\n\
                    \x20 0000000100000000-000000013fffffff (prio 0, ram): ram2\n";
        assert_eq!(place_of(tree, "ram"), Some((0x10_0000, 0x10_0000)));
        assert_eq!(place_of(tree, "ram2"), Some((1 << 32, 0)));
        assert_eq!(place_of(tree, "pc.bios"), None);
    }
}
