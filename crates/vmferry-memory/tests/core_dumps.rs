//! Guest memory is in no core dump, whoever writes it: a child with guest memory crashes, and its dump is searched.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;

use rustix::mm::{Advice, madvise};
use rustix::process::{Resource, Rlimit, setrlimit};
use vmferry_memory::{Backing, GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout};

const PAGES: u64 = 64;

/// Says to the child which memory to make, and whether its protection is to be undone.
const CHILD: &str = "VMFERRY_TEST_CORE_DUMP";

/// What stands at the beginning of a page, like nothing else: not in the program, and not in its stack for long.
fn pattern(page: u64) -> [u8; 64] {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(page + 1);
    std::array::from_fn(|_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    })
}

/// How many of the pages are in the dump of a child; none if this system writes no dumps to files.
fn pages_in_dump(kind: &str, undone: bool) -> Option<usize> {
    let target = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if target.starts_with(['|', '@']) || target.contains('/') {
        eprintln!("SKIPPED: core dumps of this system go to {}", target.trim());
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_child", "--nocapture"])
        .env(CHILD, format!("{kind} {undone}"))
        .current_dir(directory.path())
        .process_group(0)
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{status}");
    if !status.core_dumped() {
        eprintln!("SKIPPED: this system writes no core dumps");
        return None;
    }
    let file = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap();
    let dump = std::fs::read(file.path()).unwrap();
    // The dump's segments are whole pages, and a page's pattern stands at its beginning.
    let found: std::collections::HashSet<&[u8]> =
        dump.chunks(PAGE_SIZE).filter_map(|page| page.get(..64)).collect();
    Some((0..PAGES).filter(|page| found.contains(&pattern(*page)[..])).count())
}

fn is_kept_out(kind: &str) {
    let Some(protected) = pages_in_dump(kind, false) else { return };
    assert_eq!(protected, 0, "{kind}: guest memory is in the core dump");
    // Without the protection it is: the search finds it.
    assert_eq!(pages_in_dump(kind, true), Some(PAGES as usize), "{kind}");
}

#[test]
fn private_memory_is_in_no_core_dump() {
    is_kept_out("private");
}

#[test]
fn a_memfd_is_in_no_core_dump() {
    is_kept_out("memfd");
}

#[test]
fn another_process_s_memory_is_in_no_core_dump() {
    is_kept_out("mapped");
}

/// Not a test of its own: what the tests above let crash.
#[test]
fn the_child() {
    let Ok(order) = std::env::var(CHILD) else { return };
    let (kind, undone) = order.split_once(' ').unwrap();
    let unlimited = Rlimit { current: None, maximum: None };
    // Where the hard limit is lower, there is no dump, and the parent says so.
    let _ = setrlimit(Resource::Core, unlimited);
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
    let owned;
    let memory = match kind {
        "private" => GuestMemory::allocate(&layout, MemoryKind::Private).unwrap(),
        "memfd" => GuestMemory::allocate(&layout, MemoryKind::Memfd).unwrap(),
        "mapped" => {
            owned = GuestMemory::allocate(&layout, MemoryKind::Memfd).unwrap();
            let Backing::File { file, offset } = owned.slots()[0].backing() else { unreachable!() };
            GuestMemory::map_files(vec![(layout[0], file.try_clone().unwrap(), *offset)]).unwrap()
        }
        other => unreachable!("{other}"),
    };
    for page in 0..PAGES {
        memory.write_at(page * PAGE_SIZE as u64, &pattern(page)).unwrap();
    }
    if undone == "true" {
        let slot = &memory.slots()[0];
        let address = slot.host_address() as *mut std::ffi::c_void;
        // SAFETY: the range is a slot's mapping, whole; the advice changes no content.
        unsafe { madvise(address, slot.len_bytes(), Advice::LinuxDoDump) }.unwrap();
    }
    std::process::abort();
}
