//! The receiving end of a channel. Reads each frame's head, then its pages into their place in
//! memory.

use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use anyhow::ensure;
use vmferry_memory::{GuestMemory, PageSink};

use super::frame::{HEAD_BYTES, Head};

/// Size of the read buffer: as in the engine for channels whose pages are received in place.
const AHEAD_BYTES: usize = 1 << 10;

/// The receiving end of a channel.
pub trait Inlet: BufRead + Send {
    /// The descriptor to read pages from directly. `None` while the buffer is not empty.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Sends an acknowledgement.
    ///
    /// # Errors
    /// The socket failed.
    fn acknowledge(&mut self, bytes: &[u8]) -> io::Result<()>;
}

impl Inlet for BufReader<TcpStream> {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.buffer().is_empty().then(|| self.get_ref().as_fd())
    }

    fn acknowledge(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.get_mut().write_all(bytes)
    }
}

/// Makes the inlet of a method without encryption.
pub fn plain(stream: TcpStream) -> Box<dyn Inlet> {
    Box::new(BufReader::with_capacity(AHEAD_BYTES, stream))
}

/// Receives `frames` frames and acknowledges each.
///
/// # Errors
/// The socket failed, or a frame is invalid.
pub fn receive(memory: &GuestMemory, inlet: &mut dyn Inlet, frames: u64) -> anyhow::Result<()> {
    for sequence in 0..frames {
        let mut head = [0; HEAD_BYTES];
        inlet.read_exact(&mut head)?;
        let head = Head::decode(&head);
        ensure!(
            head.sequence == sequence,
            "received frame {} instead of {sequence}",
            head.sequence
        );
        let mut sink = memory.sink();
        sink.push(head.run)?;
        fill(&mut sink, inlet)?;
        inlet.acknowledge(&(sequence + 1).to_le_bytes())?;
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
