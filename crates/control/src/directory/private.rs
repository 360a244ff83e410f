//! Directories that no other user can change or read. They are created and checked through
//! descriptors.
//!
//! A path is walked from the root, one directory at a time, without following symbolic links. So
//! the path keeps leading to the checked directory as long as only this user and root can change
//! it. Symbolic links in the parent path are resolved first. The path without links is returned,
//! and the caller uses it from then on.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, Stat, fstat, open, openat};
use rustix::io::Errno;

use super::DirectoryError;

const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// Checks a directory that only this user may read: its owner, its mode, and all directories above
/// it. Returns its path without symbolic links.
pub fn check_private(path: &Path) -> Result<PathBuf, DirectoryError> {
    let (path, found) = walk(path)?;
    check_owner(&path, &found)?;
    let mode = found.st_mode & 0o7777;
    if mode & 0o077 == 0 {
        Ok(path)
    } else {
        Err(DirectoryError::Mode { path, mode, wanted: 0o700 })
    }
}

/// Checks the journals' directory in a private directory. It may be a link to another disk; then
/// the directories above its target are checked. Other users may list the journals, but not change
/// them.
pub fn check_journals(path: &Path) -> Result<(), DirectoryError> {
    let real = std::fs::canonicalize(path).map_err(failed("open", path))?;
    let (path, found) = walk(&real)?;
    check_owner(&path, &found)?;
    let mode = found.st_mode & 0o7777;
    if mode & (GROUP_WRITES | OTHERS_WRITE) == 0 {
        Ok(())
    } else {
        Err(DirectoryError::Mode { path, mode, wanted: mode & 0o755 })
    }
}

/// Creates a directory with mode 0700 and its missing parents, and syncs each new name.
pub fn make_private(path: &Path) -> Result<(), DirectoryError> {
    let path = &std::path::absolute(path).map_err(failed("find", path))?;
    // The caller checks what already has the name.
    if path.symlink_metadata().is_ok() {
        return Ok(());
    }
    let Some(above) = path.parent() else { return Ok(()) };
    make_private(above)?;
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(failed("make", path)(error))
        }
        _ => File::open(above).and_then(|above| above.sync_all()).map_err(failed("sync", above)),
    }
}

fn failed(action: &'static str, path: &Path) -> impl Fn(io::Error) -> DirectoryError {
    move |source| DirectoryError::Io { action, path: path.to_owned(), source }
}

fn check_owner(path: &Path, found: &Stat) -> Result<(), DirectoryError> {
    let (owner, user) = (found.st_uid, rustix::process::geteuid().as_raw());
    if owner == user {
        Ok(())
    } else {
        Err(DirectoryError::Owner { path: path.to_owned(), owner, user })
    }
}

/// Opens a directory step by step, and checks each directory above it.
fn walk(path: &Path) -> Result<(PathBuf, Stat), DirectoryError> {
    let absolute = std::path::absolute(path).map_err(failed("find", path))?;
    let path = match (absolute.parent(), absolute.components().next_back()) {
        (Some(above), Some(Component::Normal(name))) => {
            std::fs::canonicalize(above).map_err(failed("open", above))?.join(name)
        }
        _ => std::fs::canonicalize(&absolute).map_err(failed("open", &absolute))?,
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut at = PathBuf::from("/");
    let mut directory: OwnedFd =
        open("/", flags, Mode::empty()).map_err(|error| failed("open", &at)(error.into()))?;
    for component in path.components() {
        let Component::Normal(name) = component else { continue };
        check_above(&at, &path, &stat(directory.as_fd(), &at)?)?;
        at.push(name);
        directory = openat(&directory, name, flags, Mode::empty()).map_err(|error| {
            let is_link = at.symlink_metadata().is_ok_and(|found| found.is_symlink());
            match error {
                Errno::NOTDIR | Errno::LOOP if is_link => DirectoryError::Link { path: at.clone() },
                Errno::NOTDIR => DirectoryError::NotADirectory { path: at.clone() },
                error => failed("open", &at)(error.into()),
            }
        })?;
    }
    let found = stat(directory.as_fd(), &at)?;
    Ok((path, found))
}

fn stat(directory: impl AsFd, at: &Path) -> Result<Stat, DirectoryError> {
    fstat(directory).map_err(|error| failed("look at", at)(error.into()))
}

/// Checks that only this user and root can replace the content of a directory above. In a sticky
/// directory such as `/tmp`, other users cannot replace files of this user or of root, and the next
/// component is checked in turn.
fn check_above(above: &Path, path: &Path, found: &Stat) -> Result<(), DirectoryError> {
    let mode = found.st_mode & 0o7777;
    let owned = [0, rustix::process::geteuid().as_raw()].contains(&found.st_uid);
    // A group with the same ID as the owner is the owner's private group.
    let of_group = mode & GROUP_WRITES != 0 && found.st_gid != found.st_uid;
    let shut = mode & STICKY != 0 || (mode & OTHERS_WRITE == 0 && !of_group);
    if owned && shut {
        return Ok(());
    }
    Err(DirectoryError::Above {
        above: above.to_owned(),
        path: path.to_owned(),
        owner: found.st_uid,
        mode,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn make_private_creates_private_parents() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/b/c");
        make_private(&path).unwrap();
        assert_eq!(check_private(&path).unwrap(), std::fs::canonicalize(&path).unwrap());
        make_private(&path).expect("an existing directory is kept");
    }

    #[test]
    fn check_private_refuses_modes_that_others_can_use() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        make_private(&path).unwrap();
        for bits in [0o755, 0o770, 0o701, 0o777, 0o1777] {
            mode(&path, bits);
            let error = check_private(&path).unwrap_err();
            assert!(matches!(error, DirectoryError::Mode { mode, .. } if mode == bits), "{error}");
            assert!(error.to_string().contains("`chmod 0700`"), "{error}");
        }
        mode(&path, 0o700);
        check_private(&path).unwrap();
    }

    #[test]
    fn check_private_refuses_links_and_files() {
        let directory = tempfile::tempdir().unwrap();
        let [real, link, file] = ["real", "link", "file"].map(|name| directory.path().join(name));
        make_private(&real).unwrap();
        symlink(&real, &link).unwrap();
        std::fs::write(&file, "").unwrap();
        assert!(matches!(check_private(&link), Err(DirectoryError::Link { .. })));
        assert!(matches!(check_private(&file), Err(DirectoryError::NotADirectory { .. })));
        // A link in the parent path is resolved. The path that is used from then on has no links.
        make_private(&link.join("inside")).unwrap();
        assert_eq!(
            check_private(&link.join("inside")).unwrap(),
            std::fs::canonicalize(real.join("inside")).unwrap()
        );
    }

    #[test]
    fn check_private_refuses_writable_parents() {
        let directory = tempfile::tempdir().unwrap();
        let above = directory.path().join("above");
        let path = above.join("a");
        make_private(&path).unwrap();
        mode(&above, 0o777);
        assert!(matches!(check_private(&path), Err(DirectoryError::Above { .. })));
        // Like /tmp.
        mode(&above, 0o1777);
        check_private(&path).unwrap();
    }

    #[test]
    fn check_journals_follows_links_and_refuses_writable_targets() {
        let directory = tempfile::tempdir().unwrap();
        let [disk, link] = ["disk", "journal"].map(|name| directory.path().join(name));
        make_private(&disk).unwrap();
        symlink(&disk, &link).unwrap();
        mode(&disk, 0o755);
        check_journals(&link).unwrap();
        mode(&disk, 0o775);
        assert!(matches!(check_journals(&link), Err(DirectoryError::Mode { wanted: 0o755, .. })));
    }
}
