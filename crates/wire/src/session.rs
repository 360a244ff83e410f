//! The token by which a data channel joins its session.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The secret that a data channel presents to join its session. It is sent only on the control
/// channel and never printed.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Token(pub [u8; 16]);

impl PartialEq for Token {
    /// Constant-time comparison.
    fn eq(&self, other: &Self) -> bool {
        let differences = self.0.iter().zip(&other.0).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(differences) == 0
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(secret)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_not_printed() {
        assert_eq!(format!("{:?}", Token([7; 16])), "Token(secret)");
        assert_eq!(Token([7; 16]), Token([7; 16]));
        let mut other = [7; 16];
        other[15] = 8;
        assert_ne!(Token([7; 16]), Token(other));
    }
}
