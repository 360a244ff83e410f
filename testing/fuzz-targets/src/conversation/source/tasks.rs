//! The source's actions whose results are pending.

use std::time::Duration;

use vmferry::machine::source::io::{Input as What, Saved, StorageSample};
use vmferry::rounds::tracker::LaneTotals;
use vmferry_handover::SessionKind;
use vmferry_handover::journal::Record;
use vmferry_memory::WholeHash;
use vmferry_wire::{ControlMessage, LaneOffer, Token};

use super::SourceHost;
use crate::conversation::destination::DestinationHost;
use crate::conversation::{SESSION, Wire, carried, failure, link_lost};
use crate::input::Input;

const DIGEST: u64 = 7;

/// An action whose result is pending.
pub(super) enum Task {
    Join,
    ResumeControl,
    Rejoin { lane: u8, token: Token, attempt: u64 },
    OpenFetch { token: Token, attempts: Vec<u64> },
    StartLog,
    Send(u8),
    Harvest,
    Reconnect,
    Pause,
    LastHarvest,
    Save,
    Sum,
    Hash(u32),
    Commit(SessionKind),
    Ask(Option<LaneOffer>),
}

impl SourceHost {
    /// Ends one of the pending actions with success or failure.
    pub fn finish_a_task(
        &mut self,
        now: Duration,
        input: &mut Input<'_>,
        wire: &mut Wire,
        destination: &mut DestinationHost,
    ) {
        if self.tasks.is_empty() {
            return;
        }
        let task = self.tasks.remove(usize::from(input.byte()) % self.tasks.len());
        let outcome = input.byte();
        let well = outcome < 0xe0;
        let took = Duration::from_millis(outcome.into());
        let what = match task {
            Task::Commit(kind) => {
                // A failed write may be on disk.
                let on_disk = well || outcome.is_multiple_of(2);
                if on_disk {
                    self.journal.push(Record::commit(kind));
                }
                self.committed = well;
                self.ran_on |= !well;
                What::CommitWritten(if well { Ok(()) } else { Err(failure()) })
            }
            Task::ResumeControl if well && destination.resume(now, wire) => {
                wire.cut();
                wire.ends = [true; 2];
                What::Resumed
            }
            Task::ResumeControl => What::NotResumed(link_lost()),
            Task::Ask(offer) if well && destination.is_there() => {
                wire.cut();
                wire.ends = [true; 2];
                let question = ControlMessage::Query { session: SESSION, offer };
                wire.to_destination.push_back(carried(&question));
                return;
            }
            Task::Ask(_) => What::LinkLost(link_lost()),
            Task::Rejoin { lane, .. } if well && lane < self.config.channels.get() => {
                destination.rejoin(now, lane, wire);
                What::LaneRejoined { lane, placed: destination.placed(lane) }
            }
            Task::Rejoin { lane, token, attempt }
                if well && destination.join_fetch_lane(now, lane, (token, attempt), wire) =>
            {
                What::LaneRejoined { lane, placed: 0 }
            }
            Task::Rejoin { lane, .. } => What::LaneNotRejoined { lane, error: link_lost() },
            Task::OpenFetch { token, attempts } => {
                let mut lanes = (self.config.channels.get()..).zip(attempts);
                let opens = |(lane, attempt)| {
                    destination.join_fetch_lane(now, lane, (token, attempt), wire)
                };
                if well && lanes.all(opens) {
                    What::FetchLanesJoined
                } else {
                    What::Failed(link_lost())
                }
            }
            Task::Reconnect if !well => What::NotReconnected(failure()),
            _ if !well => What::Failed(failure()),
            Task::Join => What::LanesJoined,
            Task::StartLog => What::LogStarted { populated_pages: 1024, stood_still: took },
            Task::Send(lane) => {
                let sequence = &mut self.sequences[usize::from(lane)];
                *sequence += 1;
                wire.rounds.push_back((lane, *sequence));
                let totals = LaneTotals { bytes: outcome.into(), ..LaneTotals::default() };
                What::LaneSent { lane, end_sequence: *sequence, totals }
            }
            Task::Harvest => {
                self.pages.harvest(outcome);
                What::Harvested { pages: u64::from(outcome) * 4, took, stood_still: Duration::ZERO }
            }
            Task::Reconnect => What::Tick,
            Task::Pause => {
                self.runs = false;
                What::Paused { stood_still: took }
            }
            Task::LastHarvest => {
                self.pages.harvest(outcome);
                What::LastHarvest { pages: outcome.into(), took }
            }
            Task::Save => {
                let bytes = vec![outcome; 2];
                let sample = self.samples_storage.then_some(StorageSample { bytes, took });
                let state = [outcome; 3].into();
                What::Saved(Saved { state, took, paused: false, sample })
            }
            Task::Sum => What::Digest(DIGEST),
            Task::Hash(attempt) => {
                What::Hashed { attempt, hash: WholeHash { hash: DIGEST, pages: 1 } }
            }
        };
        self.handle(now, what, wire);
    }
}
