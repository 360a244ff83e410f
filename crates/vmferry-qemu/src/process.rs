//! What `/proc` says of a QEMU process.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::QemuError;

/// A line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// Host-virtual addresses in that process.
    pub range: Range<u64>,
    /// Whether writes go to the file.
    pub shared: bool,
    /// Whether the process may write there: the kernel lets it only to a file that it has opened for writing.
    pub writable: bool,
    /// Offset in the file.
    pub offset: u64,
    /// Device and inode of the file; 0 for anonymous memory.
    pub file: (u64, u64),
    /// The file's name, as the kernel prints it.
    pub path: String,
}

/// All mappings of a process.
///
/// # Errors
/// If they may not be read.
pub fn mappings(pid: u32) -> Result<Vec<Mapping>, QemuError> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/maps"))
        .map_err(|source| QemuError::Process { action: "read the mappings", pid, source })?;
    let mut found: Vec<Mapping> = Vec::new();
    for next in text.lines().filter_map(parse) {
        match found.last_mut() {
            Some(last) if continues(last, &next) => last.range.end = next.range.end,
            _ => found.push(next),
        }
    }
    Ok(found)
}

/// Whether one line goes on where the other ends: the kernel splits a mapping whose parts were advised
/// differently.
fn continues(last: &Mapping, next: &Mapping) -> bool {
    let offset = last.offset + (last.range.end - last.range.start);
    next.file.1 != 0
        && (next.range.start, next.file, next.shared, next.writable, next.offset)
            == (last.range.end, last.file, last.shared, last.writable, offset)
}

/// The page table of a process, for `PAGEMAP_SCAN`.
///
/// # Errors
/// If it may not be looked at.
pub fn pagemap(pid: u32) -> Result<File, QemuError> {
    File::open(format!("/proc/{pid}/pagemap")).map_err(|source| QemuError::Process {
        action: "look at the page table",
        pid,
        source,
    })
}

fn parse(line: &str) -> Option<Mapping> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let range = hex(start)?..hex(end)?;
    let rights = words.next()?;
    let (shared, writable) = (rights.ends_with('s'), rights.contains('w'));
    let offset = hex(words.next()?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let device = rustix::fs::makedev(hex(major)? as u32, hex(minor)? as u32);
    let inode = words.next()?.parse().ok()?;
    let path = words.next().unwrap_or_default().trim_start().to_owned();
    Some(Mapping { range, shared, writable, offset, file: (device, inode), path })
}

/// Opens the file behind a mapping for reading and writing, by the descriptor that the process has. Devices are left
/// alone: to open one may be an order to it, and no guest's memory that can be filled from outside is one.
///
/// # Errors
/// If the process has none that may be opened so.
pub fn open_file(pid: u32, mapping: &Mapping) -> Result<File, QemuError> {
    let failed = |source| QemuError::Process { action: "open the memory file", pid, source };
    let directory = PathBuf::from(format!("/proc/{pid}/fd"));
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for entry in std::fs::read_dir(&directory).map_err(failed)?.flatten() {
        let Ok(metadata) = std::fs::metadata(entry.path()) else { continue };
        if (metadata.dev(), metadata.ino()) != mapping.file || !metadata.is_file() {
            continue;
        }
        match File::options().read(true).write(true).open(entry.path()) {
            Ok(file) => return Ok(file),
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

/// The numbers of the descriptors of a process whose link in `/proc/PID/fd` reads so.
///
/// # Errors
/// If they may not be looked at.
pub fn descriptors(pid: u32, link: &str) -> Result<Vec<i32>, QemuError> {
    let failed = |source| QemuError::Process { action: "list the descriptors", pid, source };
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(failed)?;
    Ok(entries
        .flatten()
        .filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == link))
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect())
}

/// Waits until a process has ended.
///
/// # Errors
/// If there is no such process.
pub fn wait_for_end(pid: u32) -> io::Result<()> {
    let pid = rustix::process::Pid::from_raw(pid as i32).ok_or(io::ErrorKind::InvalidInput)?;
    let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
    let mut polled = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
    loop {
        match rustix::event::poll(&mut polled, None) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Whether a process stands still, as after `SIGSTOP` or in a debugger. One that can't be seen does not.
pub fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may hold anything.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('T' | 't'))
}

/// The threads of a process, its first one first.
///
/// # Errors
/// If there is no such process.
pub fn threads(pid: u32) -> Result<Vec<u32>, QemuError> {
    let failed = |source| QemuError::Process { action: "list the threads", pid, source };
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).map_err(failed)?;
    let mut threads: Vec<u32> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse().ok()))
        .collect();
    threads.sort_by_key(|thread| (*thread != pid, *thread));
    Ok(threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_maps_is_read() {
        let line = "7f54c7fff000-7f54e7fff000 rw-s 00001000 00:1a 3     /dev/shm/ram of a guest";
        let found = parse(line).unwrap();
        assert_eq!(found.range, 0x7f54_c7ff_f000..0x7f54_e7ff_f000);
        assert!(found.shared && found.writable);
        assert_eq!((found.offset, found.file.1), (0x1000, 3));
        assert_eq!(found.path, "/dev/shm/ram of a guest");
        let anonymous = parse("7ff0-7ff8 rw-p 00000000 00:00 0 ").unwrap();
        assert!(!anonymous.shared);
        let read_only = parse("7ff0-7ff8 r--s 00000000 00:1a 3 /dev/shm/x").unwrap();
        assert!(read_only.shared && !read_only.writable);
        assert_eq!(anonymous.path, "");
        assert!(parse("nonsense").is_none());
    }

    #[test]
    fn this_process_has_mappings_and_threads() {
        let pid = std::process::id();
        let here = &raw const LINE as u64;
        assert!(mappings(pid).unwrap().iter().any(|mapping| mapping.range.contains(&here)));
        assert_eq!(threads(pid).unwrap()[0], pid);
    }

    static LINE: u8 = 1;
}
