//! Reads a file sequentially and counts the offset.

use std::io::{self, BufRead, BufReader, Read};

/// Bytes per read.
const BUFFER_BYTES: usize = 256 << 10;

/// Why reading stopped before the end of the file.
#[derive(Debug)]
pub enum Stop {
    /// The file cannot be read, or the callback failed.
    Io(io::Error),
    /// The file ends within a record.
    Cut { offset: u64, what: String, needed: u64, found: u64 },
    /// The content is invalid.
    Broken { offset: u64, what: String, problem: String },
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A file that is read once, from start to end.
pub struct Bytes<R> {
    inner: BufReader<R>,
    offset: u64,
}

impl<R: Read> Bytes<R> {
    pub fn new(from: R) -> Self {
        Self { inner: BufReader::with_capacity(BUFFER_BYTES, from), offset: 0 }
    }

    /// The number of bytes read so far.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the next bytes, at most `most`, without consuming them.
    pub fn peek(&mut self, most: usize) -> io::Result<&[u8]> {
        // The first read fills the buffer, unless the file is shorter.
        let bytes = self.inner.fill_buf()?;
        Ok(&bytes[..bytes.len().min(most)])
    }

    /// Whether the end of the file is reached.
    pub fn is_at_end(&mut self) -> io::Result<bool> {
        Ok(self.inner.fill_buf()?.is_empty())
    }

    /// Reads the next `N` bytes, the beginning of a record `what`.
    pub fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Stop> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what, self.offset)?;
        Ok(bytes)
    }

    /// Fills `into` with bytes of a record that started at `from`.
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

    /// Reads `length` bytes of a record that started at `from`. The memory grows with the bytes
    /// read, because the length may be wrong.
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

    /// Reads the next line with its newline, at most `most` bytes. The last line may have no
    /// newline.
    pub fn line(&mut self, most: u64) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        let read = self.inner.by_ref().take(most).read_until(b'\n', &mut line)?;
        self.offset += read as u64;
        Ok(line)
    }

    /// Reads the rest of the file, at most `most` bytes.
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
