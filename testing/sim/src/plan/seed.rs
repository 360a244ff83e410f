//! The number of a schedule.

use std::fmt;
use std::str::FromStr;

/// The number of a schedule. The same number gives the same schedule on any machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seed {
    /// Any faults at any time.
    Random(u64),
    /// One fault of one kind, at one message boundary or journal write, by enumeration.
    Boundary(u64),
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Random(number) => write!(f, "random:{number}"),
            Self::Boundary(number) => write!(f, "boundary:{number}"),
        }
    }
}

impl FromStr for Seed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = || format!("`{text}` is not a seed: use random:NUMBER or boundary:NUMBER");
        let (kind, number) = text.split_once(':').ok_or_else(wanted)?;
        let number = number.parse().map_err(|_| wanted())?;
        match kind {
            "random" => Ok(Self::Random(number)),
            "boundary" => Ok(Self::Boundary(number)),
            _ => Err(wanted()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_parses_what_it_displays() {
        for seed in [Seed::Random(17), Seed::Boundary(0)] {
            assert_eq!(seed.to_string().parse(), Ok(seed));
        }
        assert!("17".parse::<Seed>().is_err());
    }
}
