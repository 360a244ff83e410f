//! Guest memory is excluded from core dumps. A child with guest memory crashes, and its dump is
//! searched.

mod dumps;

use dumps::{PAGES, PATTERN, fill, hold, is_kept_out, order};
use vmferry_memory::{Backing, GuestBytes, GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout};

#[test]
fn private_memory_is_in_no_core_dump() {
    is_kept_out("private");
}

#[test]
fn core_dump_has_no_memfd() {
    is_kept_out("memfd");
}

#[test]
fn memory_of_another_process_is_in_no_core_dump() {
    is_kept_out("mapped");
}

#[test]
fn guest_bytes_are_in_no_core_dump() {
    is_kept_out("bytes");
}

/// Not a test of its own: it runs as the child that the tests above crash.
#[test]
fn child_process_of_the_test() {
    let Some((kind, undone)) = order() else { return };
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
    let mut bytes = GuestBytes::new();
    let owned;
    let memory = match kind.as_str() {
        "private" => Some(GuestMemory::allocate(&layout, MemoryKind::Private).unwrap()),
        "memfd" => Some(GuestMemory::allocate(&layout, MemoryKind::Memfd).unwrap()),
        "mapped" => {
            owned = GuestMemory::allocate(&layout, MemoryKind::Memfd).unwrap();
            let Backing::File { file, offset } = owned.slots()[0].backing() else { unreachable!() };
            let files = vec![(layout[0], file.try_clone().unwrap(), *offset)];
            Some(GuestMemory::map_files(files).unwrap())
        }
        "bytes" => None,
        other => unreachable!("{other}"),
    };
    for page in 0..PAGES {
        let at = page as usize * PAGE_SIZE;
        match &memory {
            Some(memory) => {
                bytes.extend_to(PATTERN);
                fill(page, &mut bytes);
                memory.write_at(at as u64, &bytes).unwrap();
            }
            None => {
                // The buffer grows, and its mapping is moved.
                bytes.extend_to(at + PAGE_SIZE);
                fill(page, &mut bytes[at..]);
            }
        }
    }
    hold(undone);
}
