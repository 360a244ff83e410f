//! What the source's process does to the guest: its log, its pages, its life.

use std::sync::Arc;
use std::time::Duration;

use vmferry::MigrateError;
use vmferry::held::{found, returned, write_commit};
use vmferry::link::lost;
use vmferry::source::io::Input;
use vmferry::source::machine::Source;
use vmferry::source::plan::{Job, Task};
use vmferry::source::rounds::LaneTotals;
use vmferry_codec::{Choice, DeltaUse, EncodedFrame, Method};
use vmferry_memory::PageSet;

use super::{EXPLANATION, Held, Process};
use crate::guest::Guest;
use crate::network::{Event, Network};
use crate::plan::Host;

impl Process {
    pub(super) fn start_log(&mut self) -> Result<Input, MigrateError> {
        self.log.start()?;
        self.pending = Arc::new(self.memory.populated()?);
        Ok(Input::LogStarted { populated_pages: self.pending.count(), stood_still: Duration::ZERO })
    }

    pub(super) fn send_round(
        &mut self,
        round: u32,
        rearm: bool,
        number: u64,
        guest: &Guest,
        network: &mut Network,
    ) -> Option<Input> {
        for (lane, channel) in self.lanes.clone().into_iter().enumerate() {
            let job = Job {
                round,
                rearm,
                pages: Arc::clone(&self.pending),
                last: None,
                given_back: None,
            };
            let frames = match self.frames(lane, job, guest, network) {
                Ok(frames) => frames,
                Err(error) => return Some(Input::Failed(error)),
            };
            for (sequence, bytes, end) in frames {
                if !network.send(channel, Host::Destination, "frame", bytes) {
                    let during = "sending pages";
                    let broken = std::io::ErrorKind::BrokenPipe.into();
                    let error = lost(&format!("lane {lane}"), during, &broken);
                    let event = Event::Source(number, Input::LinkLost(error));
                    network.after(EXPLANATION, event);
                    break;
                }
                if let Some(totals) = end {
                    let lane = lane as u8;
                    let input = Input::LaneSent { lane, end_sequence: sequence, totals };
                    let takes = Duration::from_micros(network.rng.u64(1..3_000));
                    network.after(takes, Event::Source(number, input));
                }
            }
        }
        None
    }

    /// A lane's frames of a round, each encoded in any way, while the guest writes.
    fn frames(
        &mut self,
        lane: usize,
        job: Job,
        guest: &Guest,
        network: &mut Network,
    ) -> Result<Vec<SentFrame>, MigrateError> {
        let (rearm, mut frames) = (job.rearm, Vec::new());
        let mut totals = LaneTotals::default();
        self.plans[lane].begin(job);
        loop {
            let (frame_pages, rearm_pages) =
                (40 + network.rng.usize(..60), 1 + network.rng.u64(..600));
            let Some(task) = self.plans[lane].next(frame_pages, rearm_pages)? else { break };
            if rearm {
                let writes = network.rng.usize(..3);
                guest.work(&mut network.rng, writes);
            }
            let mut frame = EncodedFrame::new();
            let end = match task {
                Task::Pages(batch) => {
                    let choice = CHOICES[network.rng.usize(..CHOICES.len())];
                    let counts = self.encoder.encode(lane as u8, &batch, &mut frame, choice)?;
                    totals.pages.raw += counts.content_pages();
                    totals.pages.zero += counts.zero_pages;
                    None
                }
                Task::EndOfRound { round, .. } => {
                    frame.end_of_round(round);
                    Some(totals)
                }
            };
            self.sequences[lane] += 1;
            frame.set_sequence(self.sequences[lane]);
            totals.bytes += frame.wire_bytes() as u64;
            let mut bytes = Vec::with_capacity(frame.wire_bytes());
            frame
                .write_to(&mut bytes)
                .map_err(|error| lost(&format!("lane {lane}"), "sending pages", &error))?;
            frames.push((self.sequences[lane], bytes, end));
        }
        Ok(frames)
    }

    pub(super) fn pause(&mut self) -> Input {
        let (held, input) = match std::mem::replace(&mut self.held, Held::Gone) {
            Held::Running(running) => match running.pause() {
                Ok((paused, stood_still)) => (Held::Paused(paused), Input::Paused { stood_still }),
                Err((running, source)) => {
                    let error = MigrateError::Vm { action: "pause the guest", source };
                    (Held::Running(running), Input::Failed(error))
                }
            },
            other => (other, Input::Tick),
        };
        self.held = held;
        input
    }

    pub(super) fn harvest_last(&mut self) -> Result<Input, MigrateError> {
        let mut pages = PageSet::for_memory(&self.memory);
        pages.union_with(&self.pending);
        self.log.collect_last(&mut pages)?;
        self.pending = Arc::new(pages);
        let took = Duration::from_micros(200);
        Ok(Input::LastHarvest { pages: self.pending.count(), took })
    }

    pub(super) fn commit(&mut self) -> Input {
        let Some(journal) = &mut self.journal else { return Input::Tick };
        match write_commit(journal) {
            Ok(proof) => {
                self.held = match std::mem::replace(&mut self.held, Held::Gone) {
                    Held::Paused(paused) => {
                        paused.commit(proof).map_or(Held::Gone, Held::Committed)
                    }
                    other => other,
                };
                Input::CommitWritten(Ok(()))
            }
            Err(error) => Input::CommitWritten(Err(error.into())),
        }
    }

    pub(super) fn resume(&mut self) {
        let paused = match std::mem::replace(&mut self.held, Held::Gone) {
            Held::Paused(paused) => paused,
            Held::Committed(committed) => match returned(self.machine.handover()) {
                Some(proof) => committed.take_back(proof),
                None => {
                    self.held = Held::Committed(committed);
                    return;
                }
            },
            other => {
                self.held = other;
                return;
            }
        };
        if let Ok(running) = paused.resume() {
            self.held = Held::Running(running);
        }
    }
}

impl Held {
    /// What a process that was started again holds: whatever stands still is somebody's promise.
    pub(super) fn recover(self, machine: &Source, guest: &Guest) -> Self {
        match self {
            Self::Running(running) if !guest.is_running() => {
                match found(running.into_vm(), machine.handover()) {
                    Ok(paused) => Self::Paused(paused),
                    Err(committed) => Self::Committed(committed),
                }
            }
            other => other,
        }
    }
}

/// A frame's number and bytes, and what the round was with its last one.
type SentFrame = (u64, Vec<u8>, Option<LaneTotals>);

/// Ways to encode a frame. Zlib is left out: its bytes are not the same on every machine, and a schedule is
/// to be.
const CHOICES: [Choice; 4] = [
    Choice { pack: None, delta: DeltaUse::Make },
    Choice { pack: Some(Method::lz4()), delta: DeltaUse::Make },
    Choice { pack: Some(Method::zstd(1)), delta: DeltaUse::Make },
    Choice { pack: Some(Method::zstd(1)), delta: DeltaUse::Off },
];
