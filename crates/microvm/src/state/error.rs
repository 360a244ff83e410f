//! Why a state was refused.

/// A state that cannot be written or read. Offsets are from the start of the container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// The first bytes are those of something else.
    #[error("this is not a vmferry machine state: it begins with {found:02x?}")]
    NotAState {
        /// At most eight bytes of it.
        found: Vec<u8>,
    },
    /// Written by a newer vmferry, in another container format.
    #[error(
        "the machine state has format {found}, and this build reads format {supported}: \
         upgrade this host"
    )]
    Format {
        /// In the header.
        found: u16,
        /// By this build.
        supported: u16,
    },
    /// The bytes end before what they announce.
    #[error(
        "the machine state ends in {what} at offset {offset}: {needed} bytes needed, {left} left"
    )]
    Truncated {
        /// The header, a section header, or a section by name.
        what: String,
        /// Where the missing part begins.
        offset: usize,
        /// Its size.
        needed: usize,
        /// What there is of it.
        left: usize,
    },
    /// A checksum does not match.
    #[error(
        "{what} at offset {offset} is corrupt: checksum {found:#010x}, expected {expected:#010x}"
    )]
    Corrupt {
        /// The header, a section header, or a section by name.
        what: String,
        /// Where it begins.
        offset: usize,
        /// Computed from the bytes.
        found: u32,
        /// Stored beside them.
        expected: u32,
    },
    /// The checksums are right and the content is not valid.
    #[error("{what} at offset {offset} is not valid: {reason}")]
    Invalid {
        /// The header, a section header, or a section by name.
        what: String,
        /// Where it begins.
        offset: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A mandatory section that this build does not know.
    #[error(
        "the machine state has a mandatory section {name:?} that this build does not know: \
         upgrade this host"
    )]
    Unknown {
        /// Of the section.
        name: String,
    },
    /// A section written by a newer build.
    #[error(
        "section {name:?} has version {found}, and this build reads up to {supported}: \
         upgrade this host"
    )]
    Version {
        /// Of the section.
        name: String,
        /// In the state.
        found: u16,
        /// By this build.
        supported: u16,
    },
    /// A section that the reader needs and the state lacks.
    #[error("the machine state has no section {name:?} (instance {instance})")]
    Missing {
        /// Of the section.
        name: &'static str,
        /// The vCPU, for example.
        instance: u32,
    },
    /// More than a section can hold.
    #[error("section {name:?} is too large to be written: {bytes} bytes")]
    TooLarge {
        /// Of the section.
        name: &'static str,
        /// Of its payload.
        bytes: usize,
    },
}
