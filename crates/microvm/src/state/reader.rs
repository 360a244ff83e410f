//! Reads a container. It checks everything first, and then gives access to the sections.

use zerocopy::FromBytes;

use super::{
    FLAG_MANDATORY, FORMAT_VERSION, HEADER_BYTES, MAGIC, NAME_BYTES, SECTION_HEADER_BYTES,
    SECTIONS_MAX, SectionKind, StateError, crc32c,
};

/// A container whose form and checksums are right.
#[derive(Debug)]
pub struct StateReader<'a> {
    sections: Vec<Section<'a>>,
}

/// One section of a container.
#[derive(Clone, Copy, Debug)]
pub struct Section<'a> {
    name: &'a str,
    version: u16,
    mandatory: bool,
    instance: u32,
    offset: usize,
    payload: &'a [u8],
}

impl<'a> StateReader<'a> {
    /// Checks the form and every checksum of `bytes`. Copies no payload.
    ///
    /// # Errors
    /// [`StateError`] with the section and the offset of the first fault.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, StateError> {
        let header = take(bytes, 0, HEADER_BYTES, || "the header".into());
        if !bytes.starts_with(&MAGIC[..MAGIC.len().min(bytes.len())]) || bytes.is_empty() {
            return Err(StateError::NotAState { found: bytes[..bytes.len().min(8)].to_vec() });
        }
        let header = header?;
        check(&header[..16], le32(header, 16), 0, || "the header".into())?;
        let format = le16(header, 8);
        if format != FORMAT_VERSION {
            return Err(StateError::Format { found: format, supported: FORMAT_VERSION });
        }
        let count = le32(header, 12);
        let invalid = |what: &str, offset, reason: String| StateError::Invalid {
            what: what.into(),
            offset,
            reason,
        };
        if count > SECTIONS_MAX || le16(header, 10) != 0 {
            return Err(invalid(
                "the header",
                0,
                format!("{count} sections, reserved field {}", le16(header, 10)),
            ));
        }
        let mut sections: Vec<Section<'a>> = Vec::new();
        let mut offset = HEADER_BYTES;
        for index in 0..count {
            let section = Section::parse(bytes, offset, index)?;
            if sections
                .iter()
                .any(|other| other.name == section.name && other.instance == section.instance)
            {
                let reason = format!("instance {} occurs twice", section.instance);
                return Err(invalid(&section.describe(), offset, reason));
            }
            offset = section.offset + section.payload.len();
            sections.push(section);
        }
        if offset != bytes.len() {
            let reason = format!("{} bytes follow the last section", bytes.len() - offset);
            return Err(invalid("the container", offset, reason));
        }
        Ok(Self { sections })
    }

    /// Refuses a state that this build cannot load: one with a mandatory section that is not in
    /// `known`, or with a newer version of a known section. To be called before anything is loaded.
    ///
    /// # Errors
    /// [`StateError::Unknown`] or [`StateError::Version`] with the section's name.
    pub fn refuse_unknown(&self, known: &[&[SectionKind]]) -> Result<(), StateError> {
        for section in &self.sections {
            match known.iter().copied().flatten().find(|kind| kind.name == section.name) {
                Some(kind) => section.check_version(kind)?,
                None if section.mandatory => {
                    return Err(StateError::Unknown { name: section.name.into() });
                }
                None => {}
            }
        }
        Ok(())
    }

    /// The section of this kind and instance.
    ///
    /// # Errors
    /// [`StateError::Missing`], or [`StateError::Version`] if a newer build wrote it.
    pub fn section(&self, kind: &SectionKind, instance: u32) -> Result<Section<'a>, StateError> {
        self.optional(kind, instance)?.ok_or(StateError::Missing { name: kind.name, instance })
    }

    /// The section of this kind and instance, if there is one.
    ///
    /// # Errors
    /// [`StateError::Version`] if a newer build wrote it.
    pub fn optional(
        &self,
        kind: &SectionKind,
        instance: u32,
    ) -> Result<Option<Section<'a>>, StateError> {
        let found = self
            .sections
            .iter()
            .find(|section| section.name == kind.name && section.instance == instance);
        found.map(|section| section.check_version(kind).map(|()| *section)).transpose()
    }

    /// All sections, in the order in which they were written.
    #[must_use]
    pub fn sections(&self) -> &[Section<'a>] {
        &self.sections
    }
}

impl<'a> Section<'a> {
    fn parse(bytes: &'a [u8], at: usize, index: u32) -> Result<Self, StateError> {
        let what = || format!("the header of section {index}");
        let header = take(bytes, at, SECTION_HEADER_BYTES, what)?;
        check(&header[..40], le32(header, 40), at, what)?;
        let end = header[..NAME_BYTES].iter().position(|&byte| byte == 0).unwrap_or(NAME_BYTES);
        let printable = |byte: &u8| byte.is_ascii_graphic();
        let name = std::str::from_utf8(&header[..end])
            .ok()
            .filter(|name| !name.is_empty() && name.as_bytes().iter().all(printable))
            .filter(|_| header[end..NAME_BYTES].iter().all(|&byte| byte == 0));
        let flags = le16(header, 26);
        let (Some(name), true) = (name, flags & !FLAG_MANDATORY == 0) else {
            let reason = format!("name {:02x?}, flags {flags:#x}", &header[..NAME_BYTES]);
            return Err(StateError::Invalid { what: what(), offset: at, reason });
        };
        let mut section = Section {
            name,
            version: le16(header, 24),
            mandatory: flags & FLAG_MANDATORY != 0,
            instance: le32(header, 28),
            offset: at + SECTION_HEADER_BYTES,
            payload: &[],
        };
        section.payload =
            take(bytes, section.offset, le32(header, 32) as usize, || section.describe())?;
        check(section.payload, le32(header, 36), section.offset, || section.describe())?;
        Ok(section)
    }

    fn describe(&self) -> String {
        format!("section {:?} (instance {})", self.name, self.instance)
    }

    fn check_version(&self, kind: &SectionKind) -> Result<(), StateError> {
        if self.version == 0 || self.version > kind.version {
            let (found, supported) = (self.version, kind.version);
            return Err(StateError::Version { name: self.name.into(), found, supported });
        }
        Ok(())
    }

    /// The section's name.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The version of the content.
    #[must_use]
    pub fn version(&self) -> u16 {
        self.version
    }

    /// The number among sections of the same name: the vCPU, for example.
    #[must_use]
    pub fn instance(&self) -> u32 {
        self.instance
    }

    /// The offset of the content in the container, in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The content.
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// The content as one structure of the kernel's ABI.
    ///
    /// # Errors
    /// [`StateError::Invalid`] if the content has another size.
    pub fn abi<T: FromBytes>(&self) -> Result<T, StateError> {
        let size =
            || self.invalid(format!("{} bytes, expected {}", self.payload.len(), size_of::<T>()));
        T::read_from_bytes(self.payload).map_err(|_| size())
    }

    /// The content as at most `max` structures of the kernel's ABI.
    ///
    /// # Errors
    /// [`StateError::Invalid`] if the content's size is too large, or is not a multiple of the
    /// structure's.
    pub fn abi_list<T: FromBytes>(&self, max: usize) -> Result<Vec<T>, StateError> {
        let size = size_of::<T>().max(1);
        if !self.payload.len().is_multiple_of(size) || self.payload.len() / size > max {
            let reason =
                format!("{} bytes, expected at most {max} entries of {size}", self.payload.len());
            return Err(self.invalid(reason));
        }
        let size_is_right =
            |chunk| T::read_from_bytes(chunk).map_err(|_| self.invalid("an entry's size".into()));
        self.payload.chunks_exact(size).map(size_is_right).collect()
    }

    /// An error that the content of this section is not valid, with its name and offset.
    #[must_use]
    pub fn invalid(&self, reason: String) -> StateError {
        StateError::Invalid { what: self.describe(), offset: self.offset, reason }
    }
}

fn take(
    bytes: &[u8],
    offset: usize,
    length: usize,
    what: impl Fn() -> String,
) -> Result<&[u8], StateError> {
    let rest = bytes.get(offset..).unwrap_or_default();
    let truncated =
        || StateError::Truncated { what: what(), offset, needed: length, left: rest.len() };
    rest.get(..length).ok_or_else(truncated)
}

fn check(
    bytes: &[u8],
    expected: u32,
    offset: usize,
    what: impl Fn() -> String,
) -> Result<(), StateError> {
    let found = crc32c(bytes);
    if found != expected {
        return Err(StateError::Corrupt { what: what(), offset, found, expected });
    }
    Ok(())
}

// Both are called only with constant offsets inside headers of constant size.
fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
