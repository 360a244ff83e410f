//! What `/proc` reports about a QEMU process.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde::{Deserialize, Serialize};

use vmferry_memory::SlotId;

use crate::error::QemuError;

/// How often a QEMU whose process is not visible is probed. Each probe blocks other clients for
/// milliseconds.
const LOOK_PERIOD: Duration = Duration::from_secs(2);

/// How long a QEMU that was told to quit may take: it flushes the caches of its disks.
pub const END_TIMEOUT: Duration = Duration::from_secs(30);

/// A line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// Host-virtual addresses in that process.
    pub range: Range<u64>,
    /// Whether writes go to the file.
    pub shared: bool,
    /// Whether the process may write there. The kernel allows this only for a file that was opened
    /// for writing.
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
/// If the mappings can't be read.
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

/// Whether one line continues the other: the kernel splits a mapping whose parts were advised
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
/// If the page table can't be opened.
pub fn pagemap(pid: u32) -> Result<File, QemuError> {
    File::open(format!("/proc/{pid}/pagemap")).map_err(|source| QemuError::Process {
        action: "look at the page table",
        pid,
        source,
    })
}

/// Reads a line of `/proc/PID/maps`.
pub fn parse(line: &str) -> Option<Mapping> {
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

/// The numbers of a process's descriptors for a mapping's file that are open for reading and
/// writing. Devices are skipped: opening one may have side effects, and no device holds guest
/// memory that can be filled from outside.
fn descriptors_of(pid: u32, mapping: &Mapping) -> io::Result<Vec<i32>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let Ok(metadata) = std::fs::metadata(entry.path()) else { continue };
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(number) = number else { continue };
        if (metadata.dev(), metadata.ino()) == mapping.file
            && metadata.is_file()
            && is_open_for_writing(pid, number)
        {
            found.push(number);
        }
    }
    Ok(found)
}

/// Whether a process has opened a file for reading and writing, by `/proc/PID/fdinfo` (proc(5)).
fn is_open_for_writing(pid: u32, descriptor: i32) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}"));
    let text = text.unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_ACCMODE == libc::O_RDWR)
}

/// Opens the file behind a mapping for reading and writing, through a descriptor that the process
/// has open for both.
///
/// # Errors
/// If the process has no descriptor that can be reopened this way.
pub fn open_file(pid: u32, mapping: &Mapping) -> Result<File, QemuError> {
    let failed = |source| QemuError::Process { action: "open the memory file", pid, source };
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for descriptor in descriptors_of(pid, mapping).map_err(failed)? {
        let path = format!("/proc/{pid}/fd/{descriptor}");
        match File::options().read(true).write(true).open(path) {
            Ok(file) => return Ok(file),
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

/// Fetches the process's own descriptor for the file behind a mapping: the same open file
/// description, not a new one.
///
/// # Errors
/// If it has none for reading and writing, or it can't be fetched.
pub fn own_descriptor(pid: u32, mapping: &Mapping) -> io::Result<File> {
    let process = pidfd(pid)?;
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for descriptor in descriptors_of(pid, mapping)? {
        match pidfd_getfd(&process, descriptor, PidfdGetfdFlags::empty()) {
            // The descriptor may have been replaced since it was listed.
            Ok(fetched) => {
                let file = File::from(fetched);
                let metadata = file.metadata()?;
                if (metadata.dev(), metadata.ino()) == mapping.file {
                    return Ok(file);
                }
            }
            Err(errno) => last = errno.into(),
        }
    }
    Err(last)
}

/// A pidfd, which keeps naming this process when its PID is reused.
///
/// # Errors
/// If there is no such process.
pub fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid as i32).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Waits until a process has ended, at most for this time. Returns whether it has ended.
///
/// # Errors
/// System call errors.
pub fn has_ended_within(process: &OwnedFd, patience: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + patience;
    let mut polled = [PollFd::new(process, PollFlags::IN)];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut polled, Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Whether missing pages of these addresses of a process are reported by a userfaultfd.
///
/// # Errors
/// If the mappings can't be read.
pub fn reports_missing_pages(pid: u32, ranges: &[(SlotId, Range<u64>)]) -> Result<bool, QemuError> {
    let reported = reported_mappings(pid)?;
    let is_reported = |range: &Range<u64>| {
        let mut at = range.start;
        for one in &reported {
            if one.range.contains(&at) {
                at = one.range.end;
            }
        }
        at >= range.end
    };
    Ok(ranges.iter().all(|(_, range)| is_reported(range)))
}

/// Whether a userfaultfd reports missing pages of a process.
///
/// # Errors
/// If the mappings can't be read.
pub fn lacks_pages(pid: u32) -> Result<bool, QemuError> {
    Ok(!reported_mappings(pid)?.is_empty())
}

/// The mappings of a process of which a userfaultfd reports missing pages, in ascending order:
/// those with the flag `um` in `/proc/PID/smaps` (proc_pid_smaps(5)).
///
/// # Errors
/// If the mappings can't be read.
pub fn reported_mappings(pid: u32) -> Result<Vec<Mapping>, QemuError> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps"))
        .map_err(|source| QemuError::Process { action: "read the mappings", pid, source })?;
    let (mut found, mut mapping) = (Vec::new(), None);
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let is_reported = flags.split_whitespace().any(|flag| flag == "um");
            found.extend(mapping.take().filter(|_| is_reported));
        } else if let Some(parsed) = parse(line) {
            mapping = Some(parsed);
        }
    }
    Ok(found)
}

/// The numbers of a process's descriptors whose link in `/proc/PID/fd` equals `link`.
///
/// # Errors
/// If the descriptors can't be listed.
pub fn descriptors(pid: u32, link: &str) -> Result<Vec<i32>, QemuError> {
    let failed = |source| QemuError::Process { action: "list the descriptors", pid, source };
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(failed)?;
    Ok(entries
        .flatten()
        .filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == link))
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect())
}

/// Where a file is that a process has open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenFile {
    /// On a mount of the process's mount namespace, of this type.
    Mounted(String),
    /// On none of these mounts: a socket, a memfd, or a file of another namespace; with the file
    /// system type from `statfs`, if that succeeds.
    Elsewhere(Option<u64>),
}

/// Where all files are that a process has open.
///
/// The mounts are checked first: `statfs` asks the server of some file systems, whose answer may
/// name the server's own file system (9p), and may never come.
///
/// # Errors
/// If `/proc` can't be read.
pub fn open_files(pid: u32) -> io::Result<Vec<OpenFile>> {
    let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        let number = path.file_name().unwrap_or_default().to_string_lossy();
        let about = match std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")) {
            // It was closed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        let mount = about.lines().find_map(|line| line.strip_prefix("mnt_id:"));
        let kind = mount.and_then(|id| type_of_mount(&mounts, id.trim()));
        found.push(match kind {
            Some(kind) => OpenFile::Mounted(kind.to_owned()),
            None => {
                let found = rustix::fs::statfs(&path).ok();
                OpenFile::Elsewhere(found.map(|found| found.f_type as u64))
            }
        });
    }
    Ok(found)
}

/// The type of a mount's file system (proc_pid_mountinfo(5)).
fn type_of_mount<'a>(mounts: &'a str, id: &str) -> Option<&'a str> {
    let line = mounts.lines().find(|line| line.split(' ').next() == Some(id))?;
    line.split_once(" - ")?.1.split(' ').next()
}

/// Waits until a process has ended.
///
/// # Errors
/// If there is no such process.
pub fn wait_for_end(pid: u32) -> io::Result<()> {
    let process = pidfd(pid)?;
    let mut polled = [PollFd::new(&process, PollFlags::IN)];
    loop {
        match poll(&mut polled, None) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Waits until the QEMU behind a QMP socket has ended: by its process, or if that is not visible,
/// by its socket, which then refuses clients. A QEMU that serves another client keeps this one in
/// its queue.
pub fn wait_until_gone(pid: Option<u32>, socket: &Path) {
    if let Some(pid) = pid {
        // An error means that the process has already ended.
        let _ = wait_for_end(pid);
        return;
    }
    loop {
        match UnixStream::connect(socket) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
                ) =>
            {
                return;
            }
            // The first byte of a greeting, or end of file. In the latter case the next attempt
            // shows whether QEMU has ended.
            Ok(mut stream) => drop(stream.read(&mut [0])),
            Err(_) => {}
        }
        std::thread::sleep(LOOK_PERIOD);
    }
}

/// The threads of a process, main thread first.
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
    fn maps_line_is_parsed() {
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
    fn own_process_has_mappings_and_threads() {
        let pid = std::process::id();
        let here = &raw const LINE as u64;
        assert!(mappings(pid).unwrap().iter().any(|mapping| mapping.range.contains(&here)));
        assert_eq!(threads(pid).unwrap()[0], pid);
    }

    #[test]
    fn mount_type_is_parsed() {
        let mounts = "36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 - ext3 /dev/root rw\n\
                      361 35 0:60 / /img rw - fuse.sshfs host:/img rw\n";
        assert_eq!(type_of_mount(mounts, "36"), Some("ext3"));
        assert_eq!(type_of_mount(mounts, "361"), Some("fuse.sshfs"));
        assert_eq!(type_of_mount(mounts, "35"), None);
    }

    static LINE: u8 = 1;
}
