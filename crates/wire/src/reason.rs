//! Why a peer refuses or ends a migration: a code and one bounded line of text.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Maximum length of a reason's text, in bytes.
pub const MAX_REASON_BYTES: usize = 1024;

/// The kind of a reason. Unknown numbers are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "u16", into = "u16")]
pub enum ReasonCode {
    /// 1: the user canceled, or a limit that the user set was reached.
    Cancelled,
    /// 2: a different VMM, machine type or protocol.
    Incompatible,
    /// 3: not the guest that was expected.
    IdentityMismatch,
    /// 4: not the memory slots that were expected.
    LayoutMismatch,
    /// 5: another migration is in progress.
    Busy,
    /// 6: the peer violated the protocol.
    Protocol,
    /// 7: access to guest memory failed.
    Memory,
    /// 8: the guest's state could not be saved or loaded.
    State,
    /// 9: the placed pages differ from the sent pages.
    DigestMismatch,
    /// 10: the link was lost or silent.
    TimedOut,
    /// 11: the journal could not be written.
    Journal,
    /// 12: any other failure.
    Internal,
    /// 13: the VMM refuses the guest.
    VmRefused,
    /// 14: the peer is not authorized.
    Unauthorized,
    /// 15: the guest has powered off.
    PoweredOff,
    /// 16: pages that the destination lacks can't be sent any more.
    PagesLost,
    /// A number from a newer release.
    Other(u16),
}

impl From<u16> for ReasonCode {
    fn from(number: u16) -> Self {
        match number {
            1 => Self::Cancelled,
            2 => Self::Incompatible,
            3 => Self::IdentityMismatch,
            4 => Self::LayoutMismatch,
            5 => Self::Busy,
            6 => Self::Protocol,
            7 => Self::Memory,
            8 => Self::State,
            9 => Self::DigestMismatch,
            10 => Self::TimedOut,
            11 => Self::Journal,
            12 => Self::Internal,
            13 => Self::VmRefused,
            14 => Self::Unauthorized,
            15 => Self::PoweredOff,
            16 => Self::PagesLost,
            other => Self::Other(other),
        }
    }
}

impl From<ReasonCode> for u16 {
    fn from(code: ReasonCode) -> Self {
        match code {
            ReasonCode::Cancelled => 1,
            ReasonCode::Incompatible => 2,
            ReasonCode::IdentityMismatch => 3,
            ReasonCode::LayoutMismatch => 4,
            ReasonCode::Busy => 5,
            ReasonCode::Protocol => 6,
            ReasonCode::Memory => 7,
            ReasonCode::State => 8,
            ReasonCode::DigestMismatch => 9,
            ReasonCode::TimedOut => 10,
            ReasonCode::Journal => 11,
            ReasonCode::Internal => 12,
            ReasonCode::VmRefused => 13,
            ReasonCode::Unauthorized => 14,
            ReasonCode::PoweredOff => 15,
            ReasonCode::PagesLost => 16,
            ReasonCode::Other(other) => other,
        }
    }
}

/// A code and a line of text for the peer's operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// The kind.
    pub code: ReasonCode,
    /// One line without control characters, at most [`MAX_REASON_BYTES`].
    pub text: String,
}

impl Reason {
    /// A reason whose text is safe for the wire and for a terminal: control characters become
    /// spaces, and the text is cut at [`MAX_REASON_BYTES`].
    #[must_use]
    pub fn new(code: ReasonCode, text: &str) -> Self {
        Self { code, text: one_line(text) }
    }

    /// The same reason, sanitized as by [`Reason::new`]: text from a peer may be shown on a
    /// terminal.
    #[must_use]
    pub(crate) fn cleaned(&self) -> Self {
        Self::new(self.code, &self.text)
    }
}

/// A text that is safe for the wire and for a terminal: control characters become spaces, and it is
/// cut at [`MAX_REASON_BYTES`].
#[must_use]
pub fn one_line(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    clean[..clean.floor_char_boundary(MAX_REASON_BYTES)].to_owned()
}

/// Returns a text from the wire if it is one bounded, printable line that is not empty.
pub(crate) fn checked_line(content: &[u8]) -> Result<String, String> {
    let text = std::str::from_utf8(content).map_err(|_| "it is not text".to_owned())?;
    if text.is_empty() || one_line(text) != text {
        return Err("it is empty, too long or not printable".into());
    }
    Ok(text.to_owned())
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_numbers_are_frozen_and_unknown_ones_kept() {
        for number in 0..100 {
            assert_eq!(u16::from(ReasonCode::from(number)), number);
        }
        assert_eq!(u16::from(ReasonCode::Unauthorized), 14);
    }

    #[test]
    fn reason_text_is_bounded_and_sanitized() {
        let reason = Reason::new(ReasonCode::Internal, &"é\n".repeat(1000));
        assert!(reason.text.len() <= MAX_REASON_BYTES);
        assert!(!reason.text.contains('\n'));
    }
}
