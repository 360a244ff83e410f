//! What an agent costs its host.

use anyhow::Context;
use serde::Serialize;

use super::place::Place;
use crate::qemus::process_cpu_s;

/// When an agent is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum When {
    Joined,
    Moved,
    /// All guests run on its host.
    Published,
    MovedAway,
}

impl When {
    fn name(self) -> &'static str {
        match self {
            Self::Joined => "has joined",
            Self::Moved => "has moved guests",
            Self::Published => "has published its guests",
            Self::MovedAway => "has moved one of them away",
        }
    }
}

/// The memory of an agent's process.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct AgentMemory {
    #[serde(skip)]
    pub when: When,
    agent: &'static str,
    /// The guests that it publishes.
    guests: usize,
    pub rss_mib: f64,
    /// The most so far.
    peak_rss_mib: f64,
}

impl AgentMemory {
    /// That of the first host's agent.
    pub fn now(place: &Place, when: When, guests: usize) -> anyhow::Result<Self> {
        let path = format!("/proc/{}/status", place.hosts[0].agent()?);
        let status = std::fs::read_to_string(path)?;
        let mib = |name: &str| -> anyhow::Result<f64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|line| line.strip_prefix(':')?.trim().strip_suffix(" kB"));
            Ok(kib.with_context(|| format!("a process has no {name}"))?.parse::<f64>()? / 1024.0)
        };
        let (rss_mib, peak_rss_mib) = (mib("VmRSS")?, mib("VmHWM")?);
        Ok(Self { when, agent: when.name(), guests, rss_mib, peak_rss_mib })
    }
}

/// CPU time of the first host's agent so far, in seconds.
pub fn cpu_s(place: &Place) -> anyhow::Result<f64> {
    process_cpu_s(place.hosts[0].agent()?)
}
