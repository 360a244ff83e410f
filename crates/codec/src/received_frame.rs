//! Reading frames from a channel.

use std::io::{self, Read};

use vmferry_memory::GuestBytes;
use vmferry_wire::{FRAME_HEADER_BYTES, FrameHeader, WireError};

/// A received frame and its buffers, reused from frame to frame.
#[derive(Debug, Default)]
pub struct Frame {
    header: Option<FrameHeader>,
    /// The run table, followed by the payload.
    bytes: GuestBytes,
}

/// Why no frame was read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The channel failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The bytes received are not a frame.
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl Frame {
    /// A frame without buffers; they grow at first use.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads a whole frame and returns its header, or `Ok(None)` if the channel ends between two
    /// frames. Allocations are bounded by the limits of the wire format.
    ///
    /// # Errors
    /// The channel's error, the end of the channel within a frame, or an invalid header.
    pub fn read_from(&mut self, reader: &mut impl Read) -> Result<Option<FrameHeader>, ReadError> {
        let header = self.read_head(reader)?;
        if header.is_some() {
            self.read_payload(reader)?;
        }
        Ok(header)
    }

    /// Reads a frame's header and run table, and returns the header. The payload is next on the
    /// channel. `Ok(None)` as in [`read_from`](Self::read_from).
    ///
    /// # Errors
    /// As [`read_from`](Self::read_from).
    pub fn read_head(&mut self, reader: &mut impl Read) -> Result<Option<FrameHeader>, ReadError> {
        self.header = None;
        let mut header = [0; FRAME_HEADER_BYTES];
        let first = loop {
            match reader.read(&mut header) {
                Ok(0) => return Ok(None),
                Ok(read) => break read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        };
        reader.read_exact(&mut header[first..])?;
        let header = FrameHeader::parse(&header)?;
        self.read_to(header.table_bytes(), 0, reader)?;
        self.header = Some(header);
        Ok(Some(header))
    }

    /// Reads the payload of the frame whose head was read.
    ///
    /// # Errors
    /// The channel's error, or the end of the channel.
    pub fn read_payload(&mut self, reader: &mut impl Read) -> io::Result<()> {
        let Some(header) = self.header else { return Ok(()) };
        let table = header.table_bytes();
        self.read_to(table + header.payload_bytes as usize, table, reader)
    }

    /// Reads into the buffer from offset `from`, until it holds `bytes` bytes.
    fn read_to(&mut self, bytes: usize, from: usize, reader: &mut impl Read) -> io::Result<()> {
        self.bytes.extend_to(bytes);
        reader.read_exact(&mut self.bytes[from..bytes])
    }

    /// The header of the last frame that was read.
    #[must_use]
    pub fn header(&self) -> Option<&FrameHeader> {
        self.header.as_ref()
    }

    /// The bytes of the frame's table. `header` must be this frame's header.
    #[must_use]
    pub fn table(&self, header: &FrameHeader) -> &[u8] {
        &self.bytes[..header.table_bytes()]
    }

    pub(crate) fn payload(&self, header: &FrameHeader) -> &[u8] {
        &self.bytes[header.table_bytes()..][..header.payload_bytes as usize]
    }

    /// The raw part of the payload, and the packed part.
    pub(crate) fn raw_and_packed(&self, header: &FrameHeader) -> (&[u8], &[u8]) {
        let payload = self.payload(header);
        payload.split_at(payload.len() - header.packed_bytes as usize)
    }
}
