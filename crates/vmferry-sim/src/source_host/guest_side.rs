//! What the source's process does to the guest: its log, its pages, its life.

use std::sync::Arc;
use std::time::Duration;

use vmferry::MigrateError;
use vmferry::held::{Held, write_commit};
use vmferry::link::{channel_name, lost};
use vmferry::source::io::Input;
use vmferry::source::plan::{Job, Task};
use vmferry::source::rounds::LaneTotals;
use vmferry_codec::{Choice, DeltaUse, EncodedFrame, Method};
use vmferry_memory::PageSet;

use super::Process;
use super::lanes::Frame;
use crate::guest::Guest;
use crate::network::Network;
use crate::plan::Sabotage;

impl Process {
    pub(super) fn start_log(&mut self) -> Result<Input, MigrateError> {
        self.log.start()?;
        self.freed.begin();
        self.pending = Arc::new(self.memory.populated()?);
        self.freed.sending(&self.pending);
        if self.freed.can_ask() {
            self.freed.ask(&*self.log, &self.pending, false)?;
        }
        Ok(Input::LogStarted { populated_pages: self.pending.count(), stood_still: Duration::ZERO })
    }

    pub(super) fn harvest(&mut self) -> Result<Input, MigrateError> {
        if self.sabotage != Some(Sabotage::HintAcrossHarvest) {
            self.freed.stop();
        }
        let mut pages = PageSet::for_memory(&self.memory);
        self.log.collect(&mut pages)?;
        if std::mem::take(&mut self.recalled) && self.sabotage != Some(Sabotage::ForgetRecalled) {
            pages.union_with(&self.pending);
        }
        self.freed.harvested(&mut pages)?;
        self.pending = Arc::new(pages);
        let took = Duration::from_micros(200);
        Ok(Input::Harvested { pages: self.pending.count(), took, stood_still: Duration::ZERO })
    }

    /// Makes a round's frames, and sends them as far as the channels go.
    pub(super) fn send_round(
        &mut self,
        round: u32,
        rearm: bool,
        guest: &Guest,
        network: &mut Network,
    ) -> Result<(), MigrateError> {
        if rearm && round > 1 && self.freed.can_ask() {
            let protect = self.sabotage != Some(Sabotage::HintUnprotected);
            self.freed.ask(&*self.log, &self.pending, protect)?;
        }
        for lane in 0..self.channels {
            let job = Job {
                round,
                rearm: rearm && self.freed.hinted().is_none(),
                pages: Arc::clone(&self.pending),
                last: None,
                zero: self.freed.zero(),
                hinted: self.freed.hinted(),
            };
            self.make_frames(lane, job, rearm, guest, network)?;
            self.send_queued(lane, network);
        }
        Ok(())
    }

    /// A lane's frames of a round, each encoded in any way, while the guest writes.
    fn make_frames(
        &mut self,
        number: u8,
        job: Job,
        guest_runs: bool,
        guest: &Guest,
        network: &mut Network,
    ) -> Result<(), MigrateError> {
        let mut totals = LaneTotals::default();
        let lane = &mut self.lanes[usize::from(number)];
        lane.plan.begin(job);
        loop {
            let (frame_pages, rearm_pages) =
                (40 + network.rng.usize(..60), 1 + network.rng.u64(..600));
            let Some(task) = lane.plan.next(frame_pages, rearm_pages)? else { break };
            if guest_runs {
                let writes = network.rng.usize(..3);
                guest.work(&mut network.rng, writes);
            }
            let mut frame = EncodedFrame::new();
            let end = match task {
                Task::Pages(batch) => {
                    let choice = CHOICES[network.rng.usize(..CHOICES.len())];
                    let counts = self.encoder.encode(number, &batch, &mut frame, choice)?;
                    totals.pages.raw += counts.content_pages();
                    totals.pages.zero += counts.zero_pages;
                    None
                }
                Task::EndOfRound { round, free, .. } => {
                    frame.end_of_round(round);
                    totals.free_pages = free;
                    Some(totals)
                }
                // Nothing is held back here.
                Task::Wait => continue,
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

    /// Lets the guest run on after its last harvest.
    pub(super) fn recall(&mut self) -> Option<Input> {
        if self.sabotage == Some(Sabotage::StayPaused) {
            return None;
        }
        self.recalled = true;
        let source = self.held.resume(self.machine.handover()).err()?;
        Some(Input::Failed(MigrateError::Vm { action: "let the guest run on", source }))
    }

    /// Whether a lost lane is kept from the machine, and the guest runs on all the same.
    pub(super) fn runs_on_before_ready(&mut self) -> bool {
        let sabotaged = self.sabotage == Some(Sabotage::RunOnBeforeReady)
            && self.machine.phase_name() == "the wait for READY";
        if sabotaged {
            // One that does not run on breaks nothing.
            let _ = self.held.resume(self.machine.handover());
        }
        sabotaged
    }

    pub(super) fn pause(&mut self) -> Input {
        let failed = |source| MigrateError::Vm { action: "pause the guest", source };
        match self.held.pause() {
            Some(Ok(stood_still)) => Input::Paused { stood_still },
            Some(Err(source)) => Input::Failed(failed(source)),
            None => Input::Tick,
        }
    }

    pub(super) fn harvest_last(&mut self) -> Result<Input, MigrateError> {
        let mut pages = PageSet::for_memory(&self.memory);
        pages.union_with(&self.pending);
        self.log.collect_last(&mut pages)?;
        self.freed.harvested(&mut pages)?;
        self.pending = Arc::new(pages);
        let took = Duration::from_micros(200);
        Ok(Input::LastHarvest { pages: self.pending.count(), took })
    }

    pub(super) fn commit(&mut self) -> Input {
        let Some(journal) = &mut self.journal else { return Input::Tick };
        let committed = write_commit(journal).map(|proof| self.held.commit(proof));
        Input::CommitWritten(committed.map_err(Into::into))
    }

    /// What a process that was started again holds: whatever stands still is somebody's promise.
    pub(super) fn recover(&mut self, guest: &Guest) {
        self.held = match std::mem::replace(&mut self.held, Held::Moving) {
            Held::Running(running) if !guest.is_running() => {
                Held::found(running.into_vm(), self.machine.handover())
            }
            other => other,
        };
    }
}

/// Ways to encode a frame. Zlib is left out: its bytes are not the same on every machine, and a schedule is
/// to be.
const CHOICES: [Choice; 4] = [
    Choice { pack: None, delta: DeltaUse::Make },
    Choice { pack: Some(Method::lz4()), delta: DeltaUse::Make },
    Choice { pack: Some(Method::zstd(1)), delta: DeltaUse::Make },
    Choice { pack: Some(Method::zstd(1)), delta: DeltaUse::Off },
];
