//! Splits QMP into lines, sans-IO: bytes in, whole lines out.

/// Longest line. The longest answer, the tree of a machine's devices, has less than 1 MiB.
const MOST_LINE_BYTES: usize = 16 << 20;

/// Consumed bytes are removed only from this number on, so that a line is not moved once for each
/// line before it.
const COMPACT_BYTES: usize = 64 << 10;

/// A line that does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a line of more than {} MiB", MOST_LINE_BYTES >> 20)]
pub struct Endless;

/// Bytes of incomplete lines, or of lines that were not taken yet.
#[derive(Debug, Default)]
pub struct Lines {
    bytes: Vec<u8>,
    /// Bytes before this index were returned.
    taken: usize,
    /// There is no line end before this index.
    searched: usize,
}

impl Lines {
    /// Adds bytes that were read.
    pub fn take(&mut self, bytes: &[u8]) {
        if self.taken >= COMPACT_BYTES {
            self.bytes.drain(..self.taken);
            self.searched -= self.taken;
            self.taken = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole line, including its end.
    ///
    /// # Errors
    /// [`Endless`], and again at each later call.
    pub fn next(&mut self) -> Result<Option<&[u8]>, Endless> {
        match self.find() {
            Some(end) => {
                let line = self.taken..end;
                (self.taken, self.searched) = (end, end);
                Ok(Some(&self.bytes[line]))
            }
            None if self.bytes.len() - self.taken > MOST_LINE_BYTES => Err(Endless),
            None => Ok(None),
        }
    }

    /// Whether there is a whole line.
    pub fn has_whole(&self) -> bool {
        self.bytes[self.searched..].contains(&b'\n')
    }

    fn find(&mut self) -> Option<usize> {
        let found = self.bytes[self.searched..].iter().position(|&byte| byte == b'\n');
        let end = found.map(|at| self.searched + at + 1);
        self.searched = end.unwrap_or(self.bytes.len());
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_complete_however_they_are_split() {
        let text: Vec<u8> =
            (0..3000_u32).flat_map(|n| format!("line {n}\n").into_bytes()).collect();
        for piece in [1, 7, 4096, text.len()] {
            let (mut lines, mut found) = (Lines::default(), Vec::new());
            for bytes in text.chunks(piece) {
                lines.take(bytes);
                while let Some(line) = lines.next().unwrap() {
                    found.extend_from_slice(line);
                }
                assert!(!lines.has_whole());
            }
            assert!(found == text);
            assert!(lines.bytes.len() <= COMPACT_BYTES + piece);
        }
    }

    #[test]
    fn endless_line_is_refused() {
        let mut lines = Lines::default();
        let piece = vec![b'x'; 1 << 20];
        for _ in 0..16 {
            lines.take(&piece);
            assert_eq!(lines.next(), Ok(None));
        }
        lines.take(b"y");
        assert_eq!(lines.next(), Err(Endless));
        assert_eq!(lines.next(), Err(Endless));
    }
}
