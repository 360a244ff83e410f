//! What `vmferry receive` and `vmferry daemon` may still access after they restrict themselves.
//! They do so before they accept connections.

use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use vmferry_control::{Directories, TlsFiles};
use vmferry_sandbox::{Files, Restrictions, Sandbox, SandboxMode, Work, apply};
use vmferry_transport::Address;

use crate::args::{DaemonOptions, ReceiveOptions};
use crate::commands::daemon::config::Configuration;
use crate::commands::directories;
use crate::commands::link::tls_files;
use crate::exit::{Code, Failure};

/// Files that both and their allocator read: the process's own page table and peak memory, its
/// share of the processors, random numbers where `getrandom` is missing, and the host's memory and
/// huge pages, which a receiver reports to peers that ask.
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

/// Restricts a receiver, which listens at `listening`, to what `work` needs. `more` are the files
/// that the work itself uses; `others_sockets` says whether it connects to another user's sockets.
pub fn restrict(
    options: &ReceiveOptions,
    listening: &Address,
    work: Work,
    more: Files,
    others_sockets: bool,
) -> Result<Restrictions, Failure> {
    let mut files = more;
    let tls = tls_files(&options.tls)?;
    files.read.extend(read_again(tls.as_ref(), options.policy.as_deref()));
    files.write.extend(written(&directories()?));
    // Recordings: the directory exists by now.
    files.write.extend(options.record.record.clone());
    if let Address::Unix(path) | Address::Passed(path) = listening {
        // The socket is removed at the end.
        files.remove_files.extend(directories_of(path));
    }
    Ok(apply(&Sandbox { work, files, others_sockets }, options.sandbox.into())?)
}

/// Restricts a daemon that listens. Its helper and the process that starts receivers are not
/// restricted.
pub fn restrict_daemon(
    options: &DaemonOptions,
    config: &Configuration,
    places: &Directories,
) -> Result<Restrictions, Failure> {
    let (tls, policy) = (config.tls(), config.policy());
    let mut read = read_again(tls.as_ref(), policy);
    read.extend(directories_of(&options.config));
    // The socket that it answers on is removed at the end.
    let remove_files = vec![config.directory().to_owned()];
    let write = written(places);
    let files = Files { read, write, remove_files, ..Files::default() };
    let sandbox = Sandbox { work: Work::Connections, files, others_sockets: false };
    let mode: SandboxMode = options.sandbox.into();
    let restrictions = apply(&sandbox, mode)?;
    if mode != SandboxMode::Off {
        let tls = tls.as_ref().map(TlsFiles::files);
        let paths = tls.iter().flat_map(|files| files.paths());
        for path in paths.chain(policy).chain([options.config.as_path()]) {
            must_be_readable(path)?;
        }
    }
    Ok(restrictions)
}

/// Files without which a restricted daemon works until they are replaced, such as expired
/// certificates.
fn must_be_readable(path: &Path) -> Result<(), Failure> {
    // A pipe is not waited for.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Err(errno) if errno != Errno::NOENT => {
            let text = format!(
                "the restricted daemon can't read {} again when it changes: give the file to the \
                 user that runs the daemon, or use --sandbox off",
                path.display()
            );
            Err(Failure::of(Code::Sandbox, anyhow::Error::new(errno).context(text)))
        }
        _ => Ok(()),
    }
}

/// What is read from time to time. Certificates, revocation lists and the policy are read again
/// when their files are replaced.
fn read_again(tls: Option<&TlsFiles>, policy: Option<&Path>) -> Vec<PathBuf> {
    let mut read = HOST_FACTS.map(PathBuf::from).to_vec();
    if let Some(tls) = tls {
        read.extend(tls.files().paths().flat_map(directories_of));
    }
    read.extend(policy.map(directories_of).unwrap_or_default());
    read
}

/// The directories of journals and control sockets. `journal` may be a symbolic link to another
/// disk.
fn written(places: &Directories) -> Vec<PathBuf> {
    let mut written = vec![places.runtime().to_owned(), places.state().to_owned()];
    written.extend(std::fs::canonicalize(places.journals()));
    written
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
