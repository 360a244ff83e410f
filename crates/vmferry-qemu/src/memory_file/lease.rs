//! Write leases: the kernel's own word that nobody else has a file open.
//!
//! `F_SETLEASE` with `F_WRLCK` is granted only if the descriptor's open file description is the one
//! and only of its inode; a mapping keeps the description that it was made with. That holds for all
//! processes of the machine, whether or not they can be seen from here. The lease is given back at
//! once: while it is held, a process that opens the file has to wait. Sources: fcntl(2), Linux
//! `fs/locks.c` (`check_conflicting_open`).
//!
//! `unsafe`: calls of `fcntl` that rustix does not wrap. Sound because they are about an open
//! descriptor and numbers only.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::process::{self, Mapping};

/// `include/uapi/asm-generic/fcntl.h`: which signal says that somebody wants to open a file under a
/// lease.
const F_SETSIG: libc::c_int = 10;

/// Whether the kernel grants a lease on QEMU's own descriptor of a file. A memfd never gets one,
/// nor does a file that another user owns, without `CAP_LEASE`.
pub fn is_granted(pid: u32, mapping: &Mapping) -> bool {
    process::own_descriptor(pid, mapping).is_ok_and(|file| is_granted_on(&file))
}

/// The same of a descriptor that this process has.
pub fn is_granted_on(file: &File) -> bool {
    try_lease(file).is_ok()
}

/// Takes a lease and gives it back.
fn try_lease(file: &File) -> io::Result<()> {
    // A process that opens the file in these microseconds waits, and this process is sent a signal:
    // one that is ignored unless somebody asks for it.
    control(file, F_SETSIG, libc::SIGURG)?;
    let granted = control(file, libc::F_SETLEASE, libc::F_WRLCK);
    if granted.is_ok() {
        control(file, libc::F_SETLEASE, libc::F_UNLCK)?;
        // The description is QEMU's: it is left as it was.
        control(file, libc::F_SETOWN, 0)?;
    }
    control(file, F_SETSIG, 0)?;
    granted
}

fn control(file: &File, command: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as `file` is borrowed, and the argument of these
    // commands is a number.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), command, value) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
