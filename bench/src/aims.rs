//! Ratios, and what was aimed at with some of them.

use std::collections::BTreeMap;

use serde::Serialize;

/// A ratio with an aim.
#[derive(Clone, Debug, Serialize)]
pub struct Aim {
    /// Its name.
    pub ratio: String,
    /// What it is.
    pub value: f64,
    /// What it should be.
    pub aim: String,
    /// Whether it is.
    pub met: &'static str,
    /// What it says.
    pub meaning: &'static str,
}

/// All ratios, and those with an aim once more.
#[derive(Clone, Debug, Default)]
pub struct Ratios {
    /// By name.
    pub values: BTreeMap<String, f64>,
    /// In an order for reading.
    pub aims: Vec<Aim>,
}

/// What is aimed at.
#[derive(Clone, Copy, Debug)]
pub enum Wanted {
    /// This, or more.
    AtLeast(f64),
    /// This, or less.
    AtMost(f64),
}

impl Ratios {
    /// Adds a ratio with an aim.
    pub fn aim(&mut self, ratio: &str, value: f64, wanted: Wanted, meaning: &'static str) {
        let (met, aim) = match wanted {
            Wanted::AtLeast(least) => (value >= least, format!(">= {least}")),
            Wanted::AtMost(most) => (value <= most, format!("<= {most}")),
        };
        let met = if met { "yes" } else { "no" };
        self.values.insert(ratio.to_owned(), value);
        self.aims.push(Aim { ratio: ratio.to_owned(), value, aim, met, meaning });
    }
}
