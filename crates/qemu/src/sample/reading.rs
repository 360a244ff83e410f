//! Reading blocks of the images that a QEMU has open.
//!
//! Each host must read what is stored, and not what it has cached: the page cache of a host that
//! had the image open before may be older than the storage. So blocks are read with `O_DIRECT`
//! where the file system has it, and elsewhere the cached pages are dropped first.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use rustix::fs::Advice;
use serde::{Deserialize, Serialize};
use vmferry_memory::stream_hash;

use crate::error::QemuError;
use crate::inventory::is_named;

/// The size of a block. Reading 16 KiB costs hardly more than 4 KiB.
pub const BLOCK_BYTES: usize = 16 << 10;

/// The alignment that `O_DIRECT` needs: the largest sector of a disk.
const SECTOR_BYTES: usize = 4096;

/// Storage over a network answers a read in 0.1 to 1 ms, and many at once in the same time.
const READERS: usize = 8;

/// How long the storage may take for all blocks. The guest is paused meanwhile.
const PATIENCE: Duration = Duration::from_secs(2);

/// Blocks of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageBlocks {
    /// The image's file, as QEMU names it.
    pub file: String,
    /// Offsets in the file in bytes, multiples of 16 KiB.
    pub offsets: Vec<u64>,
}

/// A block that was to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Block {
    /// Its hash. The file's last block may be shorter than the others.
    Hash(u64),
    /// The file ends before it.
    Missing,
    /// It could not be read, or not in time.
    Failed,
}

/// Reads blocks of images that a process has open. An image that it does not have open, or that
/// can't be opened again, is `None`.
///
/// # Errors
/// If the process's open files can't be listed.
pub fn read(pid: u32, images: &[ImageBlocks]) -> Result<Vec<Option<Vec<Block>>>, QemuError> {
    let action = "list the open files";
    let files = open_all(pid, images.iter().map(|image| image.file.as_str()))
        .map_err(|source| QemuError::Process { action, pid, source })?;
    let mut jobs = Vec::new();
    for (image, file) in files.iter().enumerate() {
        let offsets = file.iter().flat_map(|_| images[image].offsets.iter().enumerate());
        jobs.extend(offsets.map(|(number, &offset)| Job { image, number, offset }));
    }
    let mut blocks: Vec<Option<Vec<Block>>> = Vec::new();
    for (image, file) in images.iter().zip(&files) {
        blocks.push(file.as_ref().map(|_| vec![Block::Failed; image.offsets.len()]));
    }
    let readers = jobs.len().min(READERS);
    let work = Arc::new(Work { files, jobs, next: AtomicUsize::new(0) });
    let (done, results) = channel();
    for _ in 0..readers {
        let (work, done) = (Arc::clone(&work), done.clone());
        // Not joined: storage that does not answer holds its reader for as long as it likes.
        std::thread::Builder::new()
            .name("sample".into())
            .spawn(move || work.run(&done))
            .map_err(|source| QemuError::Local { action: "start a thread", source })?;
    }
    drop(done);
    let end = Instant::now() + PATIENCE;
    while let Ok((job, block)) = results.recv_timeout(end.saturating_duration_since(Instant::now()))
    {
        if let Some(blocks) = &mut blocks[job.image] {
            blocks[job.number] = block;
        }
    }
    Ok(blocks)
}

/// Opens the images of these names that a process has open.
///
/// # Errors
/// If the process's open files can't be listed.
pub(super) fn open_all<'a>(
    pid: u32,
    names: impl Iterator<Item = &'a str>,
) -> io::Result<Vec<Option<File>>> {
    let directory = std::fs::read_link(format!("/proc/{pid}/cwd"))?;
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?.path();
        // A descriptor may be closed meanwhile.
        if let Ok(path) = std::fs::read_link(&entry) {
            paths.push((entry, path));
        }
    }
    let open_one = |name: &str| {
        let mut found = paths.iter().filter(|(_, path)| is_named(path, name, &directory));
        found.find_map(|(entry, _)| open(entry).ok())
    };
    Ok(names.map(open_one).collect())
}

/// Opens an image for reading without the page cache, if that is possible.
fn open(entry: &PathBuf) -> io::Result<File> {
    use std::os::unix::fs::FileTypeExt;
    let kind = std::fs::metadata(entry)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut options = File::options();
    options.read(true);
    match options.clone().custom_flags(libc::O_DIRECT).open(entry) {
        Ok(file) => Ok(file),
        Err(_) => {
            let file = options.open(entry)?;
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
            Ok(file)
        }
    }
}

/// A block to be read.
#[derive(Clone, Copy)]
struct Job {
    image: usize,
    /// Its place among the image's blocks.
    number: usize,
    offset: u64,
}

/// What the readers share.
struct Work {
    files: Vec<Option<File>>,
    jobs: Vec<Job>,
    next: AtomicUsize,
}

impl Work {
    fn run(&self, done: &Sender<(Job, Block)>) {
        let mut buffer = Buffer::new();
        while let Some(job) = self.jobs.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let file = self.files[job.image].as_ref();
            let block = match file.map(|file| buffer.read(file, job.offset)) {
                Some(Ok([])) => Block::Missing,
                Some(Ok(bytes)) => Block::Hash(stream_hash(bytes, job.offset)),
                Some(Err(_)) | None => Block::Failed,
            };
            if done.send((*job, block)).is_err() {
                return;
            }
        }
    }
}

/// Memory that is aligned for `O_DIRECT`.
pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    pub(super) fn new() -> Self {
        let bytes = vec![0; BLOCK_BYTES + SECTOR_BYTES];
        let start = bytes.as_ptr().align_offset(SECTOR_BYTES);
        Self { bytes, start }
    }

    /// Reads a block. The result is shorter at the end of the file, and empty beyond.
    pub(super) fn read(&mut self, file: &File, offset: u64) -> io::Result<&[u8]> {
        let block = &mut self.bytes[self.start..][..BLOCK_BYTES];
        let mut filled = 0;
        while filled < BLOCK_BYTES {
            match file.read_at(&mut block[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // With O_DIRECT, the read after a short one at the end of the file is not aligned.
                Err(error) if filled > 0 && error.kind() == io::ErrorKind::InvalidInput => break,
                Err(error) => return Err(error),
            }
        }
        Ok(&block[..filled])
    }
}
