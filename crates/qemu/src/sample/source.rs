//! The source's side: it chooses blocks while the guest runs, and reads them while it is paused.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use vmferry::vmm::storage::SourceStorage;
use vmferry_handover::SessionId;
use vmferry_wire::MAX_STORAGE_SAMPLE_BYTES;

use super::choice::{Look, choose, length};
use super::reading::{BLOCK_BYTES, Block, ImageBlocks, open_all, read};
use super::{MAX_IMAGES, Sample, SampledImage, has_tables};
use crate::inventory::Disk;

/// Blocks of all images together: 1 MiB, or 256 pages. docs/performance.md has their cost.
const BLOCKS: usize = 64;

/// Fewest blocks of an image.
const FEWEST: usize = 8;

/// How long the sample is waited for. It is left out then.
const PATIENCE: Duration = Duration::from_secs(2);

/// Samples the disks of a QEMU.
pub struct Sampler {
    pid: u32,
    images: Vec<Image>,
    /// The session needs a sample.
    is_wanted: bool,
    seed: u64,
    /// The blocks of each image, as soon as they are chosen.
    choosing: Option<Receiver<Vec<Vec<u64>>>>,
    /// The images without tables, whose blocks are read since the pause.
    reading: Option<Receiver<Vec<SampledImage>>>,
    /// QEMU may still write the tables of its formats when the sample is read.
    tables_may_change: bool,
}

/// An image of a disk.
#[derive(Clone)]
struct Image {
    sampled: SampledImage,
    /// QEMU writes tables into it, and not only what the guest writes.
    has_tables: bool,
    /// Offsets of blocks in bytes; empty until they are chosen.
    chosen: Vec<u64>,
}

impl Sampler {
    /// Samples these disks of a process, in a session that begins later.
    #[must_use]
    pub fn new(pid: u32, disks: &[Disk]) -> Self {
        let mut images = Vec::new();
        for disk in disks {
            let Some(medium) = &disk.medium else { continue };
            images.extend(medium.layers.iter().enumerate().map(|(layer, file)| Image {
                sampled: SampledImage {
                    device: disk.device.clone(),
                    name: disk.name.clone(),
                    layer,
                    file: file.clone(),
                    blocks: Vec::new(),
                },
                has_tables: layer == 0 && has_tables(medium),
                chosen: Vec::new(),
            }));
        }
        images.truncate(MAX_IMAGES);
        Self {
            pid,
            images,
            is_wanted: false,
            seed: 0,
            choosing: None,
            reading: None,
            tables_may_change: false,
        }
    }

    /// Leaves out images with tables: QEMU's own post-copy ends its writes to them only after it
    /// was told to finish, and does not say when.
    pub fn tables_may_change(&mut self) {
        self.tables_may_change = true;
    }

    /// The guest is paused, and QEMU has written everything but tables. What can be read now is
    /// read while QEMU saves its state.
    pub fn begin(&mut self) {
        if !self.is_wanted {
            return;
        }
        if let Some(chosen) = self.choosing.as_ref().and_then(|chosen| chosen.try_recv().ok()) {
            for (image, chosen) in self.images.iter_mut().zip(chosen) {
                image.chosen = chosen;
            }
        }
        let images = self.images.iter().filter(|image| !image.has_tables).cloned().collect();
        self.reading = Some(self.read_beside(images));
    }

    fn share(&self) -> usize {
        (BLOCKS / self.images.len().max(1)).max(FEWEST)
    }

    /// Reads blocks of images in a thread. Storage that does not answer must not hold this one.
    fn read_beside(&self, images: Vec<Image>) -> Receiver<Vec<SampledImage>> {
        let (pid, seed, share) = (self.pid, self.seed, self.share());
        let (tell, read) = channel();
        // Without the thread there is no sample.
        let _ = std::thread::Builder::new().name("sample".into()).spawn(move || {
            // A migration that has ended needs it no more.
            let _ = tell.send(read_images(pid, images, share, seed));
        });
        read
    }
}

/// Reads blocks of images. Those that can't be read are left out.
fn read_images(pid: u32, images: Vec<Image>, share: usize, seed: u64) -> Vec<SampledImage> {
    let names = images.iter().map(|image| image.sampled.file.as_str());
    let files = open_all(pid, names).unwrap_or_default();
    let mut random = fastrand::Rng::with_seed(seed);
    let plan = images.iter().zip(files).map(|(image, file)| {
        let mut offsets = image.chosen.clone();
        if let Some(file) = file {
            if offsets.is_empty() {
                offsets = choose(&file, share, &mut random, Look::Nowhere);
            }
            // The last block too: a copy of an image that grows is shorter.
            let last = length(&file).and_then(|bytes| bytes.checked_sub(1));
            let last = last.map(|last| last / BLOCK_BYTES as u64 * BLOCK_BYTES as u64);
            offsets.extend(last.filter(|last| !offsets.contains(last)));
        }
        ImageBlocks { file: image.sampled.file.clone(), offsets }
    });
    let plan: Vec<_> = plan.collect();
    let Ok(read) = read(pid, &plan) else { return Vec::new() };
    let mut sampled = Vec::new();
    for ((image, plan), blocks) in images.into_iter().zip(plan).zip(read) {
        let blocks = plan.offsets.into_iter().zip(blocks.unwrap_or_default());
        let blocks = blocks.filter_map(|(offset, block)| match block {
            Block::Hash(hash) => Some((offset, hash)),
            Block::Missing | Block::Failed => None,
        });
        let blocks: Vec<_> = blocks.collect();
        if !blocks.is_empty() {
            sampled.push(SampledImage { blocks, ..image.sampled });
        }
    }
    sampled
}

/// The sample, without the last images if it would be too long for FINAL: their paths can be long.
fn fitting(mut images: Vec<SampledImage>) -> Vec<u8> {
    while !images.is_empty() {
        let sample = Sample { images };
        let bytes = serde_json::to_vec(&sample).unwrap_or_default();
        if bytes.len() <= MAX_STORAGE_SAMPLE_BYTES {
            return bytes;
        }
        images = sample.images;
        images.pop();
    }
    Vec::new()
}

impl SourceStorage for Sampler {
    fn prepare(&mut self, session: SessionId) {
        let [a, b] = [0, 8].map(|at| {
            let half = session.0[at..].first_chunk().copied().unwrap_or_default();
            u64::from_le_bytes(half)
        });
        (self.is_wanted, self.seed) = (true, a ^ b);
        let (pid, share, mut random) = (self.pid, self.share(), fastrand::Rng::with_seed(a ^ b));
        let names: Vec<_> = self.images.iter().map(|image| image.sampled.file.clone()).collect();
        let (tell, choosing) = channel();
        let spawned = std::thread::Builder::new().name("sample-choice".into()).spawn(move || {
            let files = open_all(pid, names.iter().map(String::as_str)).unwrap_or_default();
            let files = files.into_iter().map(|file| {
                file.map_or_else(Vec::new, |file| choose(&file, share, &mut random, Look::ForData))
            });
            let _ = tell.send(files.collect());
        });
        // Without the thread, blocks are drawn blindly later.
        self.choosing = spawned.ok().map(|_| choosing);
    }

    fn sample(&mut self) -> Vec<u8> {
        let mut reading: Vec<_> = self.reading.take().into_iter().collect();
        let tables = self.images.iter().filter(|image| image.has_tables);
        let tables: Vec<_> = tables.filter(|_| !self.tables_may_change).cloned().collect();
        if !tables.is_empty() {
            reading.push(self.read_beside(tables));
        }
        let read = reading.into_iter().filter_map(|read| read.recv_timeout(PATIENCE).ok());
        fitting(read.flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_fits_into_final() {
        let image = |file: &str| SampledImage {
            device: "disk".into(),
            name: String::new(),
            layer: 0,
            file: file.into(),
            blocks: vec![(u64::MAX, u64::MAX); FEWEST + 1],
        };
        assert!(fitting(Vec::new()).is_empty());
        let short: Sample =
            serde_json::from_slice(&fitting(vec![image("/images/web"); MAX_IMAGES])).unwrap();
        assert_eq!(short.images.len(), MAX_IMAGES);
        let long = fitting(vec![image(&"x".repeat(4000)); MAX_IMAGES]);
        assert!(long.len() <= MAX_STORAGE_SAMPLE_BYTES);
        let long: Sample = serde_json::from_slice(&long).unwrap();
        assert!((10..MAX_IMAGES).contains(&long.images.len()), "{}", long.images.len());
    }
}
