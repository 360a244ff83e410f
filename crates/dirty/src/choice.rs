//! The choice of a dirty log.

use serde::{Deserialize, Serialize};

/// The size of guest memory from which [`LogChoice::Auto`] uses KVM's dirty ring. From this size
/// on, reading even a clean bitmap takes long enough to show in a downtime of milliseconds
/// (`vmferry-bench dirty-log`). KVM must know the choice before vCPUs are created.
pub const RING_FROM_BYTES: u64 = 32 << 30;

/// The user's choice of a dirty log.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    strum::Display,
    strum::EnumString,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_log)]
pub enum LogChoice {
    /// The best log for the guest, chosen by the size of its memory. From [`RING_FROM_BYTES`] on it
    /// is KVM's dirty ring, whose cost depends on the pages written. Below that it is KVM's bitmap,
    /// with manual clear while few pages are dirty and without while many are, as each harvest
    /// measures. For guests without KVM it is userfaultfd.
    #[default]
    Auto,
    /// KVM's bitmap, which protects every reported page at each collect.
    #[serde(rename = "bitmap")]
    #[strum(serialize = "bitmap")]
    KvmBitmap,
    /// KVM's bitmap with manual clear, which protects pages just before they are read.
    #[serde(rename = "clear")]
    #[strum(serialize = "clear")]
    KvmClear,
    /// KVM's dirty ring, whose harvest costs depend on the pages written, not on the size of
    /// memory. The machine must be created for it.
    #[serde(rename = "ring")]
    #[strum(serialize = "ring")]
    KvmRing,
    /// userfaultfd's asynchronous write protection.
    #[serde(rename = "uffd")]
    #[strum(serialize = "uffd")]
    Userfaultfd,
}

fn unknown_log(text: &str) -> String {
    format!("`{text}` is no dirty log: choose auto, bitmap, clear, ring or uffd")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_choices_round_trip_as_text() {
        for text in ["auto", "bitmap", "clear", "ring", "uffd"] {
            assert_eq!(text.parse::<LogChoice>().unwrap().to_string(), text);
        }
        assert!("rings".parse::<LogChoice>().is_err());
    }
}
