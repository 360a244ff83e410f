//! Why a state was refused.

/// Why a state cannot be written or read. Offsets are from the start of the container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// The first bytes are not those of a container.
    #[error("this is not a vmferry machine state: it begins with {found:02x?}")]
    NotAState {
        /// Its first bytes, at most eight.
        found: Vec<u8>,
    },
    /// Written by a newer vmferry, in another container format.
    #[error(
        "the machine state has format {found}, and this build reads format {supported}: \
         upgrade this host"
    )]
    Format {
        /// The format in the header.
        found: u16,
        /// The format that this build reads.
        supported: u16,
    },
    /// The state is shorter than its headers announce.
    #[error(
        "the machine state ends in {what} at offset {offset}: {needed} bytes needed, {left} left"
    )]
    Truncated {
        /// The header, a section header, or a section by name.
        what: String,
        /// Where the truncated part begins.
        offset: usize,
        /// Its announced size.
        needed: usize,
        /// The bytes left from `offset` on.
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
        /// The computed checksum.
        found: u32,
        /// The stored checksum.
        expected: u32,
    },
    /// The checksums are right, but the content is not valid.
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
        /// The section's name.
        name: String,
    },
    /// A section written by a newer build.
    #[error(
        "section {name:?} has version {found}, and this build reads up to {supported}: \
         upgrade this host"
    )]
    Version {
        /// The section's name.
        name: String,
        /// The version in the state.
        found: u16,
        /// The newest version that this build reads.
        supported: u16,
    },
    /// A section that the reader needs and the state lacks.
    #[error("the machine state has no section {name:?} (instance {instance})")]
    Missing {
        /// The section's name.
        name: &'static str,
        /// The instance: the vCPU, for example.
        instance: u32,
    },
    /// The payload is larger than a section can be.
    #[error("section {name:?} is too large to be written: {bytes} bytes")]
    TooLarge {
        /// The section's name.
        name: &'static str,
        /// The size of the payload.
        bytes: usize,
    },
}
