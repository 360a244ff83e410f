//! Mapping new guest memory through `vm-memory`.

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::mm::Advice;
use serde::{Deserialize, Serialize};
use vm_memory::bitmap::{Bitmap, NewBitmap};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use crate::error::MemoryError;
use crate::huge;
use crate::layout;
use crate::slots::{Backing, GuestMemory};
use crate::units::{PAGE_SIZE, SlotId, SlotLayout};

/// What guest memory consists of.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    strum::Display,
    strum::EnumString,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_kind)]
pub enum MemoryKind {
    /// Private anonymous memory in 4 KiB pages.
    #[default]
    Private,
    /// A memfd, mapped shared: another process can map it too.
    Memfd,
    /// Private anonymous memory with transparent huge pages enabled by `madvise`.
    Thp,
    /// A memfd of the host's reserved huge pages of 2 MiB (hugetlbfs), mapped shared.
    Hugetlb,
}

fn unknown_kind(text: &str) -> String {
    format!("`{text}` is no kind of memory: choose private, memfd, thp or hugetlb")
}

/// Maps zeroed, unpopulated memory for a layout. `B` is `vm-memory`'s dirty bitmap, `()` for none.
///
/// Nothing is reserved (`MAP_NORESERVE`): a guest may be larger than the host's free memory as long
/// as it does not touch all of its own. Only huge pages of hugetlbfs are reserved.
///
/// # Errors
/// A bad layout, too few huge pages, or an error from the system.
pub fn map_slots<B>(
    layout: &[SlotLayout],
    kind: MemoryKind,
) -> Result<Arc<GuestMemoryMmap<B>>, MemoryError>
where
    B: Bitmap + NewBitmap + Send + Sync + 'static,
{
    layout::check(layout)?;
    let mut regions = Vec::with_capacity(layout.len());
    for (index, slot) in layout.iter().enumerate() {
        let bytes = slot.pages * PAGE_SIZE as u64;
        if kind == MemoryKind::Hugetlb {
            huge::check_slot(slot)?;
        }
        let refused = |source: io::Error| MemoryError::Map { slot: slot.slot, bytes, source };
        let mut builder =
            MmapRegionBuilder::new_with_bitmap(bytes as usize, B::with_len(bytes as usize))
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
        builder = match kind {
            MemoryKind::Memfd => builder
                .with_file_offset(FileOffset::new(memfd(slot.slot, bytes).map_err(refused)?, 0))
                .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE),
            MemoryKind::Hugetlb => {
                let file = huge::memfd(slot.slot, bytes).map_err(refused)?;
                builder.with_file_offset(FileOffset::new(file, 0)).with_mmap_flags(libc::MAP_SHARED)
            }
            MemoryKind::Private | MemoryKind::Thp => builder
                .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE),
        };
        let mapping = builder.build().map_err(|error| match kind {
            MemoryKind::Hugetlb => huge::too_few(&layout[index..], io::Error::other(error)),
            _ => refused(io::Error::other(error)),
        })?;
        keep_out_of_dumps(&mapping).map_err(refused)?;
        if kind == MemoryKind::Thp {
            advise(&mapping, Advice::LinuxHugepage).map_err(refused)?;
        }
        let region = GuestRegionMmap::new(mapping, GuestAddress(slot.gpa)).ok_or_else(|| {
            MemoryError::Layout(format!("{} reaches beyond the address space", slot.slot))
        })?;
        regions.push(region);
    }
    let memory = GuestMemoryMmap::from_regions(regions)
        .map_err(|error| MemoryError::Layout(error.to_string()))?;
    Ok(Arc::new(memory))
}

impl GuestMemory {
    /// Maps zeroed, unpopulated memory for a layout; see [`map_slots`].
    ///
    /// # Errors
    /// A bad layout, or an error from the system.
    pub fn allocate(layout: &[SlotLayout], kind: MemoryKind) -> Result<Self, MemoryError> {
        Self::from_vm_memory(&map_slots::<()>(layout, kind)?)
    }
}

impl GuestMemory {
    /// Maps the files of slots that another process has mapped too. Each element of `files` is the
    /// layout of a slot, its file, open for reading and writing, and the offset in bytes at which
    /// the slot begins in the file.
    ///
    /// # Errors
    /// A bad layout, or an error from the system.
    pub fn map_files(files: Vec<(SlotLayout, File, u64)>) -> Result<Self, MemoryError> {
        let layout: Vec<SlotLayout> = files.iter().map(|(slot, ..)| *slot).collect();
        layout::check(&layout)?;
        let mut regions = Vec::with_capacity(files.len());
        for (slot, file, offset) in files {
            let bytes = slot.pages * PAGE_SIZE as u64;
            let mapping = MmapRegionBuilder::<()>::new(bytes as usize)
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_file_offset(FileOffset::new(file, offset))
                .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
                .build()
                .map_err(|error| MemoryError::Map {
                    slot: slot.slot,
                    bytes,
                    source: io::Error::other(error),
                })?;
            keep_out_of_dumps(&mapping).map_err(|source| MemoryError::Map {
                slot: slot.slot,
                bytes,
                source,
            })?;
            let region =
                GuestRegionMmap::new(mapping, GuestAddress(slot.gpa)).ok_or_else(|| {
                    MemoryError::Layout(format!("{} reaches beyond the address space", slot.slot))
                })?;
            regions.push(region);
        }
        let memory = GuestMemoryMmap::from_regions(regions)
            .map_err(|error| MemoryError::Layout(error.to_string()))?;
        Self::from_vm_memory(&Arc::new(memory))
    }
}

impl GuestMemory {
    /// Maps the files of all slots a second time, at other addresses of this process. What is
    /// written there is in the guest's memory, too.
    ///
    /// # Errors
    /// Private memory, or an error from the system.
    pub fn map_again(&self) -> Result<Self, MemoryError> {
        let files = self.slots().iter().map(|slot| {
            let file = match slot.backing() {
                Backing::Private => Err(io::ErrorKind::Unsupported.into()),
                Backing::File { file, offset } => file.try_clone().map(|file| (file, *offset)),
            };
            let what = "mapping the file";
            let failed = |source| MemoryError::Slot { what, slot: slot.id(), source };
            file.map(|(file, offset)| (slot.layout(), file, offset)).map_err(failed)
        });
        Self::map_files(files.collect::<Result<_, _>>()?)
    }
}

/// Excludes guest memory from core dumps of this process, regardless of what triggers the dump.
fn keep_out_of_dumps<B: Bitmap>(mapping: &MmapRegion<B>) -> io::Result<()> {
    advise(mapping, Advice::LinuxDontDump)
}

fn advise<B: Bitmap>(mapping: &MmapRegion<B>, advice: Advice) -> io::Result<()> {
    // SAFETY: the range is a whole mapping that was just created; neither advice changes its
    // content.
    unsafe { rustix::mm::madvise(mapping.as_ptr().cast(), mapping.size(), advice) }?;
    Ok(())
}

fn memfd(slot: SlotId, bytes: u64) -> io::Result<File> {
    let name = format!("vmferry-slot-{}", slot.0);
    let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, bytes)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(slot: u16, gpa: u64, pages: u64) -> SlotLayout {
        SlotLayout { slot: SlotId(slot), gpa, pages }
    }

    #[test]
    fn invalid_layouts_are_refused_by_name() {
        let cases = [
            (vec![], "no slots"),
            (vec![slot(1, 0, 1)], "slot 1 is in the place of slot 0"),
            (vec![slot(0, 0, 0)], "slot 0 is empty"),
            (vec![slot(0, 12, 1)], "not at a page"),
            (vec![slot(0, 0, 2), slot(1, 4096, 1)], "slot 1 overlaps"),
            (vec![slot(0, 0, u64::MAX)], "beyond the address space"),
            (vec![slot(0, 0, u64::MAX / 4096)], "beyond the address space"),
        ];
        for (layout, expected) in cases {
            let error = GuestMemory::allocate(&layout, MemoryKind::Private).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn memory_kinds_round_trip_as_text() {
        for kind in [MemoryKind::Private, MemoryKind::Memfd, MemoryKind::Thp, MemoryKind::Hugetlb] {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert!("huge".parse::<MemoryKind>().unwrap_err().contains("choose private"));
    }
}
