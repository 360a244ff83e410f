//! The directories of sockets that local programs connect to, or listen on.
//!
//! * The directory of a peer belongs to root. The daemon makes sockets in it, each of which only
//!   root and QEMU's user can connect to.
//! * The directory in which QEMU makes the sockets of guests that arrive belongs to QEMU's user. It
//!   has the name that the other host uses for this one.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags};
use vmferry_transport::connect_unix;

use crate::access::SocketFile;
use crate::config::{Owner, is_plain_name};
use crate::error::ProxyError;

/// The most directories of peers and of names that peers have for this host.
const MAX_DIRECTORIES: usize = 1024;

/// The mode of a directory of guests that arrive.
const INCOMING_MODE: u32 = 0o700;

/// Who may connect to a socket that the daemon makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Root: libvirt.
    Root,
    /// Root and QEMU's user.
    Qemu(Owner),
}

/// Makes the directory of all directories.
///
/// # Errors
/// [`ProxyError::Directory`].
pub fn make_base(path: &Path) -> Result<(), ProxyError> {
    let failed = |problem: String| ProxyError::Directory { path: path.to_owned(), problem };
    let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(path);
    // The mode may have been cut by the umask; that of a directory of others is checked below.
    made.and_then(|()| match fs::symlink_metadata(path)?.mode() & 0o777 {
        0o700 => fs::set_permissions(path, fs::Permissions::from_mode(0o755)),
        _ => Ok(()),
    })
    .map_err(|error| failed(error.to_string()))?;
    let metadata = fs::symlink_metadata(path).map_err(|error| failed(error.to_string()))?;
    if !metadata.is_dir() {
        return Err(failed("it is not a directory".into()));
    }
    if metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o022 != 0 {
        return Err(failed("others can write to it".into()));
    }
    Ok(())
}

/// Makes the directory of a peer, and removes sockets that an earlier daemon has left there.
///
/// # Errors
/// [`ProxyError::Name`] or [`ProxyError::Directory`].
pub fn make_outgoing(base: &Path, name: &str) -> Result<PathBuf, ProxyError> {
    let owner = Owner {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
    };
    let path = make(base, name, owner, 0o755)?;
    let failed =
        |error: io::Error| ProxyError::Directory { path: path.clone(), problem: error.to_string() };
    for entry in fs::read_dir(&path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // Only the daemon writes to this directory.
        if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            fs::remove_file(entry.path()).map_err(failed)?;
        }
    }
    Ok(path)
}

/// Makes the directory in which QEMU makes the sockets of guests that arrive.
///
/// # Errors
/// As [`make_outgoing`].
pub fn make_incoming(base: &Path, name: &str, qemu: Owner) -> Result<PathBuf, ProxyError> {
    let failed = |problem| ProxyError::Directory { path: base.to_owned(), problem };
    // The name is the peer's choice, and a directory with files of others is not removed.
    let found = fs::read_dir(base).map_err(|error| failed(error.to_string()))?.count();
    if found >= MAX_DIRECTORIES && fs::symlink_metadata(base.join(name)).is_err() {
        return Err(failed(format!("it has {found} directories already")));
    }
    make(base, name, qemu, INCOMING_MODE)
}

/// Removes a directory of [`make_incoming`] if it is empty. Sockets in it may be those of QEMUs
/// that run, which must not be connected to: QEMU would take that for a channel of its migration.
///
/// # Errors
/// [`ProxyError::Name`], or [`ProxyError::Directory`] with the system's error.
pub fn remove_incoming(base: &Path, name: &str, qemu: Owner) -> Result<(), ProxyError> {
    if !is_plain_name(name) {
        return Err(ProxyError::Name { name: name.to_owned() });
    }
    let path = base.join(name);
    let failed =
        |error: io::Error| ProxyError::Directory { path: path.clone(), problem: error.to_string() };
    let metadata = match fs::symlink_metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata.map_err(failed)?,
    };
    let is_made = metadata.is_dir()
        && (metadata.uid(), metadata.gid()) == (qemu.uid, qemu.gid)
        && metadata.mode() & 0o777 == INCOMING_MODE;
    if !is_made {
        return Ok(());
    }
    match fs::remove_dir(&path) {
        Err(error) if error.kind() != io::ErrorKind::DirectoryNotEmpty => Err(failed(error)),
        _ => Ok(()),
    }
}

fn make(base: &Path, name: &str, owner: Owner, mode: u32) -> Result<PathBuf, ProxyError> {
    if !is_plain_name(name) {
        return Err(ProxyError::Name { name: name.to_owned() });
    }
    let path = base.join(name);
    let failed =
        |error: io::Error| ProxyError::Directory { path: path.clone(), problem: error.to_string() };
    match fs::DirBuilder::new().mode(mode).create(&path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    // Only root can write to `base`, so nobody replaces the directory meanwhile.
    let metadata = fs::symlink_metadata(&path).map_err(failed)?;
    if !metadata.is_dir() {
        let problem = "it is not a directory".into();
        return Err(ProxyError::Directory { path, problem });
    }
    if (metadata.uid(), metadata.gid()) != (owner.uid, owner.gid) {
        std::os::unix::fs::lchown(&path, Some(owner.uid), Some(owner.gid)).map_err(failed)?;
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(failed)?;
    Ok(path)
}

/// Listens at `path`, in a directory to which only root can write. Returns the socket and its file.
///
/// # Errors
/// [`ProxyError::Squatted`] if there is a file, or [`ProxyError::Socket`].
pub fn bind(path: &Path, access: Access) -> Result<(UnixListener, SocketFile), ProxyError> {
    let failed = |source| ProxyError::Socket { path: path.to_owned(), source };
    let socket = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            return Err(ProxyError::Squatted { path: path.to_owned() });
        }
        socket => socket.map_err(failed)?,
    };
    let file = identity(path).map_err(failed)?;
    let changed = fs::set_permissions(path, fs::Permissions::from_mode(0o600)).and_then(|()| {
        let Access::Qemu(Owner { uid, gid }) = access else { return Ok(()) };
        std::os::unix::fs::lchown(path, Some(uid), Some(gid))
    });
    if let Err(source) = changed {
        remove(path, file);
        return Err(failed(source));
    }
    Ok((socket, file))
}

/// The identity of the file at a path.
///
/// # Errors
/// The system's.
pub fn identity(path: &Path) -> io::Result<SocketFile> {
    let metadata = fs::symlink_metadata(path)?;
    Ok(SocketFile { device: metadata.dev(), inode: metadata.ino() })
}

/// Removes the file at a path if it is this one.
pub fn remove(path: &Path, file: SocketFile) {
    if identity(path).is_ok_and(|found| found == file) {
        // It may be gone already.
        let _ = fs::remove_file(path);
    }
}

/// Connects to a socket of this host that a peer may name: made by QEMU's user, in a directory of
/// guests that arrive.
///
/// # Errors
/// The system's, [`io::ErrorKind::PermissionDenied`] if another user listens there, or
/// [`io::ErrorKind::TimedOut`].
pub fn connect_to_qemu(path: &Path, qemu: Owner, timeout: Duration) -> io::Result<UnixStream> {
    let stream = connect_to_socket(path, timeout)?;
    let credentials = rustix::net::sockopt::socket_peercred(&stream)?;
    let uid = credentials.uid.as_raw();
    if uid != qemu.uid {
        let text = format!("the user {uid}, who is not QEMU's, listens there");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(stream)
}

/// Connects to the socket that a path names, and never to one behind a symbolic link: QEMU's user
/// could replace the file at any time.
fn connect_to_socket(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let found = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
    if found != FileType::Socket {
        return Err(io::Error::other("it is not a socket"));
    }
    connect_unix(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())), timeout)
}

/// Makes sure that there is no file at a path where QEMU is about to make a socket. Removes the
/// socket of a QEMU that was killed.
///
/// # Errors
/// [`ProxyError::Squatted`].
pub fn must_be_free(path: &Path, timeout: Duration) -> Result<(), ProxyError> {
    let squatted = || ProxyError::Squatted { path: path.to_owned() };
    match connect_to_socket(path, timeout) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error)
            if error.kind() == io::ErrorKind::ConnectionRefused
                && fs::remove_file(path).is_ok() =>
        {
            Ok(())
        }
        _ => Err(squatted()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn own() -> Owner {
        Owner { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
    }

    #[test]
    fn sockets_are_made_and_removed() {
        let base = tempfile::tempdir().unwrap();
        let directory = make_outgoing(base.path(), "host-b").unwrap();
        let path = directory.join("web");
        let (listener, file) = bind(&path, Access::Root).unwrap();
        let mode = fs::symlink_metadata(&path).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(connect_to_qemu(&path, own(), LIMIT).is_ok());
        let again = bind(&path, Access::Root);
        assert!(matches!(again, Err(ProxyError::Squatted { .. })), "{again:?}");
        drop(listener);
        remove(&path, SocketFile { inode: file.inode + 1, ..file });
        assert!(path.exists(), "another file");
        remove(&path, file);
        assert!(!path.exists());
        must_be_free(&path, LIMIT).unwrap();
    }

    #[test]
    fn sockets_of_an_earlier_daemon_are_removed_and_files_are_not() {
        let base = tempfile::tempdir().unwrap();
        let directory = make_outgoing(base.path(), "host-b").unwrap();
        let left = UnixListener::bind(directory.join("web")).unwrap();
        fs::write(directory.join("file"), "text").unwrap();
        make_outgoing(base.path(), "host-b").unwrap();
        drop(left);
        must_be_free(&directory.join("web"), LIMIT).unwrap();
        assert!(must_be_free(&directory.join("file"), LIMIT).is_err());
    }

    #[test]
    fn socket_is_free_only_if_nobody_listens() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("web");
        let listener = UnixListener::bind(&path).unwrap();
        assert!(matches!(must_be_free(&path, LIMIT), Err(ProxyError::Squatted { .. })));
        drop(listener);
        must_be_free(&path, LIMIT).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn directory_of_others_and_links_are_refused() {
        let base = tempfile::tempdir().unwrap();
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(make_base(base.path()), Err(ProxyError::Directory { .. })));
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
        make_base(base.path()).unwrap();
        std::os::unix::fs::symlink("/tmp", base.path().join("host-b")).unwrap();
        let made = make_outgoing(base.path(), "host-b");
        assert!(matches!(made, Err(ProxyError::Directory { .. })), "{made:?}");
        assert!(matches!(make_outgoing(base.path(), "../x"), Err(ProxyError::Name { .. })));
    }

    #[test]
    fn peer_cannot_make_directories_without_end() {
        let base = tempfile::tempdir().unwrap();
        for number in 0..MAX_DIRECTORIES {
            make_incoming(base.path(), &number.to_string(), own()).unwrap();
        }
        let more = make_incoming(base.path(), "more", own());
        assert!(matches!(more, Err(ProxyError::Directory { .. })), "{more:?}");
        make_incoming(base.path(), "7", own()).unwrap();
    }

    #[test]
    fn only_an_empty_directory_of_arrivals_is_removed() {
        let base = tempfile::tempdir().unwrap();
        let remove = |name| remove_incoming(base.path(), name, own());
        make_incoming(base.path(), "a", own()).unwrap();
        let left = UnixListener::bind(base.path().join("a/web.mig")).unwrap();
        make_outgoing(base.path(), "host-b").unwrap();
        for name in ["a", "host-b", "none"] {
            remove(name).unwrap();
        }
        assert!(base.path().join("a/web.mig").exists() && base.path().join("host-b").exists());
        drop(left);
        fs::remove_file(base.path().join("a/web.mig")).unwrap();
        remove("a").unwrap();
        assert!(!base.path().join("a").exists());
        assert!(matches!(remove("../x"), Err(ProxyError::Name { .. })));
    }

    #[test]
    fn file_that_is_no_socket_is_not_connected_to() {
        let base = tempfile::tempdir().unwrap();
        fs::write(base.path().join("web"), "text").unwrap();
        assert!(connect_to_qemu(&base.path().join("web"), own(), LIMIT).is_err());
        assert!(connect_to_qemu(&base.path().join("none"), own(), LIMIT).is_err());
        let _listener = UnixListener::bind(base.path().join("other")).unwrap();
        std::os::unix::fs::symlink("other", base.path().join("link")).unwrap();
        assert!(connect_to_qemu(&base.path().join("other"), own(), LIMIT).is_ok());
        assert!(
            connect_to_qemu(&base.path().join("link"), own(), LIMIT).is_err(),
            "a symbolic link"
        );
        let stranger = Owner { uid: own().uid + 1, ..own() };
        let refused = connect_to_qemu(&base.path().join("other"), stranger, LIMIT).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }
}
