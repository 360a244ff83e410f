//! A stream of which only its bytes are known.

use std::sync::Arc;

use vmferry::vmm::streamed::{Marks, Recogniser};

use super::main_stream::FILE_HEADER;
use super::multifd::MAGIC as MULTIFD_MAGIC;
use super::{Blocks, MainStream, MultifdChannel};

/// Number of first bytes that tell the kind of a stream.
const TELLING: usize = 4;

/// Finds pages in a stream that may be a migration of QEMU. Its first bytes tell.
#[derive(Debug, Default)]
pub struct AnyStream(Kind);

#[derive(Debug, Default)]
enum Kind {
    /// Fewer bytes than tell.
    #[default]
    Unknown,
    Main(MainStream),
    Multifd(Box<MultifdChannel>),
    Other,
}

impl AnyStream {
    /// A stream from its first byte.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the stream has begun, and not like one of QEMU's. All its bytes are then consumed
    /// without marks.
    #[must_use]
    pub fn is_other(&self) -> bool {
        matches!(self.0, Kind::Other)
    }
}

impl Recogniser for AnyStream {
    fn look(&mut self, bytes: &[u8], marks: &mut Marks) -> usize {
        if matches!(self.0, Kind::Unknown) {
            let blocks = || Arc::new(Blocks::learning());
            let begins = |magic: &[u8]| bytes.iter().zip(magic).all(|(a, b)| a == b);
            let (main, multifd) = (&FILE_HEADER[..TELLING], &MULTIFD_MAGIC[..TELLING]);
            self.0 = match bytes.len() < TELLING {
                true if begins(main) || begins(multifd) => return 0,
                false if begins(main) => Kind::Main(MainStream::new(blocks())),
                false if begins(multifd) => Kind::Multifd(Box::new(MultifdChannel::new(blocks()))),
                _ => Kind::Other,
            };
        }
        match &mut self.0 {
            Kind::Main(stream) => stream.look(bytes, marks),
            Kind::Multifd(channel) => channel.look(bytes, marks),
            Kind::Unknown | Kind::Other => bytes.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_tell_the_kind() {
        let looked = |bytes: &[u8]| {
            let mut stream = AnyStream::new();
            let taken = stream.look(bytes, &mut Marks::default());
            (taken, stream.is_other())
        };
        assert_eq!(looked(b""), (0, false));
        assert_eq!(looked(b"QE"), (0, false));
        assert_eq!(looked(b"\x11\x22\x33"), (0, false));
        assert_eq!(looked(b"QX"), (2, true));
        assert_eq!(looked(b"NBDMAGIC"), (8, true));
        assert!(!looked(b"QEVM\0\0\0\x03").1);
        assert!(!looked(b"\x11\x22\x33\x44\0\0\0\x01").1);
    }
}
