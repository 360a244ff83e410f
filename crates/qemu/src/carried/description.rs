//! What both sides of a carried guest must agree on.

use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vmferry::PrepareError;
use vmferry::vmm::newer;
use vmferry_memory::{PAGE_SIZE, SlotId, SlotLayout};
use vmferry_wire::{GuestIdentity, MAX_LANES};

use crate::additions::Additions;
use crate::error::QemuError;
use crate::located;
use crate::machine::{self, Machine};
use crate::proc_stat::host;
use crate::qmp::{Qmp, QmpError};

/// The most channels in addition to the main stream. Each uses one lane, as the main stream does.
pub const MAX_CHANNELS: u8 = MAX_LANES - 1;

/// The optional member that says that the source's QEMU may use its post-copy. A QEMU must know
/// this before it receives anything.
pub const POST_COPY: &str = "post_copy";

/// A RAM block of QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamedBlock {
    /// QEMU's name for it.
    pub name: String,
    /// Bytes in use.
    pub bytes: u64,
    /// The size that it may grow to, in bytes. It must be equal on the other side.
    pub most: u64,
}

/// A QEMU, as the other side must know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The boot ID of its host.
    pub host: String,
    /// What must be equal.
    pub machine: Machine,
    /// All its memory, sorted by name.
    pub blocks: Vec<StreamedBlock>,
    /// Device and inode of the memory files that are shared with other processes, as far as they
    /// are visible.
    pub files: Vec<(u64, u64)>,
    /// Channels in addition to the main stream.
    pub multifd: u8,
}

impl Description {
    /// Reads it from a QEMU.
    ///
    /// # Errors
    /// QMP errors.
    pub fn read(qmp: &mut Qmp, multifd: u8) -> Result<Self, QemuError> {
        let machine = machine::look(qmp)?;
        let blocks = located::list(qmp)?.into_iter().map(|block| StreamedBlock {
            name: block.name,
            bytes: block.used,
            most: block.total,
        });
        let blocks = blocks.collect();
        Ok(Self { host: host(), machine, blocks, files: shared_files(qmp)?, multifd })
    }

    /// The blocks as slots, laid end to end.
    #[must_use]
    pub fn layout(&self) -> Vec<SlotLayout> {
        let mut gpa = 0;
        let slots = self.blocks.iter().zip((0..=u16::MAX).map(SlotId));
        slots
            .map(|(block, slot)| {
                let layout = SlotLayout { slot, gpa, pages: block.pages() };
                gpa = u64::saturating_add(gpa, layout.pages * PAGE_SIZE as u64);
                layout
            })
            .collect()
    }

    /// Names and lengths in pages, in slot order.
    pub fn blocks(&self) -> impl Iterator<Item = (&str, u64)> {
        self.blocks.iter().map(|block| (block.name.as_str(), block.pages()))
    }

    /// Checks that the guest of `offered` can be received here.
    ///
    /// # Errors
    /// What differs, and what to change.
    pub fn check(&self, offered: &Self) -> Result<(), PrepareError> {
        if offered.multifd > MAX_CHANNELS {
            let text = format!(
                "the source has {} multifd channels, and {MAX_CHANNELS} can be carried at most: \
                 use fewer",
                offered.multifd
            );
            return Err(PrepareError::Incompatible(text));
        }
        if let Some(difference) = machine::difference(&offered.machine, &self.machine) {
            return Err(PrepareError::Incompatible(difference));
        }
        let alike = |ours: &StreamedBlock, theirs: &StreamedBlock| {
            (&ours.name, ours.most) == (&theirs.name, theirs.most)
        };
        let missing = |here: &Self, there: &Self| {
            let lacks = |block: &&StreamedBlock| !there.blocks.iter().any(|one| alike(one, block));
            let all: Vec<String> = here.blocks.iter().filter(lacks).map(words).collect();
            if all.is_empty() { "the rest of it".to_owned() } else { all.join(", ") }
        };
        if self.blocks.len() != offered.blocks.len()
            || !self.blocks.iter().zip(&offered.blocks).all(|(ours, theirs)| alike(ours, theirs))
        {
            let (expected, offered) = (missing(self, offered), missing(offered, self));
            return Err(PrepareError::Layout { expected, offered });
        }
        if offered.host == self.host && offered.files.iter().any(|file| self.files.contains(file)) {
            let text = "source and destination have the same memory file: give the destination a \
                        file of its own (`mem-path`)";
            return Err(PrepareError::Incompatible(text.into()));
        }
        Ok(())
    }
}

impl StreamedBlock {
    fn pages(&self) -> u64 {
        self.bytes / PAGE_SIZE as u64
    }
}

fn words(block: &StreamedBlock) -> String {
    if block.most < 1 << 20 {
        return format!("{} of {} KiB", block.name, block.most >> 10);
    }
    format!("{} of {} MiB", block.name, block.most >> 20)
}

/// The files of memory backends that are shared (`share=on`).
fn shared_files(qmp: &mut Qmp) -> Result<Vec<(u64, u64)>, QmpError> {
    let backends = qmp.execute("query-memdev", json!({}))?;
    let mut files = Vec::new();
    let shared = backends.as_array().into_iter().flatten().filter(|one| one["share"] == true);
    for id in shared.filter_map(|one| one["id"].as_str()) {
        let property = json!({ "path": format!("/objects/{id}"), "property": "mem-path" });
        // A memfd has none, and a file may not be visible to this process.
        let path = match qmp.execute("qom-get", property) {
            Ok(Value::String(path)) => path,
            Ok(_) | Err(QmpError::Refused { .. }) => continue,
            Err(error) => return Err(error),
        };
        if let Ok(metadata) = std::fs::metadata(path) {
            files.push((metadata.dev(), metadata.ino()));
        }
    }
    Ok(files)
}

/// The guest's identity and description, as the engine sends them to the destination.
pub fn describe(
    identity: &GuestIdentity,
    own: &Description,
    additions: &Additions,
    post_copy: bool,
) -> vmferry::GuestDescription {
    let mut config = json!(own);
    additions.add_to(&mut config);
    if post_copy {
        newer::add_optional(&mut config, POST_COPY, &true);
    }
    vmferry::GuestDescription {
        identity: identity.clone(),
        vmm: super::VMM.into(),
        config: config.to_string().into_bytes(),
        layout: own.layout(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_channels_than_lanes_are_refused() {
        let of = |multifd| Description {
            host: "here".into(),
            machine: Machine::default(),
            blocks: Vec::new(),
            files: Vec::new(),
            multifd,
        };
        assert!(of(0).check(&of(MAX_CHANNELS)).is_ok());
        for multifd in [MAX_CHANNELS + 1, u8::MAX] {
            let error = of(0).check(&of(multifd)).unwrap_err().to_string();
            let says = format!("{multifd} multifd channels, and 15 can be carried at most");
            assert!(error.contains(&says), "{error}");
        }
    }
}
