//! What each side of a migration is and can do, which version 2 of the protocol lets it say.

use vmferry_wire::{AlgorithmSet, PROTOCOL_VERSION_MAX};

/// The source's side: how its guest is moved, beside what the user has chosen.
#[derive(Clone, Debug)]
pub struct SourceSide {
    /// Name of the dirty log.
    pub log: &'static str,
    /// The VMM and its release, for people; empty if it says nothing.
    pub vmm: String,
    /// Whether the VMM [streams](crate::streamed) the guest, and decides on rounds and on the pause.
    pub streams: bool,
    /// Bytes that the guest uses of each slot, as far as they are known.
    pub used_bytes: Vec<Option<u64>>,
    /// The version of the protocol that was agreed on.
    pub protocol: u16,
}

impl SourceSide {
    /// A guest whose memory the engine reads, written to by what this log sees, on a channel of the newest protocol.
    #[must_use]
    pub fn new(log: &'static str) -> Self {
        let (vmm, used_bytes) = (String::new(), Vec::new());
        Self { log, vmm, streams: false, used_bytes, protocol: PROTOCOL_VERSION_MAX }
    }
}

/// The destination's side.
#[derive(Clone, Debug)]
pub struct DestinationSide {
    /// The VMM and its release, for people; empty if it says nothing.
    pub vmm: String,
    /// What frames may be packed with.
    pub algorithms: AlgorithmSet,
    /// The version of the protocol that was agreed on.
    pub protocol: u16,
}

impl Default for DestinationSide {
    /// A VMM without a name, on a channel of the newest protocol.
    fn default() -> Self {
        Self { vmm: String::new(), algorithms: AlgorithmSet::ALL, protocol: PROTOCOL_VERSION_MAX }
    }
}

/// Fields of a newer release that were left out.
#[derive(Debug, Default)]
pub(crate) struct UnknownFields {
    /// How many.
    pub count: u64,
    /// The messages that were told of.
    told: Vec<&'static str>,
}

impl UnknownFields {
    /// Counts those of a message; whether that is to be told, which it is once for each kind of message.
    pub fn note(&mut self, message: &'static str, fields: &[u16]) -> bool {
        self.count += fields.len() as u64;
        let news = !self.told.contains(&message);
        if news {
            self.told.push(message);
        }
        news
    }
}
