//! The interface of transports. A VMM with its own transport implements [`Transport`] and builds a
//! [`Channel`](crate::Channel) from it.

use std::any::Any;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// A connection to a peer that carries ordered bytes in both directions at once.
///
/// Dropping it unsplit announces the end as [`Transmit`] describes.
pub trait Transport: Any + fmt::Debug + Send {
    /// A handle that closes the connection from any thread, also after a split.
    fn closer(&self) -> Arc<dyn Close>;

    /// The two halves, for use in two threads.
    fn split(self: Box<Self>) -> (Box<dyn Receive>, Box<dyn Transmit>);
}

/// The receiving half of a [`Transport`].
///
/// `Ok(0)` is an end that the peer announced, after all bytes sent before it. If the transport can
/// distinguish a cut link from such an end, the cut is an error. A transport that authenticates its
/// peer must be able to. A read that times out is an error of kind
/// [`WouldBlock`](io::ErrorKind::WouldBlock) or [`TimedOut`](io::ErrorKind::TimedOut), and the half
/// stays usable.
pub trait Receive: Read + fmt::Debug + Send {
    /// A descriptor from which the following bytes can also be read, if there is one.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Offers received bytes to `take` without copying, piece by piece, until no more are available
    /// or `take` returns less than the length of a piece. `take` returns the number of bytes that
    /// it consumed. Waits if nothing is available. Returns the total number of consumed bytes; 0 is
    /// the end. Returns `None` if the half cannot read without an intermediate buffer.
    fn read_in_place(
        &mut self,
        _take: &mut dyn FnMut(&[u8]) -> usize,
    ) -> Option<io::Result<usize>> {
        None
    }

    /// Size of the read-ahead buffer. Pages pass through it if there is no
    /// [descriptor](Self::descriptor) and no reading [in place](Self::read_in_place).
    fn buffer_bytes(&self) -> usize {
        16 << 10
    }

    /// Limits the wait for the next bytes; `None`, the initial value, waits without limit.
    ///
    /// # Errors
    /// The operating system's error.
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()>;
}

/// The sending half of a [`Transport`].
///
/// A write starts transmission before it returns; no flush is needed. Whole frames are passed in
/// one [`write_vectored`](Write::write_vectored), which accepts as much as suits the transport. If
/// the peer receives nothing for the timeout, that is an error as in [`Receive`].
///
/// Dropping the half announces the end if that is possible without waiting.
pub trait Transmit: Write + fmt::Debug + Send {
    /// Limits the wait for a peer that does not receive; `None`, the initial value, waits without
    /// limit.
    ///
    /// # Errors
    /// The operating system's error.
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Announces the end after all written bytes.
    ///
    /// # Errors
    /// The operating system's error; [`NotConnected`](io::ErrorKind::NotConnected) if the peer has
    /// gone.
    fn finish(&mut self) -> io::Result<()>;
}

/// Closes a [`Transport`] from any thread.
pub trait Close: fmt::Debug + Send + Sync {
    /// Closes both directions at once and wakes the threads that wait on either half. Written data
    /// may be lost. Closing again has no effect.
    fn close(&self);
}
