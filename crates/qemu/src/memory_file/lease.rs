//! Write leases: the kernel's proof that no other process has a file open.
//!
//! `F_SETLEASE` with `F_WRLCK` is granted only if the descriptor's open file description is the
//! only one of its inode; a mapping keeps the description that it was created with. That holds for
//! all processes of the machine, whether or not they are visible from here. The lease is released
//! at once: while it is held, a process that opens the file has to wait. Sources: fcntl(2), Linux
//! `fs/locks.c` (`check_conflicting_open`).
//!
//! `unsafe`: calls of `fcntl` that rustix does not wrap. Sound because they take only an open
//! descriptor and numbers.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::process::{self, Mapping};

/// `include/uapi/asm-generic/fcntl.h`: sets the signal that reports an attempt to open a leased
/// file.
const F_SETSIG: libc::c_int = 10;

/// Whether the kernel grants a lease on QEMU's own descriptor of a file. It never grants one for a
/// memfd, nor, without `CAP_LEASE`, for a file that another user owns.
pub fn is_granted(pid: u32, mapping: &Mapping) -> bool {
    process::own_descriptor(pid, mapping).is_ok_and(|file| is_granted_on(&file))
}

/// The same for a descriptor of this process.
pub fn is_granted_on(file: &File) -> bool {
    try_lease(file).is_ok()
}

/// Takes a lease and releases it.
fn try_lease(file: &File) -> io::Result<()> {
    // A process that opens the file in these microseconds waits, and this process gets a signal, so
    // a signal is chosen that is ignored by default.
    control(file, F_SETSIG, libc::SIGURG)?;
    let granted = control(file, libc::F_SETLEASE, libc::F_WRLCK);
    if granted.is_ok() {
        control(file, libc::F_SETLEASE, libc::F_UNLCK)?;
        // The description is QEMU's: restore it.
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
