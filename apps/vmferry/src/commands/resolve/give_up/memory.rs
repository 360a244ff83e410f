//! Saves the memory of a stopped process that lacks pages.
//!
//! A page that is missing must not be read: the reader would wait for it. So the pages that are
//! there are found first: in the memory's file, or in the page table.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use bytesize::ByteSize;
use serde_json::{Value, json};
use vmferry_memory::pagemap::{PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PageRegion, Query, scan};
use vmferry_memory::{PAGE_SIZE, data_extents, huge_page_bytes};
use vmferry_qemu::{Mapping, open_file, pagemap, reported_mappings};

const PAGE: u64 = PAGE_SIZE as u64;

/// Bytes that are copied at a time.
const PIECE: usize = 1 << 20;

/// How often the progress is told.
const TELL_PERIOD: Duration = Duration::from_secs(1);

/// The list of what was saved.
pub const LIST: &str = "memory.json";

/// A new directory. What was written into it is removed with this value, unless it is
/// [kept](Self::keep).
pub struct Directory {
    path: PathBuf,
    kept: bool,
}

/// What was saved.
pub struct Saved {
    /// Bytes of pages that were here.
    pub bytes: u64,
    /// Pages that were not here: they were missing, or had never been written.
    pub absent_pages: u64,
}

/// A part of the guest's memory, and the pages of it that are here.
struct Region {
    /// Host-virtual addresses in the process.
    addresses: Range<u64>,
    source: File,
    /// The offset of the region in `source`.
    offset: u64,
    /// Ranges of the region that are here, in bytes from its start.
    present: Vec<Range<u64>>,
}

impl Directory {
    /// Creates it. Only its owner can read it: guests keep secrets in their memory.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let created = DirBuilder::new().mode(0o700).create(path);
        created
            .with_context(|| format!("--dump needs a new directory, and not {}", path.display()))?;
        Ok(Self { path: path.to_owned(), kept: false })
    }

    /// Keeps what was written.
    pub fn keep(mut self) {
        self.kept = true;
    }

    fn file(&self, name: &str) -> anyhow::Result<File> {
        let path = self.path.join(name);
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(&path);
        file.with_context(|| format!("create {}", path.display()))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if !self.kept {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Saves all memory of the process of which pages are reported missing: a sparse file for each
/// region, and a list of them with what `about` says. `tell` is told the bytes that are written,
/// and those of all.
pub fn save(
    pid: u32,
    directory: &Directory,
    about: &Value,
    tell: &mut dyn FnMut(u64, u64),
) -> anyhow::Result<Saved> {
    let mappings = reported_mappings(pid)?;
    anyhow::ensure!(!mappings.is_empty(), "no memory of process {pid} is reported missing");
    let regions: Vec<Region> =
        mappings.iter().map(|mapping| Region::find(pid, mapping)).collect::<anyhow::Result<_>>()?;
    let all = regions.iter().map(Region::present_bytes).sum();
    must_have_room(&directory.path, all)?;
    let (mut saved, mut told) = (Saved { bytes: 0, absent_pages: 0 }, Instant::now());
    let mut listed = Vec::new();
    for (number, region) in regions.iter().enumerate() {
        let name = format!("memory-{number}.raw");
        let file = directory.file(&name)?;
        let failed = || format!("write {}", directory.path.join(&name).display());
        file.set_len(region.bytes()).with_context(failed)?;
        region.copy(&file, &mut |bytes| {
            saved.bytes += bytes;
            if told.elapsed() >= TELL_PERIOD {
                told = Instant::now();
                tell(saved.bytes, all);
            }
        })?;
        file.sync_all().with_context(failed)?;
        let absent = region.absent_pages();
        saved.absent_pages += absent.iter().map(|[_, pages]| pages).sum::<u64>();
        listed.push(json!({
            "file": name, "bytes": region.bytes(), "absent_pages": absent,
            "address": format!("{:#x}", region.addresses.start),
        }));
    }
    let list = json!({ "about": about, "page_bytes": PAGE, "regions": listed });
    let mut file = BufWriter::new(directory.file(LIST)?);
    let written = serde_json::to_writer(&mut file, &list).map_err(std::io::Error::from);
    let synced = written.and_then(|()| file.flush()).and_then(|()| file.get_ref().sync_all());
    synced.with_context(|| format!("write {}", directory.path.join(LIST).display()))?;
    Ok(saved)
}

fn must_have_room(directory: &Path, bytes: u64) -> anyhow::Result<()> {
    let system = rustix::fs::statvfs(directory).context("look at the room of --dump")?;
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    anyhow::ensure!(
        free > bytes,
        "the memory that is here is {}, and {} has room for {}",
        ByteSize(bytes),
        directory.display(),
        ByteSize(free)
    );
    Ok(())
}

impl Region {
    fn find(pid: u32, mapping: &Mapping) -> anyhow::Result<Self> {
        let (addresses, length) = (mapping.range.clone(), mapping.range.end - mapping.range.start);
        if let Some(source) = file_of(pid, mapping) {
            let offset = mapping.offset;
            let mut present = Vec::new();
            data_extents(&source, offset..offset + length, |extent| {
                present.push(extent.start - offset..extent.end - offset);
            })
            .context("find the pages of the memory file")?;
            return Ok(Self { addresses, source, offset, present });
        }
        let source = File::open(format!("/proc/{pid}/mem"));
        let source = source.with_context(|| format!("open the memory of process {pid}"))?;
        let present = in_page_table(pid, &addresses)?;
        Ok(Self { offset: addresses.start, addresses, source, present })
    }

    fn bytes(&self) -> u64 {
        self.addresses.end - self.addresses.start
    }

    fn present_bytes(&self) -> u64 {
        self.present.iter().map(|range| range.end - range.start).sum()
    }

    /// First page and number of each run of pages that is not here.
    fn absent_pages(&self) -> Vec<[u64; 2]> {
        let ends = self.present.iter().map(|range| range.end);
        let starts = self.present.iter().map(|range| range.start);
        let gaps = std::iter::once(0).chain(ends).zip(starts.chain([self.bytes()]));
        let runs = gaps.map(|(start, end)| [start / PAGE, end.saturating_sub(start) / PAGE]);
        runs.filter(|[_, pages]| *pages > 0).collect()
    }

    /// Copies what is here, and tells `copied` the bytes of each piece.
    fn copy(&self, to: &File, copied: &mut dyn FnMut(u64)) -> anyhow::Result<()> {
        let mut piece = vec![0; PIECE];
        for range in &self.present {
            let mut at = range.start;
            while at < range.end {
                let length = (range.end - at).min(PIECE as u64);
                let piece = &mut piece[..length as usize];
                let read = self.source.read_exact_at(piece, self.offset + at);
                read.context("read the guest's memory")?;
                to.write_all_at(piece, at).context("write the guest's memory")?;
                copied(length);
                at += length;
            }
        }
        Ok(())
    }
}

/// The file of shared memory, whose pages may be there without being in the page table. `None` for
/// private memory, and on hugetlbfs, which does not tell what is there.
fn file_of(pid: u32, mapping: &Mapping) -> Option<File> {
    if !mapping.shared {
        return None;
    }
    let Range { start, end } = mapping.range;
    let file = open_file(pid, mapping)
        .ok()
        .or_else(|| File::open(format!("/proc/{pid}/map_files/{start:x}-{end:x}")).ok())?;
    let is_huge = huge_page_bytes(&file).ok()?.is_some();
    (!is_huge).then_some(file)
}

/// The ranges of these addresses that are in memory or in swap, in bytes from the first one.
fn in_page_table(pid: u32, addresses: &Range<u64>) -> anyhow::Result<Vec<Range<u64>>> {
    let query = Query { any: PAGE_IS_PRESENT | PAGE_IS_SWAPPED, ..Query::default() };
    let mut regions = [PageRegion::default(); 256];
    let mut present = Vec::new();
    scan(&pagemap(pid)?, addresses.clone(), query, &mut regions, |region| {
        present.push(region.start - addresses.start..region.end - addresses.start);
    })
    .with_context(|| {
        format!("find the pages of process {pid} (for private memory, from Linux 6.7 on)")
    })?;
    Ok(present)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(present: Vec<Range<u64>>) -> Region {
        let source = File::open("/dev/null").unwrap();
        Region { addresses: 0x1000 * PAGE..0x1010 * PAGE, source, offset: 0, present }
    }

    #[test]
    fn pages_are_here_or_absent() {
        assert_eq!(region(vec![]).absent_pages(), [[0, 16]]);
        assert!(region(vec![0..PAGE, PAGE..16 * PAGE]).absent_pages().is_empty());
        let some = region(vec![PAGE..2 * PAGE, 5 * PAGE..16 * PAGE]);
        assert_eq!(some.absent_pages(), [[0, 1], [2, 3]]);
        assert_eq!(some.present_bytes(), 12 * PAGE);
    }

    #[test]
    fn page_table_tells_which_pages_of_this_process_are_here() {
        let mut memory = vec![0_u8; 64 * PAGE_SIZE];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE);
        let offset = (start - memory.as_ptr() as u64) as usize;
        memory[offset + 3 * PAGE_SIZE] = 7;
        let present = in_page_table(std::process::id(), &(start..start + 32 * PAGE)).unwrap();
        let page = 3 * PAGE..4 * PAGE;
        let has = |range: &Range<u64>| range.start <= page.start && page.end <= range.end;
        assert!(present.iter().any(has), "{present:?}");
    }

    #[test]
    fn directory_is_private_and_removed_unless_kept() {
        use std::os::unix::fs::PermissionsExt;
        let outer = tempfile::tempdir().unwrap();
        let path = outer.path().join("dump");
        let directory = Directory::create(&path).unwrap();
        directory.file("memory-0.raw").unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(Directory::create(&path).is_err(), "it must be new");
        drop(directory);
        assert!(!path.exists());
        Directory::create(&path).unwrap().keep();
        assert!(path.exists());
    }
}
