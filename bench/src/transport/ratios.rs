//! Ratios between the methods.

use anyhow::{Context, ensure};

use super::DEFAULT_CHANNELS;
use super::case::{Case, Link, Place, Way};
use super::rows::{Cell, Cells};
use crate::aims::{Ratios, Target};

/// A ratio of two methods that were measured under the same conditions.
struct Comparison {
    name: &'static str,
    link: Link,
    /// The method, and the one that it is compared with.
    ways: (Way, Way),
    of: fn(&Cell) -> f64,
    target: Target,
    meaning: &'static str,
}

const COMPARISONS: [Comparison; 6] = [
    Comparison {
        name: "plain_of_raw_socket",
        link: Link::Uncapped,
        ways: (Way::Plain, Way::RawSocket),
        of: |cell| cell.mb_per_s,
        target: Target::AtLeast(0.85),
        meaning: "throughput without a cap, tcp: over a copy through bare sockets",
    },
    Comparison {
        name: "tls_of_raw_rustls",
        link: Link::Uncapped,
        ways: (Way::Tls, Way::RawRustls),
        of: |cell| cell.mb_per_s,
        target: Target::AtLeast(0.85),
        meaning: "throughput without a cap, tls: over a copy through bare rustls",
    },
    Comparison {
        name: "tls_over_plain_capped",
        link: Link::Capped,
        ways: (Way::Tls, Way::Plain),
        of: |cell| cell.total_ms,
        target: Target::AtMost(1.03),
        meaning: "total time at 350 MB/s, tls: over tcp: (published 1.52)",
    },
    Comparison {
        name: "grpc_streamed_over_plain_capped",
        link: Link::Capped,
        ways: (Way::GrpcStreamed, Way::Plain),
        of: |cell| cell.total_ms,
        target: Target::AtMost(1.05),
        meaning: "total time at 350 MB/s, grpc: over tcp: (published 3.86)",
    },
    Comparison {
        name: "grpc_streamed_over_acknowledged_uncapped",
        link: Link::Uncapped,
        ways: (Way::GrpcStreamed, Way::GrpcAcknowledged),
        of: |cell| cell.mb_per_s,
        target: Target::AtLeast(1.5),
        meaning: "throughput without a cap, grpc: over grpc-ack: (published 0.38)",
    },
    Comparison {
        name: "tls_cpu_over_plain",
        link: Link::Uncapped,
        ways: (Way::Tls, Way::Plain),
        of: Cell::cpu_s_per_gb,
        target: Target::AtMost(1.6),
        meaning: "CPU seconds of both sides without a cap, tls: over tcp:",
    },
];

/// Computes all ratios at the default number of channels and the first place. Ratios at every
/// number and place have these in the name.
///
/// # Errors
/// A ratio is not finite or not positive.
pub fn ratios(cells: &Cells, places: &[Place], channels: &[u8]) -> anyhow::Result<Ratios> {
    let mut ratios = Ratios::default();
    let first = places.first().copied().context("there are no places")?;
    for comparison in &COMPARISONS {
        if let Some(value) = comparison.at(cells, first, DEFAULT_CHANNELS) {
            let Comparison { name, target, meaning, .. } = comparison;
            ratios.aim(name, value, *target, meaning);
        }
        for place in places {
            for channels in channels {
                if let Some(value) = comparison.at(cells, *place, *channels) {
                    let name = format!("{}_{channels}ch_{}", comparison.name, place.name());
                    ratios.values.insert(name, value);
                }
            }
        }
    }
    for (name, value) in &ratios.values {
        ensure!(value.is_finite() && *value > 0.0, "{name} is not a valid ratio: {value}");
    }
    Ok(ratios)
}

impl Comparison {
    /// Returns `None` if one of the methods was not compiled in.
    fn at(&self, cells: &Cells, place: Place, channels: u8) -> Option<f64> {
        let of = |way| cells.get(&Case { place, link: self.link, channels, way }).map(self.of);
        Some(of(self.ways.0)? / of(self.ways.1)?)
    }
}
