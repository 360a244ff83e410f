//! Which releases speak with each other: for people, who read it where two of them do not fit.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest name of a release, in bytes.
pub const MAX_RELEASE_BYTES: usize = 64;

/// What a side is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Release {
    /// The release of vmferry, such as `0.1.0`.
    pub vmferry: String,
    /// The VMM and its release, such as `QEMU 10.0.2`; empty if it says nothing.
    pub vmm: String,
}

impl Release {
    /// This release of vmferry, with a VMM. What is not printable, or too long, is left out of its name.
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
