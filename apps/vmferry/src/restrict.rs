//! What `vmferry receive` keeps when it restricts itself, before anybody can connect.

use std::path::{Path, PathBuf};

use vmferry_sandbox::{Files, Restrictions, Sandbox, Work, apply};
use vmferry_transport::Address;

use crate::args::ReceiveOptions;
use crate::commands::directories;
use crate::commands::link::tls_files;
use crate::exit::Failure;

/// What every receiver reads about itself and the machine, and its allocator: its page table, its
/// peak memory, its share of the processors; random numbers, where the call for them is missing;
/// and how much memory and how many huge pages there are, for peers that ask.
const ABOUT: [&str; 8] = [
    "/proc/self",
    "/proc/meminfo",
    "/proc/sys/kernel/random/boot_id",
    "/proc/sys/vm/overcommit_memory",
    "/sys/fs/cgroup",
    "/sys/devices/system/cpu",
    "/sys/kernel/mm/hugepages",
    "/dev/urandom",
];

/// Restricts this process, which listens at `listening`, for `work`. `more` are files that the work itself needs;
/// `others_sockets` says whether it connects to sockets of another user.
pub fn restrict(
    options: &ReceiveOptions,
    listening: &Address,
    work: Work,
    more: Files,
    others_sockets: bool,
) -> Result<Restrictions, Failure> {
    let mut files = more;
    files.read.extend(ABOUT.map(PathBuf::from));
    // Certificates, lists and the policy are read again when they are replaced.
    if let Some(tls) = tls_files(&options.tls)? {
        for path in tls.files().paths() {
            files.read.extend(directories_of(path));
        }
    }
    if let Some(policy) = &options.policy {
        files.read.extend(directories_of(policy));
    }
    // Journals and control sockets. Journals may be on another disk, where a link leads.
    let places = directories()?;
    files.write.extend(std::fs::canonicalize(places.journals()));
    files.write.extend([places.runtime().to_owned(), places.state().to_owned()]);
    // Recordings: the directory was made by now.
    files.write.extend(options.record.record.clone());
    if let Address::Unix(path) = listening {
        // The socket is removed in the end.
        files.remove_files.extend(directories_of(path));
    }
    Ok(apply(&Sandbox { work, files, others_sockets }, options.sandbox.into())?)
}

/// The directory in which a file is replaced, and the one where it really is, if its name is a link.
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
