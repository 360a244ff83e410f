//! Writes a container.

use vmferry_memory::GuestBytes;
use vmferry_wire::PROTOCOL_VERSION_MAX;
use zerocopy::{Immutable, IntoBytes};

use super::{
    FLAG_MANDATORY, FORMAT_VERSION, HEADER_BYTES, MAGIC, NAME_BYTES, SECTION_HEADER_BYTES,
    SectionKind, StateError, crc32c,
};

/// Collects sections in the order in which they are written. [`StateWriter::finish`] returns the
/// bytes.
#[derive(Debug)]
pub struct StateWriter {
    bytes: GuestBytes,
    sections: u32,
    /// The reader's version of the protocol.
    protocol: u16,
}

impl Default for StateWriter {
    fn default() -> Self {
        Self::new()
    }
}

impl StateWriter {
    /// Creates an empty container for a host of this release.
    #[must_use]
    pub fn new() -> Self {
        Self::for_protocol(PROTOCOL_VERSION_MAX)
    }

    /// Creates an empty container for a host that speaks this version of the migration protocol.
    #[must_use]
    pub fn for_protocol(protocol: u16) -> Self {
        Self { bytes: [0; HEADER_BYTES].into(), sections: 0, protocol }
    }

    /// The version in which the content of a section must be written.
    #[must_use]
    pub fn version_of(&self, kind: &SectionKind) -> u16 {
        kind.version_for(self.protocol)
    }

    /// Appends a section. Its content must have the version of [`version_of`](Self::version_of).
    ///
    /// # Errors
    /// [`StateError::TooLarge`] for more than 4 GiB.
    pub fn section(
        &mut self,
        kind: &SectionKind,
        instance: u32,
        payload: &[u8],
    ) -> Result<(), StateError> {
        let too_large = |_| StateError::TooLarge { name: kind.name, bytes: payload.len() };
        let length = u32::try_from(payload.len()).map_err(too_large)?;
        let mut header = [0; SECTION_HEADER_BYTES];
        // `SectionKind::mandatory` checks that the name fits, but the field is public, so the name
        // is cut here as well.
        let name = &kind.name.as_bytes()[..kind.name.len().min(NAME_BYTES)];
        header[..name.len()].copy_from_slice(name);
        header[24..26].copy_from_slice(&self.version_of(kind).to_le_bytes());
        header[26..28]
            .copy_from_slice(&(if kind.mandatory { FLAG_MANDATORY } else { 0 }).to_le_bytes());
        header[28..32].copy_from_slice(&instance.to_le_bytes());
        header[32..36].copy_from_slice(&length.to_le_bytes());
        header[36..40].copy_from_slice(&crc32c(payload).to_le_bytes());
        let sum = crc32c(&header[..40]);
        header[40..44].copy_from_slice(&sum.to_le_bytes());
        self.bytes.extend_from_slice(&header);
        self.bytes.extend_from_slice(payload);
        self.sections += 1;
        Ok(())
    }

    /// Appends a structure of the kernel's ABI, or a slice of them, byte for byte.
    ///
    /// # Errors
    /// As [`StateWriter::section`].
    pub fn abi<T: IntoBytes + Immutable + ?Sized>(
        &mut self,
        kind: &SectionKind,
        instance: u32,
        value: &T,
    ) -> Result<(), StateError> {
        self.section(kind, instance, value.as_bytes())
    }

    /// Completes the header and returns the container.
    #[must_use]
    pub fn finish(mut self) -> GuestBytes {
        self.bytes[0..8].copy_from_slice(&MAGIC);
        self.bytes[8..10].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        self.bytes[12..16].copy_from_slice(&self.sections.to_le_bytes());
        let sum = crc32c(&self.bytes[..16]);
        self.bytes[16..20].copy_from_slice(&sum.to_le_bytes());
        self.bytes
    }
}
