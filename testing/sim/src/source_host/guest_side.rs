//! The source process's work on the guest: its log, its pages, its life.

use std::time::Duration;

use vmferry::data::source::plan::{Planned, RoundOrder};
use vmferry::link::{channel_name, lost};
use vmferry::machine::source::io::Input;
use vmferry::rounds::tracker::LaneTotals;
use vmferry::{MigrateError, SourceVm};
use vmferry_codec::{Choice, DeltaUse, EncodedFrame, Method};
use vmferry_handover::{SessionKind, SourceGuest, write_commit};

use super::Process;
use super::lanes::Frame;
use crate::guest::Guest;
use crate::network::Network;
use crate::plan::Sabotage;

impl Process {
    pub(super) fn start_log(&mut self) -> Result<Input, MigrateError> {
        self.harvester.log().start()?;
        let populated_pages = self.harvester.started()?;
        Ok(Input::LogStarted { populated_pages, stood_still: Duration::ZERO })
    }

    pub(super) fn harvest(&mut self) -> Result<Input, MigrateError> {
        let (pages, ()) =
            self.harvester.harvest(|log, pages| Ok(log.collect(pages).map(drop)?))?;
        let took = Duration::from_micros(200);
        Ok(Input::Harvested { pages, took, stood_still: Duration::ZERO })
    }

    /// Builds a round's frames and sends them as far as the channels go.
    pub(super) fn send_round(
        &mut self,
        round: u32,
        rearm: bool,
        guest: &Guest,
        network: &mut Network,
    ) -> Result<(), MigrateError> {
        let order = self.harvester.order(round, rearm)?;
        for lane in 0..self.channels {
            self.make_frames(lane, order.clone(), rearm, guest, network)?;
            self.send_queued(lane, network);
        }
        Ok(())
    }

    /// A lane's frames of a round, each with a random encoding, while the guest writes.
    fn make_frames(
        &mut self,
        number: u8,
        order: RoundOrder,
        guest_runs: bool,
        guest: &Guest,
        network: &mut Network,
    ) -> Result<(), MigrateError> {
        let mut totals = LaneTotals::default();
        let lane = &mut self.lanes[usize::from(number)];
        lane.plan.begin(order);
        loop {
            let (frame_pages, rearm_pages) =
                (40 + network.rng.usize(..60), 1 + network.rng.u64(..600));
            let Some(planned) = lane.plan.next(frame_pages, rearm_pages)? else { break };
            if guest_runs {
                let writes = network.rng.usize(..3);
                guest.work(&mut network.rng, writes);
            }
            let mut frame = EncodedFrame::new();
            let end = match planned {
                Planned::Pages(batch) => {
                    let choice = CHOICES[network.rng.usize(..CHOICES.len())];
                    let counts = self.encoder.encode(number, &batch, &mut frame, choice)?;
                    totals.pages.raw += counts.content_pages();
                    totals.pages.zero += counts.zero_pages;
                    None
                }
                Planned::EndOfRound { round, free_pages, .. } => {
                    frame.end_of_round(round);
                    totals.free_pages = free_pages;
                    Some(totals)
                }
                // Nothing is held back here.
                Planned::Wait => continue,
            };
            lane.sequence += 1;
            frame.set_sequence(lane.sequence);
            totals.bytes += frame.wire_bytes() as u64;
            let mut bytes = Vec::with_capacity(frame.wire_bytes());
            frame
                .write_to(&mut bytes)
                .map_err(|error| lost(&channel_name(Some(number)), "sending pages", &error))?;
            lane.queue.push_back(Frame { sequence: lane.sequence, bytes, end });
        }
        Ok(())
    }

    /// Resumes the guest after its last harvest.
    pub(super) fn recall(&mut self) -> Option<Input> {
        if self.sabotage == Some(Sabotage::StayPaused) {
            return None;
        }
        self.harvester.recall();
        let source = self.held.resume(self.machine.handover()).err()?;
        Some(Input::Failed(MigrateError::Vm { action: "let the guest run on", source }))
    }

    /// Sabotage: whether a lost lane is hidden from the machine, and the guest resumed without it.
    pub(super) fn runs_on_before_ready(&mut self) -> bool {
        let sabotaged = self.sabotage == Some(Sabotage::RunOnBeforeReady)
            && self.machine.phase_name() == "the wait for READY";
        if sabotaged {
            // A guest that is not resumed breaks nothing.
            let _ = self.held.resume(self.machine.handover());
        }
        sabotaged
    }

    pub(super) fn pause(&mut self) -> Input {
        let failed = |source| MigrateError::Vm { action: "pause the guest", source };
        match self.held.pause(SourceVm::pause) {
            Some(Ok(stood_still)) => Input::Paused { stood_still },
            Some(Err(source)) => Input::Failed(failed(source)),
            None => Input::Tick,
        }
    }

    pub(super) fn harvest_last(&mut self) -> Result<Input, MigrateError> {
        let pages = self.harvester.harvest_last()?;
        Ok(Input::LastHarvest { pages, took: Duration::from_micros(200) })
    }

    pub(super) fn commit(&mut self, kind: SessionKind) -> Input {
        let Some(journal) = &mut self.journal else { return Input::Tick };
        let committed = write_commit(journal, kind).map(|proof| self.held.commit(proof));
        Input::CommitWritten(committed.map_err(Into::into))
    }

    /// What a restarted process holds: a paused guest may have been promised away.
    pub(super) fn recover(&mut self, guest: &Guest) {
        self.held = match self.held.take() {
            SourceGuest::Running(running) if !guest.is_running() => {
                SourceGuest::recovered(running.into_vm(), self.machine.handover())
            }
            other => other,
        };
    }
}

/// Encodings of a frame. Zlib is left out: its output differs between machines, and a schedule must
/// be reproducible.
pub(super) const CHOICES: [Choice; 4] = [
    Choice { pack: None, delta: DeltaUse::Make },
    Choice { pack: Some(Method::lz4()), delta: DeltaUse::Make },
    Choice { pack: Some(Method::zstd(1)), delta: DeltaUse::Make },
    Choice { pack: Some(Method::zstd(1)), delta: DeltaUse::Off },
];
