//! The device state of a machine as bytes: a versioned container that describes itself.
//!
//! A container is a header and then named sections, everything little-endian:
//!
//! ```text
//! header    magic "VMFSTATE" | format u16 | reserved u16 | sections u32 | crc32c of the above u32
//! section   name [u8; 24], zero-padded | version u16 | flags u16 | instance u32 | length u32
//!           | crc32c of the payload u32 | crc32c of the above u32 | payload
//! ```
//!
//! Invariants, all checked by [`StateReader::parse`] before a caller sees a byte of payload: every
//! byte is covered by a checksum, the number of sections is the one announced, no section occurs
//! twice, and nothing follows the last one. What a section *means* is then checked by
//! [`StateReader::refuse_unknown`]: a mandatory section that this build does not know, or a newer
//! version of one that it does, is refused by name before anything is loaded. A section that is not
//! mandatory may be ignored by a reader that does not know it.

mod error;
mod reader;
mod writer;

pub use error::StateError;
pub use reader::{Section, StateReader};
pub use writer::StateWriter;

/// The first bytes of every container.
const MAGIC: [u8; 8] = *b"VMFSTATE";
/// The version of the container itself; sections have their own.
const FORMAT_VERSION: u16 = 1;
/// Bytes of the container header.
const HEADER_BYTES: usize = 20;
/// Room for a section's name.
const NAME_BYTES: usize = 24;
/// Bytes of a section header.
const SECTION_HEADER_BYTES: usize = NAME_BYTES + 20;
/// Section flag: a reader that does not know this section must refuse the whole container.
const FLAG_MANDATORY: u16 = 1;
/// More sections than this are refused: a machine of 8 vCPUs has about 100.
const SECTIONS_MAX: u32 = 4096;

/// What a section is: a name, and the newest version of its content that this build writes and
/// reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SectionKind {
    /// At most 24 bytes of printable ASCII, unique among the kinds.
    pub name: &'static str,
    /// Written as it is; every version from 1 up to it is read.
    pub version: u16,
    /// Whether a reader that does not know the section must refuse the container.
    pub mandatory: bool,
}

impl SectionKind {
    /// A section that every reader must understand. Panics at compile time on a name that does not
    /// fit.
    #[must_use]
    pub const fn mandatory(name: &'static str, version: u16) -> Self {
        assert!(!name.is_empty() && name.len() <= NAME_BYTES && name.is_ascii() && version > 0);
        Self { name, version, mandatory: true }
    }

    /// A section that a reader may ignore. Panics at compile time on a name that does not fit.
    #[must_use]
    pub const fn optional(name: &'static str, version: u16) -> Self {
        Self { mandatory: false, ..Self::mandatory(name, version) }
    }
}

fn crc32c(bytes: &[u8]) -> u32 {
    // CRC-32/ISCSI is the catalogue's name for CRC32C; a 32-bit sum always fits.
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

#[cfg(test)]
mod tests;
