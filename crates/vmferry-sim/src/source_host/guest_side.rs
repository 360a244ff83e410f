//! What the source's process does to the guest: its log, its pages, its life.

use std::sync::Arc;
use std::time::Duration;

use vmferry::MigrateError;
use vmferry::held::{found, returned, write_commit};
use vmferry::link::lost;
use vmferry::source::encode::{FrameSink, Job, LaneFailure};
use vmferry::source::io::Input;
use vmferry::source::machine::Source;
use vmferry::source::rounds::LaneTotals;
use vmferry_codec::EncodedFrame;
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
            let mut frames = Frames { sent: Vec::new(), guest, network, rearm };
            let job = Job { round, rearm, pages: Arc::clone(&self.pending), given_back: None };
            match self.encoders[lane].send_round(job, &mut frames) {
                Ok(()) | Err(LaneFailure::Stopped) => {}
                Err(LaneFailure::Error(error)) => return Some(Input::Failed(error)),
            }
            for (sequence, bytes, end) in frames.sent {
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

/// Frames of a round, and a guest that writes while they are made.
struct Frames<'a> {
    sent: Vec<(u64, Vec<u8>, Option<LaneTotals>)>,
    guest: &'a Guest,
    network: &'a mut Network,
    rearm: bool,
}

impl FrameSink for Frames<'_> {
    fn acquire(&mut self) -> Option<EncodedFrame> {
        if self.rearm {
            let writes = self.network.rng.usize(..3);
            self.guest.work(&mut self.network.rng, writes);
        }
        Some(EncodedFrame::new())
    }

    fn send(&mut self, sequence: u64, frame: EncodedFrame, end: Option<LaneTotals>) -> bool {
        let mut bytes = Vec::with_capacity(frame.wire_bytes());
        let written = frame.write_to(&mut bytes);
        self.sent.push((sequence, bytes, end));
        written.is_ok()
    }
}
