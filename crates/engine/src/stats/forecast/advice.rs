//! Why a migration does not converge and what would help, with numbers and in words.

use std::fmt;

use super::Measures;

/// What keeps a migration from converging, and what would help.
#[derive(Clone, Debug, PartialEq)]
pub enum Advice {
    /// No round can bring the downtime below the limit: the handover alone takes longer.
    AllowFixedCost {
        /// The time that the handover takes even if no memory is left to send, in milliseconds.
        fixed_cost_ms: f64,
        /// Bytes of device state that are sent during the handover.
        state_bytes: u64,
        /// A downtime limit that would suffice, in milliseconds.
        downtime_ms: f64,
    },
    /// The guest writes faster than the link carries.
    OutrunsLink {
        /// How much the guest writes.
        writes: Writes,
        /// What the link carries, in bytes of whole pages per second.
        link_bytes_per_s: f64,
        /// Bytes of whole pages divided by the bytes sent for them.
        compression_ratio: f64,
        /// The present throttling of the vCPUs, in percent of their time.
        throttle_percent: u8,
        /// A bandwidth cap that would suffice, in bytes per second, if there is a cap now.
        bandwidth: Option<f64>,
        /// A downtime limit that would suffice, in milliseconds.
        downtime_ms: f64,
    },
}

/// How much a guest writes that writes faster than its link carries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Writes {
    /// It writes all of this number of bytes again while they are sent. Pages written twice in a
    /// round count once, so no higher rate can be measured.
    Again(f64),
    /// This number of bytes of whole pages per second.
    PerSecond(f64),
}

/// The error for a migration that does not converge within its limits.
#[derive(Clone, Debug, PartialEq)]
pub struct NotConverging {
    /// The measurements of its last harvest.
    pub measures: Measures,
}

impl fmt::Display for NotConverging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let it = &self.measures;
        write!(
            f,
            "after {} rounds ({:.1} s) a handover would stop the guest for {:.1} ms, and the \
             limit is {:.1} ms: {}",
            it.rounds,
            it.elapsed_ms / 1e3,
            it.predicted_downtime_ms,
            it.downtime_limit_ms,
            it.advice()
        )
    }
}

impl Measures {
    /// What would help if the migration does not converge.
    #[must_use]
    pub fn advice(&self) -> Advice {
        if self.fixed_cost_ms >= self.downtime_limit_ms {
            return Advice::AllowFixedCost {
                fixed_cost_ms: self.fixed_cost_ms,
                state_bytes: self.state_bytes,
                downtime_ms: (self.fixed_cost_ms * 1.5).ceil(),
            };
        }
        // A set that is rewritten all the time must fit the downtime. Otherwise the link must carry
        // the rate of the guest's writes, plus a quarter.
        let spare_s = (self.downtime_limit_ms - self.fixed_cost_ms) / 1e3;
        let needed = match self.rewrites_all {
            true => self.pending_bytes / spare_s,
            false => self.dirty_bytes_per_s * 1.25,
        };
        let bandwidth =
            |cap: u64| (needed / self.compression_ratio.max(1.0)).max(cap as f64 * 1.25);
        Advice::OutrunsLink {
            writes: match self.rewrites_all {
                true => Writes::Again(self.pending_bytes),
                false => Writes::PerSecond(self.dirty_bytes_per_s),
            },
            link_bytes_per_s: self.link_bytes_per_s,
            compression_ratio: self.compression_ratio,
            throttle_percent: self.throttle_percent,
            bandwidth: self.max_bandwidth.map(bandwidth),
            downtime_ms: (self.predicted_downtime_ms * 1.2).ceil(),
        }
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::AllowFixedCost { fixed_cost_ms, state_bytes, downtime_ms } => write!(
                f,
                "the handover itself takes about {fixed_cost_ms:.1} ms, however little memory is \
                 left{}; allow a downtime of {downtime_ms} ms or more",
                StateWords(state_bytes),
            ),
            Self::OutrunsLink {
                writes,
                link_bytes_per_s,
                compression_ratio,
                throttle_percent,
                bandwidth,
                downtime_ms,
            } => {
                match writes {
                    Writes::Again(bytes) => {
                        let mb = mb(bytes);
                        write!(f, "the guest writes all of {mb:.0} MB again while they are sent")
                    }
                    Writes::PerSecond(bytes) => write!(f, "the guest writes {:.0} MB/s", mb(bytes)),
                }?;
                write!(
                    f,
                    " and the link carries {:.0} MB/s of that{}{}; ",
                    mb(link_bytes_per_s),
                    RatioWords(compression_ratio),
                    ThrottleWords(throttle_percent),
                )?;
                if let Some(wanted) = bandwidth {
                    let mib = (wanted / 1_048_576.0).ceil();
                    write!(f, "raise the bandwidth cap to {mib} MiB/s, ")?;
                }
                write!(
                    f,
                    "allow a downtime of {downtime_ms} ms, take more time from the guest's vCPUs, \
                     or hand it over whatever the downtime"
                )
            }
        }
    }
}

/// A smaller state is not mentioned.
const REMARKABLE_STATE_BYTES: u64 = 1 << 20;

/// The size of the state in words, if it is large enough to matter.
struct StateWords(u64);

impl fmt::Display for StateWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < REMARKABLE_STATE_BYTES {
            return Ok(());
        }
        write!(f, " ({:.1} MB of device state travel in it)", mb(self.0 as f64))
    }
}

/// The compression ratio in words, if compression has an effect.
struct RatioWords(f64);

impl fmt::Display for RatioWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1.1 { Ok(()) } else { write!(f, " (compressed {:.1} to 1)", self.0) }
    }
}

/// The throttling in words, if there is any.
struct ThrottleWords(u8);

impl fmt::Display for ThrottleWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            percent => write!(f, ", with {percent} % of its time taken from it"),
        }
    }
}

/// Bytes as megabytes, for messages.
fn mb(bytes: f64) -> f64 {
    bytes / 1e6
}
