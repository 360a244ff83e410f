//! Which log to use.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The size of a guest's memory from which on [`LogChoice::Auto`] takes KVM's dirty ring: then even a clean
/// bitmap takes so long to read that it shows in a downtime of milliseconds (`vmferry-bench dirty-log`).
/// KVM wants to know it before there are vCPUs.
pub const RING_FROM_BYTES: u64 = 32 << 30;

/// The user's choice of a dirty log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LogChoice {
    /// The best that there is for the guest. By the size of its memory: from [`RING_FROM_BYTES`] on KVM's
    /// dirty ring, which costs what was written; below that KVM's bitmap, and by what each harvest
    /// measures, with manual clear while little is dirty and without while much is. userfaultfd for
    /// guests without KVM.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// KVM's bitmap, which protects everything at each collect.
    #[serde(rename = "bitmap")]
    KvmBitmap,
    /// KVM's bitmap with manual clear, which protects pages just before they are read.
    #[serde(rename = "clear")]
    KvmClear,
    /// KVM's dirty ring, whose harvest costs what was written and not what the memory is large. The
    /// machine must be made for it.
    #[serde(rename = "ring")]
    KvmRing,
    /// userfaultfd's asynchronous write protection.
    #[serde(rename = "uffd")]
    Userfaultfd,
}

impl fmt::Display for LogChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::KvmBitmap => "bitmap",
            Self::KvmClear => "clear",
            Self::KvmRing => "ring",
            Self::Userfaultfd => "uffd",
        })
    }
}

impl FromStr for LogChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Auto, Self::KvmBitmap, Self::KvmClear, Self::KvmRing, Self::Userfaultfd]
            .into_iter()
            .find(|choice| choice.to_string() == text)
            .ok_or_else(|| {
                format!("`{text}` is no dirty log: choose auto, bitmap, clear, ring or uffd")
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_read_as_they_are_printed() {
        for text in ["auto", "bitmap", "clear", "ring", "uffd"] {
            assert_eq!(text.parse::<LogChoice>().unwrap().to_string(), text);
        }
        assert!("rings".parse::<LogChoice>().is_err());
    }
}
