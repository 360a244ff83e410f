//! System calls without a safe wrapper: `MSG_ZEROCOPY` with its socket option and completions, and
//! io_uring.
//!
//! Why `unsafe`: the kernel gets addresses, and it reads from some of them after the call returns.
//! Why sound: with `MSG_ZEROCOPY` the kernel holds references to the pages and only reads them. A
//! [`Ring`] owns its frames until the kernel has released them, and leaks the frames that it never
//! releases.

use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::squeue::Flags;
use io_uring::{IoUring, Probe, cqueue, opcode, types};

use super::frame::Frame;
use super::outlet::Notices;

/// Linux's `SO_EE_ORIGIN_ZEROCOPY` and `SO_EE_CODE_ZEROCOPY_COPIED`, which libc does not define.
const ORIGIN_ZERO_COPY: u8 = 5;
const CODE_COPIED: u8 = 1;

/// Linux's `IORING_SEND_ZC_REPORT_USAGE` and `IORING_NOTIF_USAGE_ZC_COPIED`, which io-uring does
/// not export.
const REPORT_USAGE: u16 = 1 << 3;
const USAGE_COPIED: u32 = 1 << 31;

/// Entries of a ring: the frames of a chain, and frames whose pages the kernel still holds.
const ENTRIES: u32 = 32;

/// Enables `MSG_ZEROCOPY` on a socket.
///
/// # Errors
/// The kernel does not support it.
pub fn allow_zero_copy(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1)
}

fn set(socket: BorrowedFd<'_>, level: i32, name: i32, value: libc::c_int) -> io::Result<()> {
    let length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel reads an int during the call, and `value` is one.
    let set = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), length)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends without a copy if the kernel can. The kernel reports later when it no longer needs the
/// bytes; until then a change to them may or may not be sent.
///
/// # Errors
/// The socket failed. `ENOBUFS` means that too much is in flight.
pub fn send_zero_copy(socket: &TcpStream, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    // SAFETY: a message header consists of integers and pointers, which may all be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = slices.as_ptr().cast_mut().cast();
    message.msg_iovlen = slices.len();
    let flags = libc::MSG_ZEROCOPY | libc::MSG_NOSIGNAL;
    // SAFETY: an `IoSlice` is an iovec. The kernel writes neither the slices nor the bytes. It
    // holds references to the bytes' pages for as long as it needs them, even if they are unmapped.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// A range of calls of [`send_zero_copy`], counted from 0 on each socket, whose bytes the kernel no
/// longer needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// The first call.
    pub first: u32,
    /// The last call.
    pub last: u32,
    /// Whether the kernel copied the bytes after all.
    pub copied: bool,
}

/// Reads the next completion from the socket's error queue, if there is one.
///
/// # Errors
/// The error queue contained an error.
pub fn completed(socket: &TcpStream) -> io::Result<Option<Completed>> {
    // The array has 64-bit elements so that it is aligned for control messages.
    let mut control = [0_u64; 32];
    // SAFETY: as in `send_zero_copy`.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the kernel writes only into `control`, whose length it was given.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    if received < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
    }
    // SAFETY: the kernel has stored the length of the control messages.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    if header.is_null() {
        return Err(io::Error::other("the error queue has an entry without a control message"));
    }
    // SAFETY: the pointer is not null, so there is a header in `control`.
    let kind = unsafe { ((*header).cmsg_level, (*header).cmsg_type) };
    let errors = [(libc::SOL_IP, libc::IP_RECVERR), (libc::SOL_IPV6, libc::IPV6_RECVERR)];
    if !errors.contains(&kind) {
        return Err(io::Error::other(format!("unexpected control message of kind {kind:?}")));
    }
    // SAFETY: messages of this kind contain that structure, and `control` has room for it.
    let error: libc::sock_extended_err =
        unsafe { libc::CMSG_DATA(header).cast::<libc::sock_extended_err>().read_unaligned() };
    if error.ee_errno != 0 || error.ee_origin != ORIGIN_ZERO_COPY {
        return Err(io::Error::from_raw_os_error(error.ee_errno as i32));
    }
    let copied = error.ee_code & CODE_COPIED != 0;
    Ok(Some(Completed { first: error.ee_info, last: error.ee_data, copied }))
}

/// An io_uring that sends frames.
pub struct Ring {
    ring: IoUring,
    zero_copy: bool,
    /// Frames that the kernel may read. The index is the entry's user data.
    held: Vec<Option<Frame>>,
    /// Frames of the chain that have not been sent.
    unsent: usize,
    /// Notifications that the kernel no longer needs a frame, and how many of them reported a copy.
    pub notices: Notices,
}

impl Ring {
    /// Makes a ring for `SEND` or `SEND_ZC`.
    ///
    /// # Errors
    /// The kernel does not support it, or does not allow it for this process.
    pub fn new(zero_copy: bool) -> io::Result<Self> {
        let ring = IoUring::new(ENTRIES)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let code = if zero_copy { opcode::SendZc::CODE } else { opcode::Send::CODE };
        if !probe.is_supported(code) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Self { ring, zero_copy, held: Vec::new(), unsent: 0, notices: Notices::default() })
    }

    /// Frames that were submitted and not yet sent.
    pub fn unsent(&self) -> usize {
        self.unsent
    }

    /// Whether the kernel holds any frame.
    pub fn holds_any(&self) -> bool {
        self.held.iter().any(Option::is_some)
    }

    /// Sends these frames in order. All earlier frames must have been [sent](Self::unsent).
    ///
    /// # Errors
    /// The system call failed.
    pub fn submit(
        &mut self,
        socket: &TcpStream,
        frames: impl ExactSizeIterator<Item = Frame>,
    ) -> io::Result<()> {
        let mut left = frames.len();
        for frame in frames {
            left -= 1;
            let free = self.held.iter().position(Option::is_none);
            let place = free.unwrap_or(self.held.len());
            let entry = self.entry(socket, frame.whole()).user_data(place as u64);
            // A short write breaks the chain, so each entry waits until all of it is sent.
            let entry = if left > 0 { entry.flags(Flags::IO_LINK) } else { entry };
            match free {
                Some(place) => self.held[place] = Some(frame),
                None => self.held.push(Some(frame)),
            }
            // SAFETY: the frame's buffer stays in `held` until `collect` removes it, which happens
            // after the kernel has released it. Nothing writes it there, and `drop` leaks it.
            unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
            self.unsent += 1;
        }
        self.ring.submit().map(|_| ())
    }

    fn entry(&self, socket: &TcpStream, bytes: &[u8]) -> io_uring::squeue::Entry {
        let (socket, length) = (types::Fd(socket.as_raw_fd()), bytes.len() as u32);
        let flags = libc::MSG_WAITALL | libc::MSG_NOSIGNAL;
        if self.zero_copy {
            let send = opcode::SendZc::new(socket, bytes.as_ptr(), length).flags(flags);
            send.zc_flags(REPORT_USAGE).build()
        } else {
            opcode::Send::new(socket, bytes.as_ptr(), length).flags(flags).build()
        }
    }

    /// Waits until there is a completion to collect.
    ///
    /// # Errors
    /// The system call failed.
    pub fn wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes back the frames that the kernel has released.
    ///
    /// # Errors
    /// A frame was not sent completely.
    pub fn collect(&mut self, back: &mut Vec<Frame>) -> io::Result<()> {
        let mut failed = None;
        for completion in self.ring.completion() {
            let place = completion.user_data() as usize;
            let (result, flags) = (completion.result(), completion.flags());
            let Some(held) = self.held.get_mut(place) else { continue };
            if cqueue::notif(flags) {
                self.notices.all += 1;
                self.notices.copied += u64::from(result as u32 & USAGE_COPIED != 0);
            } else {
                self.unsent -= 1;
                let whole = held.as_ref().map_or(0, |frame| frame.whole().len());
                if result < 0 {
                    failed = Some(io::Error::from_raw_os_error(-result));
                } else if result as usize != whole {
                    failed = Some(io::ErrorKind::WriteZero.into());
                }
            }
            // `SEND_ZC` completes twice: when the frame is sent and when it is released.
            if !cqueue::more(flags) {
                back.extend(held.take());
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel may still read these.
        std::mem::forget(std::mem::take(&mut self.held));
    }
}
