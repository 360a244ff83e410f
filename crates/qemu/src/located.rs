//! The addresses of the guest's memory blocks in QEMU.

use crate::error::QemuError;
use crate::memory_file::backends::Backends;
use crate::process::Mapping;
use crate::qmp::{Qmp, QmpError};
use crate::view::View;

/// A line of `info ramblock`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// QEMU's name for the block.
    pub name: String,
    pub(crate) page_bytes: u64,
    /// Bytes in use.
    pub used: u64,
    /// The size that it may grow to, in bytes.
    pub total: u64,
    /// Host-virtual address in QEMU; QEMU 7.2 does not list it.
    pub(crate) address: Option<u64>,
}

/// All blocks of a QEMU, and their mappings.
pub struct Located {
    /// QEMU's process.
    pub pid: u32,
    /// The blocks, and the mappings of those that are in shared files.
    pub blocks: Vec<(Listed, Option<Mapping>)>,
    /// Their memory backends.
    pub backends: Backends,
}

impl Located {
    /// Locates the blocks of a QEMU.
    ///
    /// # Errors
    /// QMP errors, or if the process is not accessible.
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

/// All blocks, sorted by name, because QEMU versions list them in different orders.
pub fn list(qmp: &mut Qmp) -> Result<Vec<Listed>, QmpError> {
    let mut listed = parse_blocks(&qmp.human("info ramblock")?);
    listed.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(listed)
}

/// The same, with the addresses of the blocks that have one.
pub fn list_with_addresses(qmp: &mut Qmp) -> Result<Vec<Listed>, QemuError> {
    let mut listed = list(qmp)?;
    if listed.iter().any(|block| block.address.is_none()) {
        find_addresses(qmp, &mut listed)?;
    }
    Ok(listed)
}

/// Queries the addresses of the blocks that the guest sees, one by one.
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

/// The first guest-physical address at which a block is mapped, and the offset in the block there,
/// in bytes. A line is
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

/// Parses `info ramblock`: name, page size, offset, used, total and, in newer QEMUs, the host
/// address of each block. Names may contain spaces.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_list_is_parsed() {
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
    fn block_list_of_older_qemus_has_no_addresses() {
        let line = "  ram    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000";
        let found = parse_block(line).unwrap();
        assert_eq!((found.name.as_str(), found.used, found.address), ("ram", 256 << 20, None));
        let tree = "\
            FlatView #1\n\
            \x20 00000000000a0000-00000000000bffff (prio 1, i/o): ram-like\n\
            \x20 0000000000100000-000000007fffffff (prio 0, ram): ram @0000000000100000 KVM\n\
            \x20 0000000100000000-000000013fffffff (prio 0, ram): ram2\n";
        assert_eq!(place_of(tree, "ram"), Some((0x10_0000, 0x10_0000)));
        assert_eq!(place_of(tree, "ram2"), Some((1 << 32, 0)));
        assert_eq!(place_of(tree, "pc.bios"), None);
    }
}
