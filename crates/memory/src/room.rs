//! How much memory is available for a guest, and where: on a tmpfs, in the pool of huge pages, in
//! the control group, on the host.
//!
//! The result is an upper bound, so that a guest that fits is never refused: huge pages that others
//! have reserved count as free, and so do caches and swap. Nothing is reserved, so a guest may
//! still not fit even if this check passes.
//!
//! Sources: Linux `Documentation/filesystems/tmpfs.rst`, `proc.rst` (`MemAvailable`),
//! `admin-guide/mm/hugetlbpage.rst`, `admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst`.

mod group;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use crate::huge::huge_page_bytes;
use crate::place::{Bytes, Place};
use crate::slots::{Backing, GuestMemory, Slot};

/// `f_type` of tmpfs, and of a memfd (`linux/magic.h`).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// A guest that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the guest uses {} of memory, and {place} has room for {}",
    Bytes(*needed_bytes),
    Bytes(*free_bytes)
)]
pub struct Shortage {
    /// Bytes that the guest needs at this place.
    pub needed_bytes: u64,
    /// Bytes that are available.
    pub free_bytes: u64,
    /// Where the memory is allocated from.
    pub place: Place,
}

/// A place that memory is allocated from, and the bytes available there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Where the memory is allocated from.
    pub place: Place,
    /// Bytes available there, including those that the slot already has.
    pub free_bytes: u64,
    /// Distinguishes places of the same kind.
    id: u64,
}

impl GuestMemory {
    /// Checks that each slot has room for its number of bytes, `None` if the number is not known.
    /// Where the available memory cannot be determined, it is assumed to be enough.
    ///
    /// # Errors
    /// The first place that has too little memory.
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

/// A place that a slot's memory is allocated from, and the bytes that the slot already has there.
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
    /// The places that the slot's pages are allocated from.
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

    /// The place with the least memory left, for an error about a page that could not be allocated.
    /// `None` if it cannot be determined.
    pub(crate) fn fullest(&self) -> Option<Room> {
        let rooms = self.rooms().into_iter().map(|room| room.room);
        rooms.min_by_key(|room| room.free_bytes)
    }
}

/// Whether a file's pages count against the host's memory and this process's control group. Huge
/// pages are in a separate pool, and pages of a file on a disk can be written back.
fn is_in_memory(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|stat| stat.f_type == TMPFS_MAGIC)
}

/// The space in a file's file system; `None` if the file system has no limit of its own.
fn room_of(file: &File) -> io::Result<Option<Room>> {
    let id = file.metadata()?.dev();
    // The name is only for messages; a file may have none.
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
    // The file system of a memfd, or a tmpfs with `size=0`.
    if total_bytes == 0 {
        return Ok(None);
    }
    let free_bytes = stat.f_bavail.saturating_mul(block_bytes);
    Ok(Some(Room { place: Place::FileSystem { path, total_bytes }, free_bytes, id }))
}

/// Memory, including swap, that the host can provide without killing a process.
fn host_bytes() -> Option<u64> {
    Some(meminfo("MemAvailable:")? + meminfo("SwapFree:").unwrap_or_default())
}

/// A value from `/proc/meminfo`, in bytes.
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
            // No test machine has a TiB of memory.
            let shortage = memory.check_room(&[Some(1 << 40)]).unwrap_err();
            assert_eq!(shortage.needed_bytes, 1 << 40, "{shortage}");
            assert!(shortage.free_bytes > 1 << 20, "{shortage}");
            assert!(shortage.to_string().contains("1024.0 GiB"), "{shortage}");
        }
    }

    /// Pages of a file on a disk can be written back, so only the space on the disk limits it.
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
