//! What carries a channel's bytes. A VMM with a transport of its own implements [`Transport`] and
//! makes a [`Channel`](crate::Channel) of it.

use std::any::Any;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// A connection to a peer that carries bytes in order, both ways at once.
///
/// Dropped whole, it announces the end as [`Transmit`] says.
pub trait Transport: Any + fmt::Debug + Send {
    /// Closes the connection from any thread, also once it is split.
    fn closer(&self) -> Arc<dyn Close>;

    /// The two halves, for two threads.
    fn split(self: Box<Self>) -> (Box<dyn Receive>, Box<dyn Transmit>);
}

/// The receiving half of a [`Transport`].
///
/// `Ok(0)` is the end that the peer announced, after all bytes that were sent before it. Where the
/// transport can tell a cut link from such an end, the cut is an error; one that authenticates its
/// peer must be able to. A read in vain for the time-out is an error of the kind
/// [`WouldBlock`](io::ErrorKind::WouldBlock) or [`TimedOut`](io::ErrorKind::TimedOut), and the half
/// is still good after it.
pub trait Receive: Read + fmt::Debug + Send {
    /// A descriptor from which the bytes that follow can be read as well as from this half, if there is one.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Offers what has come to `take` where it lies, piece by piece, until nothing more is here or `take` leaves some
    /// of a piece: it returns how much it has taken. Waits if nothing has come, and returns how many bytes were taken,
    /// of which 0 is the end. `None` from a half that has nothing to show without a buffer between.
    fn read_in_place(
        &mut self,
        _take: &mut dyn FnMut(&[u8]) -> usize,
    ) -> Option<io::Result<usize>> {
        None
    }

    /// How much is to be read ahead. Where there is no [descriptor](Self::descriptor) and nothing is read
    /// [in place](Self::read_in_place), pages go through a buffer of this size on their way to the guest.
    fn buffer_bytes(&self) -> usize {
        16 << 10
    }

    /// Bounds the wait for the next bytes; `None` waits for ever, as a new half does.
    ///
    /// # Errors
    /// The system's.
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()>;
}

/// The sending half of a [`Transport`].
///
/// What is written is on its way when the call returns, without a flush. Whole frames come in one
/// [`write_vectored`](Write::write_vectored), which takes as much as suits the transport. A peer
/// that takes nothing for the time-out is an error as in [`Receive`].
///
/// Dropping it announces the end as far as that is possible without waiting.
pub trait Transmit: Write + fmt::Debug + Send {
    /// Bounds the wait for a peer that takes nothing; `None` waits for ever, as a new half does.
    ///
    /// # Errors
    /// The system's.
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Announces the end behind everything that was written.
    ///
    /// # Errors
    /// The system's; [`NotConnected`](io::ErrorKind::NotConnected) if the peer is gone already.
    fn finish(&mut self) -> io::Result<()>;
}

/// Closes a [`Transport`] from any thread.
pub trait Close: fmt::Debug + Send + Sync {
    /// Closes both directions at once and wakes whoever waits on either half. What was written may
    /// be lost. Closing again does nothing.
    fn close(&self);
}
