//! The limits that a user sets on a migration.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What to do when the guest writes faster than the link can send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum WhenStuck {
    /// End the migration; the guest runs on at the source.
    #[default]
    Refuse,
    /// Hand over anyway and accept the resulting downtime.
    SwitchOver,
    /// Hand over with post-copy: the guest fetches the remaining pages while it runs.
    PostCopy,
}

/// Whether the guest may run at the destination before all of its pages have arrived there. It then
/// fetches them from the source, and needs both hosts until it has all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PostCopy {
    /// Every page is sent before the guest runs at the destination.
    #[default]
    Never,
    /// If the rounds do not converge to the downtime limit.
    Auto,
    /// After the round in progress.
    Now,
}

/// The user's limits on a migration.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The longest downtime that the user accepts.
    pub downtime: Duration,
    /// The most rounds with the guest running.
    pub rounds: u32,
    /// The longest time with the guest running.
    pub time: Option<Duration>,
    /// What to do when the rounds or the time are used up.
    pub when_stuck: WhenStuck,
}
