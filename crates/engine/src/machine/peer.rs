//! Properties of each side of a migration, which are exchanged since protocol version 2.

use vmferry_wire::{AlgorithmSet, FetchLanes, PROTOCOL_VERSION_MAX};

use vmferry_handover::WitnessId;

use crate::config::SourceConfig;

/// The fetch lanes of a carried guest are [tunnels](crate::data::tunnel): one for what threads wait
/// for, and one for the stream that the VMM has sent so far.
const STREAM_LANES: FetchLanes = FetchLanes { faults: 1, background: 1 };

/// The source's side: how its guest is moved, beyond the user's settings.
#[derive(Clone, Debug)]
pub struct SourceSide {
    /// Name of the dirty log.
    pub log: &'static str,
    /// The VMM and its release, for people; empty if it is not announced.
    pub vmm: String,
    /// Whether the guest is carried: its VMM [streams](crate::vmm::streamed) it, and decides on
    /// rounds and on the pause.
    pub streams: bool,
    /// Whether the VMM of a carried guest has post-copy of its own, and why not. `None` if it was
    /// not asked, because the user does not want post-copy.
    pub vmm_post_copy: Option<Result<(), String>>,
    /// Bytes that the guest uses of each slot, as far as they are known.
    pub used_bytes: Vec<Option<u64>>,
    /// The session's witness.
    pub witness: Option<WitnessId>,
    /// The negotiated protocol version.
    pub protocol: u16,
}

impl SourceSide {
    /// A guest whose memory the engine reads and whose writes this dirty log records, with the
    /// newest protocol version.
    #[must_use]
    pub fn new(log: &'static str) -> Self {
        let (vmm, used_bytes) = (String::new(), Vec::new());
        let protocol = PROTOCOL_VERSION_MAX;
        let (streams, vmm_post_copy, witness) = (false, None, None);
        Self { log, vmm, streams, vmm_post_copy, used_bytes, witness, protocol }
    }

    /// The side of a process that was restarted, with the session's witness if it can be asked.
    #[must_use]
    pub fn recovered(is_carried: bool, witness: Option<WitnessId>) -> Self {
        let vmm_post_copy = is_carried.then_some(Ok(()));
        Self { streams: is_carried, vmm_post_copy, witness, ..Self::new("none") }
    }

    /// The lanes for pages that arrive while the guest runs at the destination.
    pub(crate) fn fetch_lanes(&self, config: &SourceConfig) -> FetchLanes {
        if self.streams { STREAM_LANES } else { config.fetch_lanes() }
    }
}

/// The destination's side.
#[derive(Clone, Debug)]
pub struct DestinationSide {
    /// The VMM and its release, for people; empty if it is not announced.
    pub vmm: String,
    /// Algorithms that this side can decode.
    pub algorithms: AlgorithmSet,
    /// The witness that this side asks before it runs a guest.
    pub witness: Option<WitnessId>,
    /// The negotiated protocol version.
    pub protocol: u16,
}

impl Default for DestinationSide {
    /// A VMM without a name, with the newest protocol version.
    fn default() -> Self {
        let (vmm, algorithms, protocol) = (String::new(), AlgorithmSet::ALL, PROTOCOL_VERSION_MAX);
        Self { vmm, algorithms, witness: None, protocol }
    }
}

/// Fields of a newer release that were ignored.
#[derive(Debug, Default)]
pub(crate) struct UnknownFields {
    /// Their number.
    pub count: u64,
    /// The messages that were already reported.
    told: Vec<&'static str>,
}

impl UnknownFields {
    /// Counts the fields of a message. Returns whether to report them, which is done once for each
    /// type of message.
    pub fn note(&mut self, message: &'static str, fields: &[u16]) -> bool {
        self.count += fields.len() as u64;
        let news = !self.told.contains(&message);
        if news {
            self.told.push(message);
        }
        news
    }
}
