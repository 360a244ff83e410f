//! The sample of a guest's disks: the same few blocks, read at both hosts while the guest is
//! paused.
//!
//! Two hosts may have other images under the same name: copies, or older ones. Where no name that
//! both know tells (local paths, Ceph's and other network file systems, block devices without an
//! identity), the source reads some blocks once QEMU has written everything, and sends their
//! hashes. The destination reads the same blocks before it loads the guest. Blocks are of the image
//! files, below QEMU's formats, so it does not matter what these mean.
//!
//! A sample shows that the images are not the same. It does not prove that they are.

mod choice;
mod reading;
mod source;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vmferry::vmm::told::Told;

pub use self::reading::{BLOCK_BYTES, Block, ImageBlocks, read};
pub use self::source::Sampler;
use crate::error::QemuError;
use crate::inventory::{Disk, Medium, same_device};

/// Reads blocks of the images that a process has open, from any thread. An image that it does not
/// have open is `None`.
pub type BlockReader =
    Arc<dyn Fn(u32, &[ImageBlocks]) -> Result<Vec<Option<Vec<Block>>>, QemuError> + Send + Sync>;

/// The most images of a sample.
const MAX_IMAGES: usize = 64;

/// The most blocks that a destination reads for a source.
const MAX_BLOCKS: usize = 1024;

/// The formats in which a file has the guest's bytes and nothing else, by QEMU's names.
const WITHOUT_TABLES: [&str; 3] = ["raw", "file", "host_device"];

/// Whether QEMU writes tables into an image, and not only what the guest writes. It does so until
/// it gives the image away, and again when it takes it.
pub fn has_tables(medium: &Medium) -> bool {
    !WITHOUT_TABLES.contains(&medium.format.as_str())
}

/// What the source sends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    images: Vec<SampledImage>,
}

/// An image of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SampledImage {
    /// The device, as in the inventory.
    device: String,
    /// The drive's name.
    name: String,
    /// 0 for the topmost image, and so on down the backing files.
    layer: usize,
    /// The image's file at the source.
    file: String,
    /// The offset of each block in bytes, and its hash.
    blocks: Vec<(u64, u64)>,
}

impl Sample {
    /// Compares the sample with these disks of a QEMU at the destination. Others in it are ignored.
    ///
    /// # Errors
    /// [`Told`] with the first difference; invalid samples.
    pub fn compare(
        sample: &[u8],
        disks: &[Disk],
        pid: u32,
        reader: &BlockReader,
    ) -> Result<(), vmferry::VmError> {
        let Self { images } = serde_json::from_slice(sample)?;
        let blocks = || images.iter().flat_map(|image| &image.blocks);
        let in_place = |offset: u64| {
            offset.is_multiple_of(BLOCK_BYTES as u64) && i64::try_from(offset).is_ok()
        };
        if blocks().count() > MAX_BLOCKS || blocks().any(|(offset, _)| !in_place(*offset)) {
            return Err("the source's sample of the disks has invalid blocks".into());
        }
        let found: Vec<_> =
            images.iter().filter_map(|image| Some((image, image.at(disks)?))).collect();
        let asked = found.iter().map(|(image, file)| ImageBlocks {
            file: (*file).to_owned(),
            offsets: image.blocks.iter().map(|(offset, _)| *offset).collect(),
        });
        // Of a process whose files this one may not see, nothing is known.
        let Ok(read) = reader(pid, &asked.collect::<Vec<_>>()) else { return Ok(()) };
        for ((image, file), here) in found.into_iter().zip(read) {
            let Some(here) = here else { continue };
            for ((offset, there), here) in image.blocks.iter().zip(here) {
                image.compare_block(file, *offset, *there, here)?;
            }
        }
        Ok(())
    }
}

impl SampledImage {
    /// The file of this image at the destination.
    fn at<'a>(&self, disks: &'a [Disk]) -> Option<&'a str> {
        let disk = same_device(&self.device, &self.name, disks)?;
        Some(disk.medium.as_ref()?.layers.get(self.layer)?)
    }

    fn compare_block(&self, file: &str, offset: u64, there: u64, here: Block) -> Result<(), Told> {
        let Self { device, file: theirs, .. } = self;
        match here {
            Block::Hash(here) if here == there => Ok(()),
            Block::Hash(_) | Block::Missing => Err(Told::incompatible(format!(
                "the disk `{device}` has other contents at the destination: {theirs} at the source \
                 and {file} at the destination differ in the 16 KiB at byte {offset}. They are not \
                 the same image, or the destination's is an older copy. Give the destination the \
                 same image; if the guest may go on with this one, send it with the permission \
                 that its disks differ"
            ))),
            Block::Failed => Err(Told::failed(format!(
                "the disk `{device}` can't be read at the destination: {file} at byte {offset}"
            ))),
        }
    }
}
