//! Which releases speak with each other: for people, who read it where two of them do not fit.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest name of a release, in bytes.
pub const MAX_RELEASE_BYTES: usize = 64;

/// What a side is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

    /// A name as it comes from the wire.
    pub(crate) fn checked(content: &[u8]) -> Result<String, String> {
        let text = std::str::from_utf8(content).map_err(|_| "it is no text".to_owned())?;
        // What has no name is left out: an empty one would be another form of the same message.
        if text.is_empty() {
            return Err("the name of a release is empty".into());
        }
        if text.len() > MAX_RELEASE_BYTES || text.chars().any(char::is_control) {
            return Err("the name of a release is too long or not printable".into());
        }
        Ok(text.to_owned())
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vmferry {}", self.vmferry)?;
        if self.vmm.is_empty() { Ok(()) } else { write!(f, ", {}", self.vmm) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_made_fit_for_the_wire_and_checked_on_the_other_side() {
        let release = Release::of_this(&format!("QEMU\n 10.0{}", "é".repeat(99)));
        assert!(release.to_string().contains(", QEMU 10.0é"), "{release}");
        assert_eq!(Release::checked(release.vmm.as_bytes()), Ok(release.vmm));
        for bad in [&b""[..], b"a\x1b[2J", b"\xff", &[b'a'; 65]] {
            assert!(Release::checked(bad).is_err());
        }
        assert_eq!(
            Release::of_this("").to_string(),
            concat!("vmferry ", env!("CARGO_PKG_VERSION"))
        );
    }
}
