//! The device state of a machine as bytes: a versioned, self-describing container.
//!
//! A container is a header followed by named sections. All numbers are little-endian:
//!
//! ```text
//! header    magic "VMFSTATE" | format u16 | reserved u16 | sections u32 | crc32c of the above u32
//! section   name [u8; 24], zero-padded | version u16 | flags u16 | instance u32 | length u32
//!           | crc32c of the payload u32 | crc32c of the above u32 | payload
//! ```
//!
//! [`StateReader::parse`] checks these invariants before a caller sees any payload: a checksum
//! covers every byte, the header announces the right number of sections, no section occurs twice,
//! and nothing follows the last one. [`StateReader::refuse_unknown`] then refuses unknown mandatory
//! sections and unknown versions by name, before anything is loaded. A reader ignores an unknown
//! section that is not mandatory.
//!
//! Each section has its own version. A new version of a section comes with a version of the
//! migration protocol ([`SectionKind::since`]). For a host with an older protocol, the writer uses
//! the previous version of the section. A reader reads every version from 1 on. So a guest can
//! move between two releases in both directions.

mod error;
mod reader;
mod writer;

use vmferry_wire::{PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN};

pub use error::StateError;
pub use reader::{Section, StateReader};
pub use writer::StateWriter;

/// The first bytes of every container.
const MAGIC: [u8; 8] = *b"VMFSTATE";
/// The version of the container. Sections have their own versions.
const FORMAT_VERSION: u16 = 1;
/// Bytes of the container header.
const HEADER_BYTES: usize = 20;
/// Bytes of a section's name, padded with zeros.
const NAME_BYTES: usize = 24;
/// Bytes of a section header.
const SECTION_HEADER_BYTES: usize = NAME_BYTES + 20;
/// Section flag: a reader that does not know this section must refuse the whole container.
const FLAG_MANDATORY: u16 = 1;
/// Maximum number of sections. A machine with 8 vCPUs has about 100.
const SECTIONS_MAX: u32 = 4096;

/// A kind of section: its name, and the newest version of its content that this build reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SectionKind {
    /// At most 24 bytes of printable ASCII, unique among the kinds.
    pub name: &'static str,
    /// The newest version. Every version from 1 up to it is read.
    pub version: u16,
    /// The version of the protocol that introduced `version`. For a host with an older protocol,
    /// the previous version is written.
    pub protocol: u16,
    /// Whether a reader that does not know the section must refuse the container.
    pub mandatory: bool,
}

impl SectionKind {
    /// A section that every reader must understand. A name that does not fit is a compile error.
    #[must_use]
    pub const fn mandatory(name: &'static str, version: u16) -> Self {
        assert!(!name.is_empty() && name.len() <= NAME_BYTES && name.is_ascii() && version > 0);
        Self { name, version, protocol: PROTOCOL_VERSION_MIN, mandatory: true }
    }

    /// Sets the version of the protocol that introduced this kind's newest version. It is a compile
    /// error if there is no previous version, or no such protocol.
    #[must_use]
    pub const fn since(self, protocol: u16) -> Self {
        assert!(self.version > 1 && protocol <= PROTOCOL_VERSION_MAX);
        Self { protocol, ..self }
    }

    /// The version of the section for a host that speaks this version of the protocol.
    #[must_use]
    pub const fn version_for(&self, protocol: u16) -> u16 {
        if protocol < self.protocol { self.version - 1 } else { self.version }
    }

    /// A section that a reader may ignore. A name that does not fit is a compile error.
    #[must_use]
    pub const fn optional(name: &'static str, version: u16) -> Self {
        Self { mandatory: false, ..Self::mandatory(name, version) }
    }
}

fn crc32c(bytes: &[u8]) -> u32 {
    // CRC-32/ISCSI is the catalog's name for CRC32C. A 32-bit sum always fits.
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

#[cfg(test)]
mod tests;
