//! The receiving end of a channel: each frame's head, then its pages where they belong.

use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use anyhow::ensure;
use vmferry_memory::{GuestMemory, PageSink};

use super::frame::{HEAD_BYTES, Head};

/// As much as the engine reads ahead, of a channel whose pages it receives in place.
const AHEAD_BYTES: usize = 1 << 10;

/// From what frames come.
pub trait Inlet: BufRead + Send {
    /// Where pages can be read from, while nothing is in the buffer.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Sends something back.
    ///
    /// # Errors
    /// The socket's.
    fn say(&mut self, bytes: &[u8]) -> io::Result<()>;
}

impl Inlet for BufReader<TcpStream> {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.buffer().is_empty().then(|| self.get_ref().as_fd())
    }

    fn say(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.get_mut().write_all(bytes)
    }
}

/// The inlet of a way that does not encrypt.
pub fn plain(stream: TcpStream) -> Box<dyn Inlet> {
    Box::new(BufReader::with_capacity(AHEAD_BYTES, stream))
}

/// Receives so many frames, and says of each that it has come.
///
/// # Errors
/// The socket's, and frames that are none.
pub fn receive(memory: &GuestMemory, inlet: &mut dyn Inlet, frames: u64) -> anyhow::Result<()> {
    for sequence in 0..frames {
        let mut head = [0; HEAD_BYTES];
        inlet.read_exact(&mut head)?;
        let head = Head::decode(&head);
        ensure!(head.sequence == sequence, "frame {} came as {sequence}", head.sequence);
        let mut sink = memory.sink();
        sink.push(head.run)?;
        fill(&mut sink, inlet)?;
        inlet.say(&(sequence + 1).to_le_bytes())?;
    }
    Ok(())
}

fn fill(sink: &mut PageSink<'_>, from: &mut dyn Inlet) -> io::Result<()> {
    while sink.left_bytes() > 0 {
        let received = match from.descriptor() {
            Some(descriptor) => sink.read_from(descriptor),
            None => from.fill_buf().map(|bytes| sink.put(bytes)).inspect(|taken| {
                from.consume(*taken);
            }),
        };
        match received {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
