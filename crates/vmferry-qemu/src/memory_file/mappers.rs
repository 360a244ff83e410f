//! Which processes have a file mapped, as `/proc` says.

use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::thread::CapabilitySet;

use super::Mapper;
use crate::error::QemuError;
use crate::process;

/// What was seen.
#[derive(Debug, PartialEq, Eq)]
pub struct Seen {
    /// A process that has the file mapped.
    pub mapper: Option<Mapper>,
    /// Why there may be others; `None` if every process of this machine was looked at.
    pub unseen: Option<String>,
}

/// How often, and how soon again, is looked whether a process goes on having a file mapped.
const LOOKS: u32 = 5;
const LOOK_PERIOD: Duration = Duration::from_millis(20);

/// The namespaces in which all processes of a machine are seen, and a right holds for all of them
/// (`include/uapi/linux/nsfs.h`).
const FIRST_NAMESPACES: [(&str, &str); 2] =
    [("pid", "pid:[4026531836]"), ("user", "user:[4026531837]")];

/// Looks for processes that have a file mapped, shared or private, by device and inode as `/proc`
/// prints them; `is_known` are left out.
///
/// # Errors
/// If there is no `/proc` to be read.
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
            let maps = std::fs::read(entry.path().join("maps"))?;
            Ok::<_, io::Error>(has_mapped(&String::from_utf8_lossy(&maps), &inode, file))
        };
        match has_mapped() {
            Ok(true) if stays(has_mapped) => {
                return Ok(Seen { mapper: Some(Mapper { pid, name: name_of(pid) }), unseen });
            }
            Ok(_) => {}
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

/// Whether something is so for longer than a process needs that is about to start a program: until
/// then it has the mappings of the process that it came from, which may be a known one.
fn stays(is_so: impl Fn() -> io::Result<bool>) -> bool {
    (0..LOOKS).all(|_| {
        std::thread::sleep(LOOK_PERIOD);
        is_so().unwrap_or(false)
    })
}

fn has_mapped(maps: &str, inode: &str, file: (u64, u64)) -> bool {
    let lines = maps.lines().filter(|line| line.split_ascii_whitespace().nth(4) == Some(inode));
    lines.filter_map(process::parse).any(|mapping| mapping.file == file)
}

/// One that has ended meanwhile has nothing mapped.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

fn name_of(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().to_owned()
}

/// Why some processes may not be seen at all.
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
