//! Write leases: the kernel's word on whether another process has a file open.
//!
//! `F_SETLEASE` with `F_WRLCK` is granted only if the descriptor's open file description is the
//! only one of its inode; a mapping keeps the description that it was created with. That holds for
//! all processes of the machine, whether or not they are visible from here, at one instant. The
//! lease is released at once: while it is held, a process that opens the file has to wait. Sources:
//! fcntl(2), Linux `fs/locks.c` (`check_conflicting_open`).
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

/// The kernel's word on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lease {
    /// No other process has it open or mapped.
    Granted,
    /// Another process has it open or mapped.
    Refused,
    /// The kernel has not said: vmferry can't fetch the descriptor, may not take leases on the file
    /// (without `CAP_LEASE` only its owner may), or its file system has none.
    Unknown,
}

/// The start of the name that the kernel gives the mapping of a memfd.
const MEMFD: &str = "/memfd:";

/// Asks for a lease on QEMU's own descriptor of a file.
pub fn ask(pid: u32, mapping: &Mapping) -> Lease {
    // The kernel refuses every lease on a memfd: its own descriptor does not count as an open file.
    if mapping.path.starts_with(MEMFD) {
        return Lease::Unknown;
    }
    process::own_descriptor(pid, mapping).map_or(Lease::Unknown, |file| ask_on(&file))
}

/// The same for a descriptor of this process.
pub fn ask_on(file: &File) -> Lease {
    match try_lease(file) {
        Ok(()) => Lease::Granted,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Lease::Refused,
        Err(_) => Lease::Unknown,
    }
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
