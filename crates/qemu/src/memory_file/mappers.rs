//! Finds the processes that have a file mapped, from `/proc`.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::thread::CapabilitySet;

use super::lease::Lease;
use super::sharing::{Mapper, Sharing};
use crate::error::QemuError;
use crate::process;

/// The result of a search.
#[derive(Debug, PartialEq, Eq)]
pub struct Seen {
    /// A process that has the file mapped.
    pub mapper: Option<Mapper>,
    /// Why there may be others; `None` if every process of this machine was examined.
    pub unseen: Option<String>,
}

/// Why a file that no process was seen to have mapped is not this QEMU's alone.
const OPEN_ELSEWHERE: &str = "another process has it open, which `fuser` can name";

impl Seen {
    /// What follows from the search and, if it has found no other process, from the kernel's word.
    pub fn confirmed_by(self, lease: impl FnOnce() -> Lease) -> Sharing {
        if let Some(mapper) = self.mapper {
            return Sharing::Mapped(mapper);
        }
        match (lease(), self.unseen) {
            (Lease::Granted, _) | (Lease::Unknown, None) => Sharing::Alone,
            (Lease::Refused, None) => Sharing::Unknown(OPEN_ELSEWHERE.to_owned()),
            (Lease::Refused, Some(why)) => Sharing::Unknown(format!("{OPEN_ELSEWHERE}, and {why}")),
            (Lease::Unknown, Some(why)) => Sharing::Unknown(why),
        }
    }
}

/// How long a forked copy of a known process may take to `exec`, on a heavily loaded machine. A
/// copy that takes longer counts as another process that has the file.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// How often the copy is checked.
const LOOK_PERIOD: Duration = Duration::from_millis(20);

/// The initial namespaces, in which all processes of a machine are visible and a capability applies
/// to all of them (`include/uapi/linux/nsfs.h`).
const FIRST_NAMESPACES: [(&str, &str); 2] =
    [("pid", "pid:[4026531836]"), ("user", "user:[4026531837]")];

/// Looks for processes that have a file mapped, shared or private, by device and inode as `/proc`
/// prints them. Processes for which `is_known` is true are left out.
///
/// # Errors
/// If `/proc` can't be read.
pub fn find(file: (u64, u64), is_known: impl Fn(u32) -> bool) -> Result<Seen, QemuError> {
    let failed = |source| QemuError::Local { action: "list the processes of this host", source };
    let mut unseen = is_limited();
    let inode = file.1.to_string();
    for entry in std::fs::read_dir("/proc").map_err(failed)?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if is_known(pid) {
            continue;
        }
        let has_mapped = || {
            let maps = maps_of(&entry.path())?;
            Ok::<_, io::Error>(has_mapped(&String::from_utf8_lossy(&maps), &inode, file))
        };
        let keeps = || Ok(has_mapped()? && stays(pid, &is_known, has_mapped)?);
        match keeps() {
            Ok(true) => {
                return Ok(Seen { mapper: Some(Mapper { pid, name: name_of(pid) }), unseen });
            }
            Ok(false) => {}
            Err(error) if is_gone(&error) => {}
            Err(error) => {
                unseen.get_or_insert_with(|| {
                    format!("process {pid} ({}) can't be looked at: {error}", name_of(pid))
                });
            }
        }
    }
    Ok(Seen { mapper: None, unseen })
}

/// Whether a process keeps a file mapped, as `has` reports. Between `fork` and `exec` a process has
/// the mappings of its parent: a copy of a known process is given time to call `exec` or to end.
fn stays(
    pid: u32,
    is_known: &impl Fn(u32) -> bool,
    has: impl Fn() -> io::Result<bool>,
) -> io::Result<bool> {
    let deadline = Instant::now() + START_TIMEOUT;
    while is_copy_of(pid, is_known) && Instant::now() < deadline {
        std::thread::sleep(LOOK_PERIOD);
    }
    has()
}

/// Whether a process is a forked copy of a known ancestor.
fn is_copy_of(pid: u32, is_known: &impl Fn(u32) -> bool) -> bool {
    let Some(own) = Image::of(pid) else { return false };
    let mut parent = own.parent;
    while let Some(image) = Image::of(parent).filter(|image| image.places == own.places) {
        if is_known(parent) {
            return true;
        }
        parent = image.parent;
    }
    false
}

/// The program that a process runs.
struct Image {
    parent: u32,
    /// Start and end of its code, and start of its stack: each `exec` changes these.
    places: [u64; 3],
}

impl Image {
    /// Fields 4 and 26 to 28 of proc_pid_stat(5).
    fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may contain anything; the next field is the third.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        let parent = number(4)?.try_into().ok()?;
        Some(Self { parent, places: [number(26)?, number(27)?, number(28)?] })
    }
}

/// The mappings of a process. Those of a process whose main thread has ended are only listed for
/// its other threads, which have the same.
fn maps_of(process: &Path) -> io::Result<Vec<u8>> {
    let maps = std::fs::read(process.join("maps"))?;
    if !maps.is_empty() {
        return Ok(maps);
    }
    for thread in std::fs::read_dir(process.join("task"))? {
        match std::fs::read(thread?.path().join("maps")) {
            Ok(maps) if maps.is_empty() => {}
            Err(error) if is_gone(&error) => {}
            other => return other,
        }
    }
    // A thread of the kernel, or a process that has ended.
    Ok(maps)
}

fn has_mapped(maps: &str, inode: &str, file: (u64, u64)) -> bool {
    let lines = maps.lines().filter(|line| line.split_ascii_whitespace().nth(4) == Some(inode));
    lines.filter_map(process::parse).any(|mapping| mapping.file == file)
}

/// A process that has ended meanwhile has nothing mapped.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

fn name_of(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().to_owned()
}

/// Why some processes may not be visible at all.
fn is_limited() -> Option<String> {
    for (kind, first) in FIRST_NAMESPACES {
        let own = std::fs::read_link(Path::new("/proc/self/ns").join(kind));
        if own.is_ok_and(|own| own.as_os_str() != first) {
            return Some(format!(
                "vmferry runs in a {kind} namespace of its own, from which other processes are not \
                 seen"
            ));
        }
    }
    let capabilities = rustix::thread::capabilities(None);
    let may = capabilities.is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_PTRACE));
    (!may).then(|| "without CAP_SYS_PTRACE not all processes are seen".to_owned())
}
