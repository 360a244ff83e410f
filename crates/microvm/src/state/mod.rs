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
//!
//! The content of a section changes by a version of its own, which comes with a version of the migration protocol
//! ([`SectionKind::since`]): who writes for a host that speaks an older protocol writes the version before, and every
//! version from 1 on is read. So a guest moves between two releases both ways.

mod error;
mod reader;
mod writer;

use vmferry_wire::{PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN};

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

/// What a section is: a name, and the newest version of its content that this build reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SectionKind {
    /// At most 24 bytes of printable ASCII, unique among the kinds.
    pub name: &'static str,
    /// Every version from 1 up to it is read, and it is written for whoever speaks `protocol`.
    pub version: u16,
    /// The version of the protocol that `version` came with: for older ones the version before is written.
    pub protocol: u16,
    /// Whether a reader that does not know the section must refuse the container.
    pub mandatory: bool,
}

impl SectionKind {
    /// A section that every reader must understand. Panics at compile time on a name that does not
    /// fit.
    #[must_use]
    pub const fn mandatory(name: &'static str, version: u16) -> Self {
        assert!(!name.is_empty() && name.len() <= NAME_BYTES && name.is_ascii() && version > 0);
        Self { name, version, protocol: PROTOCOL_VERSION_MIN, mandatory: true }
    }

    /// The same kind, whose newest version came with this version of the protocol. Panics at compile time where there
    /// is no version before it, or no such protocol.
    #[must_use]
    pub const fn since(self, protocol: u16) -> Self {
        assert!(self.version > 1 && protocol <= PROTOCOL_VERSION_MAX);
        Self { protocol, ..self }
    }

    /// The version that a host reads that speaks this version of the protocol.
    #[must_use]
    pub const fn version_for(&self, protocol: u16) -> u16 {
        if protocol < self.protocol { self.version - 1 } else { self.version }
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
