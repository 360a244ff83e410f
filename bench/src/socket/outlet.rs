//! What hands frames to a socket, and hears what the receiver says.

use std::io::{self, IoSlice};
use std::net::TcpStream;

use rustix::net::{RecvFlags, recv};

use super::frame::Frame;

/// The sending end of a channel.
pub trait Outlet: Send {
    /// Hands a frame over, behind all that came before.
    ///
    /// # Errors
    /// The socket's.
    fn send(&mut self, frame: Frame) -> io::Result<()>;

    /// Gives back frames that the kernel reads no more, without waiting.
    ///
    /// # Errors
    /// The socket's.
    fn give_back(&mut self, back: &mut Vec<Frame>) -> io::Result<()>;

    /// Sends what was kept back, or waits until the kernel needs something no more. `false` says that there is
    /// nothing of either kind.
    ///
    /// # Errors
    /// The socket's.
    fn wait(&mut self) -> io::Result<bool>;

    /// Reads what the receiver says; 0 is nothing yet, if it is not to wait.
    ///
    /// # Errors
    /// The socket's, its end among them.
    fn hear(&mut self, into: &mut [u8], wait: bool) -> io::Result<usize>;

    /// How often the kernel has said that it needs something no more, and of these, that it had made a copy.
    fn notices(&self) -> Option<(u64, u64)> {
        None
    }
}

/// Reads from a socket, or says that nothing is there.
///
/// # Errors
/// The socket's, its end among them.
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

/// Sends all of it, with as few calls as the socket allows.
///
/// # Errors
/// The call's.
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
