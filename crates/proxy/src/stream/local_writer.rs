//! The thread that writes received bytes into the local socket.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use vmferry_codec::{Decompressors, Frame, StreamDecoder};
use vmferry_wire::FrameKind;

use super::{Counters, Stream, StreamFailure};
use crate::packing::MAX_KEPT_PAGES_OF_A_STREAM;

/// Where the bytes of a stream go.
pub trait Output: Send {
    /// Writes them.
    ///
    /// # Errors
    /// Why not.
    fn write(&mut self, bytes: &[u8]) -> Result<(), OutputError>;
}

/// Why bytes were not written.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// The process has closed its socket, or reads no more.
    #[error("the process reads no more")]
    Unread(#[from] io::Error),
    /// The bytes break the rules of their protocol.
    #[error("{problem}")]
    Wrong {
        /// How.
        problem: String,
    },
}

impl Output for UnixStream {
    fn write(&mut self, bytes: &[u8]) -> Result<(), OutputError> {
        Ok(self.write_all(bytes)?)
    }
}

/// Writes until the peer's last byte.
pub struct LocalWriter {
    /// The stream.
    pub stream: Arc<Stream>,
    /// The socket, whose end is announced after the last byte.
    pub socket: UnixStream,
    /// Writes the bytes.
    pub output: Box<dyn Output>,
}

impl LocalWriter {
    /// Writes until the peer's last byte is written, or the stream is over.
    pub fn run(mut self) {
        let decompressors = Decompressors::default();
        let mut decoder = StreamDecoder::new(decompressors, MAX_KEPT_PAGES_OF_A_STREAM);
        let mut unread = false;
        while let Some(frame) = self.stream.next_to_write() {
            let last = frame.header().is_some_and(|header| header.kind == FrameKind::EndOfRound);
            if last && self.stream.is_sheltered() {
                return self.stream.fail(StreamFailure::Deserted);
            } else if last {
                // The process may have gone.
                let _ = self.socket.shutdown(Shutdown::Write);
            } else if !unread {
                match self.write(&mut decoder, &frame) {
                    Ok(()) => {}
                    Err(OutputError::Unread(_)) => {
                        unread = true;
                        self.stream.reads_no_more();
                    }
                    Err(OutputError::Wrong { problem }) => {
                        return self.stream.fail(StreamFailure::Protocol { problem });
                    }
                }
            }
            self.stream.wrote(frame, last);
            if last {
                return;
            }
        }
    }

    fn write(&mut self, decoder: &mut StreamDecoder, frame: &Frame) -> Result<(), OutputError> {
        let decoded = decoder.decode(frame);
        let piece =
            decoded.map_err(|error| OutputError::Wrong { problem: vmferry::chain(&error) })?;
        self.output.write(piece.bytes)?;
        Counters::add(&self.stream.counters.written, piece.bytes.len());
        Ok(())
    }
}
