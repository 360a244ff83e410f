//! System calls that no safe function has: two options of sockets, `MSG_ZEROCOPY` and what the kernel says of it
//! afterwards, and io_uring.
//!
//! Why `unsafe`: the kernel gets addresses, and here it reads from some of them after the call. Why sound: with
//! `MSG_ZEROCOPY` it holds the pages by itself, and only reads; a [`Ring`] owns the frames that it was given
//! until the kernel has let go of them, and leaks those that it never does.

use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::squeue::Flags;
use io_uring::{IoUring, Probe, cqueue, opcode, types};

use super::frame::Frame;

/// Linux's `SO_EE_ORIGIN_ZEROCOPY` and `SO_EE_CODE_ZEROCOPY_COPIED`, which libc does not have.
const ORIGIN_ZERO_COPY: u8 = 5;
const CODE_COPIED: u8 = 1;

/// Linux's `IORING_SEND_ZC_REPORT_USAGE` and `IORING_NOTIF_USAGE_ZC_COPIED`, which io-uring keeps to itself.
const REPORT_USAGE: u16 = 1 << 3;
const USAGE_COPIED: u32 = 1 << 31;

/// Entries of a ring: frames of a chain, and some more whose pages the kernel still holds.
const ENTRIES: u32 = 32;

/// Lets `MSG_ZEROCOPY` mean something.
///
/// # Errors
/// A kernel that does not know it.
pub fn allow_zero_copy(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1)
}

fn set(socket: BorrowedFd<'_>, level: i32, name: i32, value: libc::c_int) -> io::Result<()> {
    let length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel reads an int, which `value` is, and only during the call.
    let set = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), length)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends without a copy, if the kernel can; it says later when it needs the bytes no more. Whoever changes them
/// before sends what nobody knows.
///
/// # Errors
/// The socket's; `ENOBUFS` if too much is under way.
pub fn send_zero_copy(socket: &TcpStream, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    // SAFETY: a message header is integers and pointers, which may all be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = slices.as_ptr().cast_mut().cast();
    message.msg_iovlen = slices.len();
    let flags = libc::MSG_ZEROCOPY | libc::MSG_NOSIGNAL;
    // SAFETY: an `IoSlice` is an iovec. The kernel writes neither the slices nor the bytes; of the bytes it
    // holds the pages for as long as it needs them, whatever becomes of the mapping.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Calls of [`send_zero_copy`], counted from 0 on each socket, whose bytes the kernel needs no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// The first of them.
    pub first: u32,
    /// The last.
    pub last: u32,
    /// Whether the kernel has made a copy after all.
    pub copied: bool,
}

/// What the socket's error queue says next, if it says anything.
///
/// # Errors
/// Errors that are in there instead.
pub fn completed(socket: &TcpStream) -> io::Result<Option<Completed>> {
    // Words, so that it is aligned as control messages are.
    let mut control = [0_u64; 32];
    // SAFETY: see above.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the kernel writes into `control`, which is as long as it was told, and into no other bytes.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    if received < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
    }
    // SAFETY: the kernel has filled in how long the control messages are.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    if header.is_null() {
        return Err(io::Error::other("an error without a message"));
    }
    // SAFETY: it is not null, so there is a header in `control`.
    let kind = unsafe { ((*header).cmsg_level, (*header).cmsg_type) };
    let errors = [(libc::SOL_IP, libc::IP_RECVERR), (libc::SOL_IPV6, libc::IPV6_RECVERR)];
    if !errors.contains(&kind) {
        return Err(io::Error::other(format!("a control message of kind {kind:?}")));
    }
    // SAFETY: messages of this kind have that structure, and `control` has room for it.
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
    /// What the kernel may read, each at the place whose number it knows.
    held: Vec<Option<Frame>>,
    /// Frames of the chain that have not been sent.
    unsent: usize,
    /// How often the kernel has said that it needs a frame no more, and of these, that it has made a copy.
    pub notices: (u64, u64),
}

impl Ring {
    /// A ring for `SEND`, or for `SEND_ZC`.
    ///
    /// # Errors
    /// A kernel that has it not, or not for this process.
    pub fn new(zero_copy: bool) -> io::Result<Self> {
        let ring = IoUring::new(ENTRIES)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let code = if zero_copy { opcode::SendZc::CODE } else { opcode::Send::CODE };
        if !probe.is_supported(code) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Self { ring, zero_copy, held: Vec::new(), unsent: 0, notices: (0, 0) })
    }

    /// Frames that were submitted, and not sent yet.
    pub fn unsent(&self) -> usize {
        self.unsent
    }

    /// Whether the kernel has any frame.
    pub fn holds_any(&self) -> bool {
        self.held.iter().any(Option::is_some)
    }

    /// Sends these frames, one after the other. None may be [unsent](Self::unsent).
    ///
    /// # Errors
    /// The kernel's.
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
            // A short write breaks a chain, so each waits until all of it is sent.
            let entry = if left > 0 { entry.flags(Flags::IO_LINK) } else { entry };
            match free {
                Some(place) => self.held[place] = Some(frame),
                None => self.held.push(Some(frame)),
            }
            // SAFETY: the frame's buffer stays where it is until `collect` has taken it out of `held`, when the
            // kernel has said that it needs it no more, and nobody writes it there; `drop` leaks it.
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

    /// Waits until there is something to collect.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes frames back that the kernel needs no more.
    ///
    /// # Errors
    /// A frame that was not sent whole.
    pub fn collect(&mut self, back: &mut Vec<Frame>) -> io::Result<()> {
        let mut failed = None;
        for completion in self.ring.completion() {
            let place = completion.user_data() as usize;
            let (result, flags) = (completion.result(), completion.flags());
            let Some(held) = self.held.get_mut(place) else { continue };
            if cqueue::notif(flags) {
                self.notices.0 += 1;
                self.notices.1 += u64::from(result as u32 & USAGE_COPIED != 0);
            } else {
                self.unsent -= 1;
                let whole = held.as_ref().map_or(0, |frame| frame.whole().len());
                if result < 0 {
                    failed = Some(io::Error::from_raw_os_error(-result));
                } else if result as usize != whole {
                    failed = Some(io::ErrorKind::WriteZero.into());
                }
            }
            // `SEND_ZC` speaks twice.
            if !cqueue::more(flags) {
                back.extend(held.take());
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel may read these still.
        std::mem::forget(std::mem::take(&mut self.held));
    }
}
