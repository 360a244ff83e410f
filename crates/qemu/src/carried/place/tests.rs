//! Attacks by a thread of QEMU's user against root. The tests need root, as a vmferry that uses
//! such directories does.

use std::os::unix::fs::{MetadataExt, symlink};
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// The user `nobody`.
const USER: u32 = 65_534;

/// How often the attack is tried. If the directory's owner is changed first, the attack succeeds
/// within a few attempts.
const ATTEMPTS: usize = 2_000;

/// Runs `work` as [`USER`], without any capability: Linux keeps credentials per thread.
fn as_another_user<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: these calls change the credentials of this thread alone, which ends with
            // `work`.
            let changed = unsafe {
                libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) == 0
                    && libc::syscall(libc::SYS_setresgid, USER, USER, USER) == 0
                    && libc::syscall(libc::SYS_setresuid, USER, USER, USER) == 0
            };
            assert!(changed, "this test needs root: {}", io::Error::last_os_error());
            work()
        });
        thread.join().unwrap()
    })
}

fn place() -> Place {
    Place::for_user(Some(Uid::from_raw(USER))).unwrap()
}

#[test]
fn listen_gives_away_only_the_socket() {
    let place = place();
    let listener = place.listen().unwrap();
    let outer = std::fs::metadata(place.path()).unwrap();
    assert_eq!((outer.uid(), outer.mode() & 0o777), (0, 0o711));
    let socket = place.path().join(SOCKET);
    assert_eq!(std::fs::metadata(&socket).unwrap().uid(), USER);
    as_another_user(|| {
        assert!(std::fs::remove_file(&socket).is_err());
        assert!(std::fs::rename(&socket, place.path().join("moved")).is_err());
        assert!(symlink("/etc/hostname", place.path().join("link")).is_err());
        UnixStream::connect(&socket).unwrap();
    });
    listener.accept().unwrap();
}

/// QEMU's user puts a link in the place of the socket, as often as it can while root listens.
#[test]
fn listen_never_changes_the_owner_of_a_links_target() {
    let victim = tempfile::NamedTempFile::new().unwrap();
    let is_over = AtomicBool::new(false);
    let (sent, places) = std::sync::mpsc::channel::<PathBuf>();
    std::thread::scope(|scope| {
        let (is_over, victim) = (&is_over, victim.path());
        scope.spawn(move || {
            as_another_user(move || {
                let mut place = PathBuf::new();
                while !is_over.load(Ordering::Relaxed) {
                    if let Some(newest) = places.try_iter().last() {
                        place = newest;
                    }
                    // Each step fails while nothing is there, or where it is not permitted.
                    for directory in [place.clone(), place.join(INNER)] {
                        let _ = std::fs::remove_file(directory.join(SOCKET));
                        let _ = symlink(victim, directory.join(SOCKET));
                    }
                }
            });
        });
        let attempt = |_| {
            let place = place();
            sent.send(place.path().to_owned()).unwrap();
            // This never fails, as no other user can write there.
            let listening = place.listen();
            place.clear();
            listening.map(drop)
        };
        let attempts: Result<(), _> = (0..ATTEMPTS).try_for_each(attempt);
        is_over.store(true, Ordering::Relaxed);
        attempts.unwrap();
    });
    assert_eq!(victim.as_file().metadata().unwrap().uid(), 0);
    assert!(victim.path().exists());
}

#[test]
fn connect_reaches_qemu_and_follows_no_link_to_others() {
    let place = place();
    let theirs = PathBuf::from(place.their_uri().strip_prefix("unix:").unwrap());
    let listener = as_another_user(|| UnixListener::bind(&theirs).unwrap());
    place.connect().unwrap();
    listener.accept().unwrap();
    place.clear();
    assert!(!theirs.exists());

    // A socket of root, such as that of a service, which that user may not connect to.
    let private = tempfile::tempdir().unwrap();
    let other = private.path().join("other");
    let service = UnixListener::bind(&other).unwrap();
    service.set_nonblocking(true).unwrap();
    as_another_user(|| symlink(&other, &theirs).unwrap());
    assert!(place.connect().is_err());
    assert_eq!(service.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);

    // It is not taken for QEMU's either when it really has the expected name.
    place.clear();
    std::fs::rename(&other, &theirs).unwrap();
    let error = place.connect().unwrap_err().to_string();
    assert!(error.contains("user 0 listens there"), "{error}");

    place.clear();
    as_another_user(|| std::fs::write(&theirs, "").unwrap());
    assert!(place.connect().unwrap_err().to_string().contains("no socket"));
}

#[test]
fn place_for_the_same_user_is_private_to_that_user() {
    let place = Place::for_user(None).unwrap();
    assert_eq!(std::fs::metadata(place.path()).unwrap().mode() & 0o777, 0o700);
    let _listener = place.listen().unwrap();
    UnixStream::connect(place.path().join(SOCKET)).unwrap();
    let path = place.path().to_owned();
    drop(place);
    assert!(!path.exists());
}

#[test]
fn directory_of_a_killed_process_is_removed_and_no_other_one_is() {
    let parent = tempfile::tempdir().unwrap();
    let mode = Permissions::from_mode(0o711);
    let make = || leftovers::make_directory(parent.path(), &mode).unwrap();
    let (used, _lock) = make();
    // A killed process runs no destructors, and the kernel closes its files.
    let left = make().0.keep();
    std::fs::create_dir(left.join(INNER)).unwrap();
    drop(UnixListener::bind(left.join(INNER).join(SOCKET)).unwrap());
    let of_another_user = make().0.keep();
    std::os::unix::fs::chown(&of_another_user, Some(USER), None).unwrap();
    let of_another_name = tempfile::tempdir_in(parent.path()).unwrap();
    let target = tempfile::tempdir().unwrap();
    let linked = parent.path().join("vmferry-qemu-link");
    symlink(target.path(), &linked).unwrap();

    leftovers::remove_leftovers(parent.path());
    assert!(!left.exists());
    for kept in [used.path(), &of_another_user, of_another_name.path(), &linked, target.path()] {
        assert!(kept.exists(), "{}", kept.display());
    }
}

/// Processes that start at the same time do not take each other's new directories away.
#[test]
fn new_directories_survive_the_search_for_leftovers() {
    let parent = tempfile::tempdir().unwrap();
    let mode = Permissions::from_mode(0o711);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    leftovers::remove_leftovers(parent.path());
                    let (directory, _lock) =
                        leftovers::make_directory(parent.path(), &mode).unwrap();
                    std::fs::write(directory.path().join(SOCKET), "").unwrap();
                }
            });
        }
    });
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
}
