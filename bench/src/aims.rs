//! Ratios between measurements, and the targets for some of them.

use std::collections::BTreeMap;

use serde::Serialize;

/// A ratio that has a target.
#[derive(Clone, Debug, Serialize)]
pub struct Aim {
    /// The ratio's name.
    pub ratio: String,
    /// The measured value.
    pub value: f64,
    /// The target, such as `>= 2`.
    pub aim: String,
    /// `yes` if the value meets the target, otherwise `no`.
    pub met: &'static str,
    /// One line that explains the ratio.
    pub meaning: &'static str,
}

/// All ratios. Those with a target are also listed in `aims`.
#[derive(Clone, Debug, Default)]
pub struct Ratios {
    /// Every ratio by name.
    pub values: BTreeMap<String, f64>,
    /// The ratios with a target, in reading order.
    pub aims: Vec<Aim>,
}

/// The target for a ratio.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    /// The ratio should be at least this.
    AtLeast(f64),
    /// The ratio should be at most this.
    AtMost(f64),
}

impl Ratios {
    /// Adds a ratio that has a target.
    pub fn aim(&mut self, ratio: &str, value: f64, target: Target, meaning: &'static str) {
        let (met, aim) = match target {
            Target::AtLeast(least) => (value >= least, format!(">= {least}")),
            Target::AtMost(most) => (value <= most, format!("<= {most}")),
        };
        let met = if met { "yes" } else { "no" };
        self.values.insert(ratio.to_owned(), value);
        self.aims.push(Aim { ratio: ratio.to_owned(), value, aim, met, meaning });
    }
}
