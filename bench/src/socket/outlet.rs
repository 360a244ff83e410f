//! The sending interface of a channel: sends frames and receives acknowledgements.

use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::ops::AddAssign;

use rustix::net::{RecvFlags, recv};

use super::frame::Frame;

/// The kernel's notifications about sends without a copy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Notices {
    /// Notifications that the kernel no longer needs the bytes.
    pub all: u64,
    /// How many of them reported that the kernel copied the bytes after all.
    pub copied: u64,
}

impl AddAssign for Notices {
    fn add_assign(&mut self, other: Self) {
        self.all += other.all;
        self.copied += other.copied;
    }
}

/// The sending end of a channel.
pub trait Outlet: Send {
    /// Sends a frame after all earlier frames.
    ///
    /// # Errors
    /// The socket failed.
    fn send(&mut self, frame: Frame) -> io::Result<()>;

    /// Gives back the frames that the kernel no longer reads. Does not wait.
    ///
    /// # Errors
    /// The socket failed.
    fn give_back(&mut self, back: &mut Vec<Frame>) -> io::Result<()>;

    /// Sends what was held back, or waits until the kernel releases a frame. Returns `false` if
    /// there was nothing to send and nothing to wait for.
    ///
    /// # Errors
    /// The socket failed.
    fn wait(&mut self) -> io::Result<bool>;

    /// Reads acknowledgements. Without `wait`, returns 0 if there are none.
    ///
    /// # Errors
    /// The socket failed or was closed.
    fn hear(&mut self, into: &mut [u8], wait: bool) -> io::Result<usize>;

    /// Notifications that the kernel released bytes, and how many of them reported a copy.
    fn notices(&self) -> Option<Notices> {
        None
    }
}

/// Reads from a socket. Without `wait`, returns 0 if there is nothing to read.
///
/// # Errors
/// The socket failed or was closed.
pub fn hear(stream: &TcpStream, into: &mut [u8], wait: bool) -> io::Result<usize> {
    let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
    loop {
        match recv(stream, &mut *into, flags).map_err(io::Error::from) {
            Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((_, read)) => return Ok(read),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !wait => return Ok(0),
            Err(error) => return Err(error),
        }
    }
}

/// Sends all of the slices with as few calls as the socket allows.
///
/// # Errors
/// A call failed.
pub fn send_all(
    mut slices: &mut [IoSlice<'_>],
    mut call: impl FnMut(&[IoSlice<'_>]) -> io::Result<usize>,
) -> io::Result<()> {
    while !slices.is_empty() {
        match call(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => IoSlice::advance_slices(&mut slices, sent),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
