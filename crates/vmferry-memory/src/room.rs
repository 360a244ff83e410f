//! How much memory there is for a guest, and where: on a tmpfs, among the huge pages, in the
//! control group, on the host.
//!
//! What is found is an upper bound, so that a guest that fits is never refused: pages of huge pages
//! that are promised to others count as free, and so do caches and swap. Nothing is reserved, so
//! that a guest that seemed to fit may still not.
//!
//! Sources: Linux `Documentation/filesystems/tmpfs.rst`, `proc.rst` (`MemAvailable`),
//! `admin-guide/mm/hugetlbpage.rst`, `admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst`.

mod group;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use crate::huge::huge_page_bytes;
use crate::slots::{Backing, GuestMemory, Slot};

/// `f_type` of tmpfs, and of a memfd (`linux/magic.h`).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// A place where memory is taken from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The file system of a file: a tmpfs, usually.
    FileSystem {
        /// A file on it.
        path: PathBuf,
        /// Its size in bytes.
        total_bytes: u64,
    },
    /// The host's pool of huge pages.
    HugePages {
        /// Bytes of each.
        page_bytes: u64,
        /// The file that is made of them.
        path: PathBuf,
    },
    /// A control group of this process.
    ControlGroup {
        /// Its directory.
        path: PathBuf,
        /// Its limit in bytes.
        limit_bytes: u64,
    },
    /// The host's memory and swap.
    Host,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FileSystem { path, total_bytes } => {
                let (path, total) = (path.display(), Bytes(*total_bytes));
                write!(f, "the file system of {path} ({total})")
            }
            Self::HugePages { page_bytes, path } => {
                let (path, page) = (path.display(), Bytes(*page_bytes));
                write!(f, "the host's pool of huge pages of {page}, for {path},")
            }
            Self::ControlGroup { path, limit_bytes } => {
                let (path, limit) = (path.display(), Bytes(*limit_bytes));
                write!(f, "the control group {path} (limit {limit})")
            }
            Self::Host => f.write_str("this host's memory and swap"),
        }
    }
}

/// A guest that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the guest uses {} of memory, and {place} has room for {}",
    Bytes(*needed_bytes),
    Bytes(*free_bytes)
)]
pub struct Shortage {
    /// Bytes that the guest needs there.
    pub needed_bytes: u64,
    /// Bytes that there are.
    pub free_bytes: u64,
    /// Where.
    pub place: Place,
}

/// A place, and what there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Where.
    pub place: Place,
    /// Bytes that can be had there, with those that the slot has already.
    pub free_bytes: u64,
    /// What tells places of the same kind apart.
    id: u64,
}

/// Bytes for people.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..0x10_0000 => write!(f, "{:.0} KiB", bytes / 1024.0),
            0x10_0000..0x4000_0000 => write!(f, "{:.1} MiB", bytes / f64::from(1 << 20)),
            _ => write!(f, "{:.1} GiB", bytes / f64::from(1 << 30)),
        }
    }
}

impl GuestMemory {
    /// Makes sure that there is room for this number of bytes in each slot, as far as they are
    /// known. What cannot be found out is taken for enough.
    ///
    /// # Errors
    /// The first place that has too little.
    pub fn check_room(&self, needed_bytes: &[Option<u64>]) -> Result<(), Shortage> {
        let mut rooms: Vec<(Room, u64)> = Vec::new();
        for (slot, needed) in self.slots().iter().zip(needed_bytes) {
            let needed = needed.unwrap_or_default().min(slot.len_bytes() as u64);
            for room in slot.rooms() {
                let same = rooms.iter_mut().find(|(known, _)| known.is_at(&room));
                if let Some((known, all)) = same {
                    known.free_bytes += room.own_bytes;
                    *all += needed;
                } else {
                    let SlotRoom { mut room, own_bytes } = room;
                    room.free_bytes += own_bytes;
                    rooms.push((room, needed));
                }
            }
        }
        let short = rooms.into_iter().find(|(room, needed)| *needed > room.free_bytes);
        short.map_or(Ok(()), |(Room { place, free_bytes, .. }, needed_bytes)| {
            Err(Shortage { needed_bytes, free_bytes, place })
        })
    }
}

/// A place that a slot takes its memory from, and what it has of it.
struct SlotRoom {
    room: Room,
    own_bytes: u64,
}

impl Room {
    fn is_at(&self, other: &SlotRoom) -> bool {
        let same_kind =
            std::mem::discriminant(&self.place) == std::mem::discriminant(&other.room.place);
        same_kind && self.id == other.room.id
    }
}

impl Slot {
    /// Where the slot's pages come from.
    fn rooms(&self) -> Vec<SlotRoom> {
        let (mut rooms, mut own_bytes) = (Vec::new(), 0);
        if let Backing::File { file, .. } = self.backing() {
            own_bytes = file.metadata().map_or(0, |metadata| metadata.blocks() * BLOCK_BYTES);
            if let Ok(Some(room)) = room_of(file) {
                rooms.push(SlotRoom { room, own_bytes });
            }
            if !is_in_memory(file) {
                return rooms;
            }
        }
        let id = 0;
        if let Some((path, limit_bytes, free_bytes)) = group::tightest() {
            let place = Place::ControlGroup { path, limit_bytes };
            rooms.push(SlotRoom { room: Room { place, free_bytes, id }, own_bytes });
        }
        if let Some(free_bytes) = host_bytes() {
            let place = Place::Host;
            rooms.push(SlotRoom { room: Room { place, free_bytes, id }, own_bytes });
        }
        rooms
    }

    /// The place that a slot could get no page from, for an error; `None` if nobody knows.
    pub(crate) fn fullest(&self) -> Option<Room> {
        let rooms = self.rooms().into_iter().map(|room| room.room);
        rooms.min_by_key(|room| room.free_bytes)
    }
}

/// Whether a file's pages are taken from the host's memory and this process's control group. Huge
/// pages are set apart, and the pages of a file on a disk can be written back to it.
fn is_in_memory(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|stat| stat.f_type == TMPFS_MAGIC)
}

/// What the file system of a file has; `None` if it has no bound of its own.
fn room_of(file: &File) -> io::Result<Option<Room>> {
    let id = file.metadata()?.dev();
    // The name is for people: a file may have none.
    let path =
        std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
    if let Some(page_bytes) = huge_page_bytes(file)? {
        let pool =
            format!("/sys/kernel/mm/hugepages/hugepages-{}kB/free_hugepages", page_bytes >> 10);
        let Some(free) = number(&std::fs::read_to_string(pool)?) else { return Ok(None) };
        let place = Place::HugePages { page_bytes, path };
        return Ok(Some(Room { place, free_bytes: free * page_bytes, id: page_bytes }));
    }
    let stat = rustix::fs::fstatfs(file)?;
    let block_bytes = u64::try_from(stat.f_bsize).unwrap_or_default();
    let total_bytes = stat.f_blocks.saturating_mul(block_bytes);
    // A memfd's file system, and a tmpfs of `size=0`.
    if total_bytes == 0 {
        return Ok(None);
    }
    let free_bytes = stat.f_bavail.saturating_mul(block_bytes);
    Ok(Some(Room { place: Place::FileSystem { path, total_bytes }, free_bytes, id }))
}

/// Memory that the host could give without killing anything, with swap.
fn host_bytes() -> Option<u64> {
    Some(meminfo("MemAvailable:")? + meminfo("SwapFree:").unwrap_or_default())
}

/// A figure of `/proc/meminfo`, in bytes.
fn meminfo(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(number(line.trim().strip_suffix("kB")?)? << 10)
}

fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryKind, SlotId, SlotLayout};

    fn memory(kind: MemoryKind) -> GuestMemory {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 1 << 28 }];
        GuestMemory::allocate(&layout, kind).unwrap()
    }

    #[test]
    fn check_room_refuses_what_the_host_does_not_have_and_nothing_else() {
        for kind in [MemoryKind::Private, MemoryKind::Memfd] {
            let memory = memory(kind);
            assert_eq!(memory.check_room(&[Some(1 << 20)]), Ok(()));
            assert_eq!(memory.check_room(&[None]), Ok(()), "a guest that does not say");
            assert_eq!(memory.check_room(&[]), Ok(()));
            // No machine has a TiB for a test.
            let shortage = memory.check_room(&[Some(1 << 40)]).unwrap_err();
            assert_eq!(shortage.needed_bytes, 1 << 40, "{shortage}");
            assert!(shortage.free_bytes > 1 << 20, "{shortage}");
            assert!(shortage.to_string().contains("1024.0 GiB"), "{shortage}");
        }
    }

    /// A page of a file on a disk can be written back: the disk's room is its bound.
    #[test]
    fn check_room_holds_a_file_on_a_disk_to_its_file_system_only() {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        assert!(!is_in_memory(&file), "this test needs /var/tmp on a disk");
        file.set_len(1 << 30).unwrap();
        let layout = SlotLayout { slot: SlotId(0), gpa: 0, pages: 1 << 18 };
        let memory = GuestMemory::map_files(vec![(layout, file, 0)]).unwrap();
        let rooms: Vec<Place> =
            memory.slots()[0].rooms().into_iter().map(|room| room.room.place).collect();
        assert!(matches!(rooms[..], [Place::FileSystem { .. }]), "{rooms:?}");
    }

    #[test]
    fn shortage_names_needed_place_and_room() {
        let place = Place::FileSystem { path: "/mnt/ram".into(), total_bytes: 64 << 20 };
        let shortage = Shortage { needed_bytes: 190 << 20, free_bytes: 60 << 10, place };
        assert_eq!(
            shortage.to_string(),
            "the guest uses 190.0 MiB of memory, and the file system of /mnt/ram (64.0 MiB) has \
             room for 60 KiB"
        );
    }
}
