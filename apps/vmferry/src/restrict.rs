//! What `vmferry receive` may still access after it restricts itself. It does so before it accepts
//! connections.

use std::path::{Path, PathBuf};

use vmferry_sandbox::{Files, Restrictions, Sandbox, Work, apply};
use vmferry_transport::Address;

use crate::args::ReceiveOptions;
use crate::commands::directories;
use crate::commands::link::tls_files;
use crate::exit::Failure;

/// Files that every receiver and its allocator read: its own page table and peak memory, its share
/// of the processors, random numbers where `getrandom` is missing, and the host's memory and huge
/// pages, which it reports to peers that ask.
const HOST_FACTS: [&str; 8] = [
    "/proc/self",
    "/proc/meminfo",
    "/proc/sys/kernel/random/boot_id",
    "/proc/sys/vm/overcommit_memory",
    "/sys/fs/cgroup",
    "/sys/devices/system/cpu",
    "/sys/kernel/mm/hugepages",
    "/dev/urandom",
];

/// Restricts this process, which listens at `listening`, to what `work` needs. `more` are the files
/// that the work itself uses; `others_sockets` says whether it connects to another user's sockets.
pub fn restrict(
    options: &ReceiveOptions,
    listening: &Address,
    work: Work,
    more: Files,
    others_sockets: bool,
) -> Result<Restrictions, Failure> {
    let mut files = more;
    files.read.extend(HOST_FACTS.map(PathBuf::from));
    // Certificates, revocation lists and the policy are reloaded when their files are replaced.
    if let Some(tls) = tls_files(&options.tls)? {
        for path in tls.files().paths() {
            files.read.extend(directories_of(path));
        }
    }
    if let Some(policy) = &options.policy {
        files.read.extend(directories_of(policy));
    }
    // Journals and control sockets. `journal` may be a symbolic link to another disk.
    let places = directories()?;
    files.write.extend(std::fs::canonicalize(places.journals()));
    files.write.extend([places.runtime().to_owned(), places.state().to_owned()]);
    // Recordings: the directory exists by now.
    files.write.extend(options.record.record.clone());
    if let Address::Unix(path) | Address::Passed(path) = listening {
        // The socket is removed at the end.
        files.remove_files.extend(directories_of(path));
    }
    Ok(apply(&Sandbox { work, files, others_sockets }, options.sandbox.into())?)
}

/// The directory that contains a path, and the one that contains its target if it is a symbolic
/// link.
fn directories_of(path: &Path) -> Vec<PathBuf> {
    let parent = |path: &Path| match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let real = std::fs::canonicalize(path).ok();
    let mut found = vec![parent(path)];
    found.extend(real.as_deref().map(parent));
    found
}
