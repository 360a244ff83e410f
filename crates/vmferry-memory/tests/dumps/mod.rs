//! Children that crash, and what of their memory is in their core dumps.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;

use vmferry_memory::PAGE_SIZE;

pub const PAGES: u64 = 64;

/// Says to the child what to hold, and whether to undo its protection.
pub const CHILD: &str = "VMFERRY_TEST_CORE_DUMP";

/// What stands at the beginning of a page, like nothing else: not in the program, and not in its
/// stack for long.
pub fn pattern(page: u64) -> [u8; 64] {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(page + 1);
    std::array::from_fn(|_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    })
}

/// How many of the pages are in the dump of a child; none if this system writes no dumps to files.
pub fn pages_in_dump(kind: &str, undone: bool) -> Option<usize> {
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

/// Nothing of what the child holds is in its dump; without the protection it is, and the search
/// finds it.
pub fn is_kept_out(kind: &str) {
    let Some(protected) = pages_in_dump(kind, false) else { return };
    assert_eq!(protected, 0, "{kind}: what a guest knows is in the core dump");
    assert_eq!(pages_in_dump(kind, true), Some(PAGES as usize), "{kind}");
}

/// What the child must do: the kind, and whether to undo the protection.
pub fn order() -> Option<(String, bool)> {
    let order = std::env::var(CHILD).ok()?;
    let (kind, undone) = order.split_once(' ').unwrap();
    let unlimited = rustix::process::Rlimit { current: None, maximum: None };
    // Where the hard limit is lower, there is no dump, and the parent says so.
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, unlimited);
    Some((kind.to_owned(), undone == "true"))
}

/// Undoes the protection of everything in this process.
pub fn undo() {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut range = 0..0;
    for line in maps.lines() {
        let first = line.split(' ').next().unwrap();
        if let Some((begin, end)) = first.split_once('-') {
            let number = |text| usize::from_str_radix(text, 16).unwrap();
            range = number(begin)..number(end);
        } else if line.starts_with("VmFlags:") && line.split(' ').any(|flag| flag == "dd") {
            let begin = range.start as *mut std::ffi::c_void;
            // SAFETY: the range is a mapping of this process; the advice changes no content. What
            // is the kernel's own (the data of the vDSO) is refused.
            let _ =
                unsafe { rustix::mm::madvise(begin, range.len(), rustix::mm::Advice::LinuxDoDump) };
        }
    }
}
