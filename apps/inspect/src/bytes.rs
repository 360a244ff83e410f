//! A file's bytes in order, with the offset of each, and what ends the reading.

use std::io::{self, BufRead, BufReader, Read};

/// So much is read at a time.
const BUFFER_BYTES: usize = 256 << 10;

/// Why the reading of a file ends before its end.
#[derive(Debug)]
pub enum Stop {
    /// The file can't be read, or whoever is told does not want more.
    Io(io::Error),
    /// The file ends within a record.
    Cut { offset: u64, what: String, needed: u64, found: u64 },
    /// Something is wrong.
    Broken { offset: u64, what: String, problem: String },
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A file that is read once.
pub struct Bytes<R> {
    inner: BufReader<R>,
    offset: u64,
}

impl<R: Read> Bytes<R> {
    pub fn new(from: R) -> Self {
        Self { inner: BufReader::with_capacity(BUFFER_BYTES, from), offset: 0 }
    }

    /// Bytes that were read.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The next bytes, at most so many, without reading on.
    pub fn peek(&mut self, most: usize) -> io::Result<&[u8]> {
        // The first read of a file fills what there is of it, up to the buffer's length.
        let bytes = self.inner.fill_buf()?;
        Ok(&bytes[..bytes.len().min(most)])
    }

    /// Whether nothing follows.
    pub fn is_at_end(&mut self) -> io::Result<bool> {
        Ok(self.inner.fill_buf()?.is_empty())
    }

    /// The next `N` bytes, which `what` begins with.
    pub fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Stop> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what, self.offset)?;
        Ok(bytes)
    }

    /// Fills `into` with bytes of a record that has begun at `from`.
    pub fn fill(&mut self, into: &mut [u8], what: &str, from: u64) -> Result<(), Stop> {
        let mut filled = 0;
        while filled < into.len() {
            match self.read(&mut into[filled..]) {
                Ok(0) => {
                    let needed = self.offset - from + (into.len() - filled) as u64;
                    let found = self.offset - from;
                    return Err(Stop::Cut { offset: from, what: what.into(), needed, found });
                }
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// `length` bytes of a record that has begun at `from`. Memory is taken as they come: a length may be wrong.
    pub fn take(&mut self, length: usize, what: &str, from: u64) -> Result<Vec<u8>, Stop> {
        let mut bytes = Vec::new();
        let end = self.offset + length as u64;
        Read::take(self.by_ref(), length as u64).read_to_end(&mut bytes)?;
        if bytes.len() == length {
            return Ok(bytes);
        }
        let (needed, found) = (end - from, self.offset - from);
        Err(Stop::Cut { offset: from, what: what.into(), needed, found })
    }

    /// The next line with its end, or what there is without one, at most `most` bytes.
    pub fn line(&mut self, most: u64) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        let read = self.inner.by_ref().take(most).read_until(b'\n', &mut line)?;
        self.offset += read as u64;
        Ok(line)
    }

    /// All that is left, at most `most` bytes of it.
    pub fn rest(&mut self, most: u64) -> io::Result<Vec<u8>> {
        let mut rest = Vec::new();
        self.inner.by_ref().take(most).read_to_end(&mut rest)?;
        self.offset += rest.len() as u64;
        Ok(rest)
    }
}

impl<R: Read> Read for Bytes<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(into)?;
        self.offset += read as u64;
        Ok(read)
    }
}
