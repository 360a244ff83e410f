//! Children that hold data and crash, and a search of their core dumps for that data.
//!
//! A child is searched twice. The first search, while the child still runs, covers the memory that
//! the kernel would dump: all mappings that are not marked `dd` (`VM_DONTDUMP`). It depends on no
//! system setting. Then the child crashes. If the system writes dumps into the working directory
//! (`kernel.core_pattern`), the kernel's dump is searched too.
//!
//! Sources: Linux `Documentation/filesystems/proc.rst` (`VmFlags`), `fs/coredump.c`
//! (`vma_dump_size`), core(5).

#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};

pub const PAGES: u64 = 64;

/// Tells the child what to hold, and whether to undo its protection.
const CHILD: &str = "VMFERRY_TEST_CORE_DUMP";

/// The child prints this when it holds the data.
const HELD: &str = "held";

/// Length of a pattern in bytes.
pub const PATTERN: usize = 64;

/// Minimum length of a needle in bytes.
const KEY: usize = 8;

/// Writes a unique pattern at the beginning of a page. The child computes it in place, so that it
/// is not in the program and nowhere else in the child.
pub fn fill(page: u64, into: &mut [u8]) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(page + 1);
    for byte in &mut into[..PATTERN] {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = (state >> 56) as u8;
    }
}

/// The patterns of the first pages.
pub fn patterns(pages: u64) -> Vec<Vec<u8>> {
    let pattern = |page| {
        let mut bytes = vec![0; PATTERN];
        fill(page, &mut bytes);
        bytes
    };
    (0..pages).map(pattern).collect()
}

/// Asserts that none of the child's data is in its dump. Without the protection all of it is, which
/// checks the search itself.
pub fn is_kept_out(kind: &str) {
    are_kept_out(kind, &patterns(PAGES), |_| ());
}

/// As `is_kept_out`, for needles other than [`PAGES`] patterns. `meanwhile` is run with the child
/// before it holds its data.
pub fn are_kept_out(kind: &str, needles: &[Vec<u8>], meanwhile: impl Fn(&mut Crashing)) {
    for undone in [false, true] {
        is_as_protected(kind, undone, needles, &meanwhile);
    }
}

/// Asserts that none of the needles are in the dump of one child, or all if its protection is
/// undone.
pub fn is_as_protected(
    kind: &str,
    undone: bool,
    needles: &[Vec<u8>],
    meanwhile: impl Fn(&mut Crashing),
) {
    let mut child = Crashing::start(kind, undone);
    meanwhile(&mut child);
    child.says(HELD);
    let expected = if undone { needles.len() } else { 0 };
    let found = child.to_be_dumped(needles);
    assert_eq!(found, expected, "{kind}, undone: {undone}: found in memory that is dumped");
    if let Some(found) = child.crash(needles) {
        assert_eq!(found, expected, "{kind}, undone: {undone}: found in the core dump");
    }
}

/// A child that will crash.
pub struct Crashing {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    directory: tempfile::TempDir,
}

impl Crashing {
    /// Starts this program again to run `child_process_of_the_test` only.
    fn start(kind: &str, undone: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_process_of_the_test", "--nocapture"])
            .env(CHILD, format!("{kind} {undone}"))
            .current_dir(directory.path())
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines, directory }
    }

    /// Waits until the child prints `wanted`.
    pub fn says(&mut self, wanted: &str) {
        // The test runner prints the beginning of the first line.
        let said = self.lines.by_ref().any(|line| line.unwrap().ends_with(wanted));
        assert!(said, "the child has ended without {wanted:?}");
    }

    /// Lets a child that waits for input continue.
    pub fn go_on(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Number of needles in the memory that a dump would contain.
    fn to_be_dumped(&self, needles: &[Vec<u8>]) -> usize {
        let pid = self.child.id();
        let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
        let mut search = Search::new(needles);
        // Stops all of the child's threads during the search.
        self.signal(Signal::STOP);
        for mapping in mappings(&pid.to_string()).into_iter().filter(Mapping::is_dumped) {
            let mut bytes = vec![0; mapping.range.len()];
            // Memory that cannot be read belongs to the kernel.
            if memory.read_exact_at(&mut bytes, mapping.range.start as u64).is_ok() {
                search.look_at(&bytes);
            }
        }
        self.signal(Signal::CONT);
        search.found.len()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Lets the child crash. Returns the number of needles in its dump, or `None` if there is no
    /// dump.
    fn crash(mut self, needles: &[Vec<u8>]) -> Option<usize> {
        drop(self.child.stdin.take());
        let status = self.child.wait().unwrap();
        assert_eq!(status.signal(), Some(Signal::ABORT.as_raw()), "{status}");
        let mut files = std::fs::read_dir(self.directory.path()).unwrap();
        let file = files.next().filter(|_| status.core_dumped())?;
        let (mut search, dump) =
            (Search::new(needles), std::fs::read(file.unwrap().path()).unwrap());
        segments(&dump).into_iter().for_each(|segment| search.look_at(&dump[segment]));
        Some(search.found.len())
    }
}

impl Drop for Crashing {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The memory in a core dump. The notes are left out: they contain each thread's registers, which
/// may hold 64 bytes of the data that was copied last.
fn segments(dump: &[u8]) -> Vec<Range<usize>> {
    const LOAD: usize = 1;
    let number = |at: usize, bytes: usize| {
        let digits = dump[at..at + bytes].iter().rev();
        digits.fold(0, |number, byte| number << 8 | usize::from(*byte))
    };
    // elf(5): e_phoff, e_phnum, e_phentsize; p_type, p_offset, p_filesz.
    let (headers, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    let loaded = (0..count).map(|index| headers + index * size).filter(|at| number(*at, 4) == LOAD);
    loaded.map(|at| number(at + 8, 8)..number(at + 8, 8) + number(at + 32, 8)).collect()
}

/// Needles, and the set of those found.
struct Search<'a> {
    needles: &'a [Vec<u8>],
    /// For each value of two bytes, whether a needle begins with it.
    begins: Vec<bool>,
    found: HashSet<usize>,
}

impl<'a> Search<'a> {
    fn new(needles: &'a [Vec<u8>]) -> Self {
        let mut begins = vec![false; 1 << 16];
        for needle in needles {
            assert!(needle.len() >= KEY);
            begins[usize::from(u16::from_le_bytes([needle[0], needle[1]]))] = true;
        }
        Self { needles, begins, found: HashSet::new() }
    }

    fn look_at(&mut self, bytes: &[u8]) {
        for (at, first) in bytes.windows(2).enumerate() {
            if self.begins[usize::from(u16::from_le_bytes([first[0], first[1]]))] {
                let here = |(_, needle): &(usize, &Vec<u8>)| bytes[at..].starts_with(needle);
                let found = self.needles.iter().enumerate().filter(here).map(|(number, _)| number);
                self.found.extend(found);
            }
        }
    }
}

/// A mapping in a process's address space.
pub struct Mapping {
    range: Range<usize>,
    /// Populated bytes.
    pub resident_bytes: u64,
    /// Whether its pages may differ from those of a file. The kernel dumps no others.
    is_own: bool,
    flags: Vec<String>,
}

impl Mapping {
    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|known| known == flag)
    }

    /// Whether the kernel excludes it from every dump.
    pub fn is_left_out(&self) -> bool {
        self.has("dd")
    }

    pub fn is_dumped(&self) -> bool {
        self.is_own && self.has("rd") && !self.is_left_out() && !self.has("io")
    }
}

/// The mappings of a process, given by its number or `self`.
pub fn mappings(process: &str) -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in std::fs::read_to_string(format!("/proc/{process}/smaps")).unwrap().lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap();
        if let Some((begin, end)) = first.split_once('-') {
            let number = |text| usize::from_str_radix(text, 16).unwrap();
            let is_writable = words.next().unwrap().contains('w');
            let has_file = words.nth(2).unwrap() != "0";
            mappings.push(Mapping {
                range: number(begin)..number(end),
                resident_bytes: 0,
                is_own: is_writable || !has_file,
                flags: Vec::new(),
            });
        } else if let Some(mapping) = mappings.last_mut() {
            match first {
                "Rss:" => {
                    mapping.resident_bytes = words.next().unwrap().parse::<u64>().unwrap() << 10;
                }
                "VmFlags:" => mapping.flags = words.map(str::to_owned).collect(),
                _ => {}
            }
        }
    }
    mappings
}

/// What the child must do: the kind of data, and whether to undo the protection.
pub fn order() -> Option<(String, bool)> {
    let order = std::env::var(CHILD).ok()?;
    let (kind, undone) = order.rsplit_once(' ').unwrap();
    let unlimited = Rlimit { current: None, maximum: None };
    // If the hard limit is lower, there is no dump to search.
    let _ = setrlimit(Resource::Core, unlimited);
    Some((kind.to_owned(), undone == "true"))
}

/// Announces that the child holds its data, waits to be searched, and crashes.
pub fn hold(undone: bool) -> ! {
    if undone {
        undo();
    }
    println!("{HELD}");
    let _ = std::io::stdin().read(&mut [0]);
    std::process::abort();
}

/// Undoes the protection of all mappings of this process.
fn undo() {
    for Mapping { range, .. } in mappings("self").into_iter().filter(Mapping::is_left_out) {
        let begin = range.start as *mut std::ffi::c_void;
        // SAFETY: the range is a mapping of this process; the advice changes no content. The kernel
        // refuses it for its own mappings (the data of the vDSO).
        let _ = unsafe { rustix::mm::madvise(begin, range.len(), rustix::mm::Advice::LinuxDoDump) };
    }
}
