//! The release of each side. Shown to people when two releases are incompatible.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Maximum length of a release name, in bytes.
pub const MAX_RELEASE_BYTES: usize = 64;

/// The software of one side of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Release {
    /// The release of vmferry, such as `0.1.0`.
    pub vmferry: String,
    /// The VMM and its release, such as `QEMU 10.0.2`; empty if unknown.
    pub vmm: String,
}

impl Release {
    /// This release of vmferry together with a VMM. Control characters are removed from the VMM's
    /// name, and the name is cut at [`MAX_RELEASE_BYTES`].
    #[must_use]
    pub fn of_this(vmm: &str) -> Self {
        let clean: String = vmm.chars().filter(|c| !c.is_control()).collect();
        let end = clean.floor_char_boundary(MAX_RELEASE_BYTES);
        Self { vmferry: env!("CARGO_PKG_VERSION").into(), vmm: clean[..end].to_owned() }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vmferry {}", self.vmferry)?;
        if self.vmm.is_empty() { Ok(()) } else { write!(f, ", {}", self.vmm) }
    }
}
