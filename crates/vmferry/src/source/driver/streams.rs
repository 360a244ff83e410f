//! A guest that its VMM streams.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_memory::GuestBytes;

use super::{Core, GuestSide};
use crate::compression::worker_threads;
use crate::config::window_frames;
use crate::error::MigrateError;
use crate::held::Held;
use crate::source::io::{Action, Input};
use crate::source::lane::{FrameSource, Lane};
use crate::source::outgoing::Outgoing;
use crate::source::pool::Finished;
use crate::source::rounds::LaneTotals;
use crate::source::streams::{StreamContext, Streams};
use crate::streamed::{StreamEvent, StreamedVm};
use crate::vm::Resume;

/// Frames that a lane has ready beside those that are being packed.
const FRAMES_AHEAD: usize = 2;

/// How often it is looked at how much may be on its way.
const REVIEW: Duration = Duration::from_millis(100);

/// What is on its way when the guest is stopped adds to the downtime. It may be as much as the link carries in this part of
/// the downtime limit ...
const ON_THE_WAY_PART: u32 = 4;

/// ... and in this time at most.
const LONGEST_ON_THE_WAY: Duration = Duration::from_millis(100);

/// The longest downtime that a VMM is told, for when the user wants the guest to be moved whatever it costs.
const ANY_DOWNTIME: Duration = Duration::from_secs(2000);

/// The VMM's streams, and what is sent of them.
pub(super) struct StreamedGuest {
    queues: Vec<Arc<Outgoing<Finished>>>,
    streams: Option<Streams>,
    /// The VMM has begun its own migration, which must be ended whatever becomes of its streams.
    begun: bool,
    reviewed: Instant,
    /// Bytes and frames that were sent until then.
    sent: (u64, u64),
    finishing: Instant,
}

impl StreamedGuest {
    pub(super) fn new<V: Resume>(_core: &Core<'_, V>) -> Self {
        let now = Instant::now();
        Self {
            queues: Vec::new(),
            streams: None,
            begun: false,
            reviewed: now,
            sent: (0, 0),
            finishing: now,
        }
    }

    fn begin<V: StreamedVm>(&mut self, core: &mut Core<'_, V>) -> Result<(), MigrateError> {
        let Held::Running(running) = &mut core.held else { return Ok(()) };
        let inputs = core.inputs.0.clone();
        let events = Box::new(move |event| {
            // Nobody hears it once the migration is over.
            let _ = inputs.send(Input::Vmm(event));
        });
        let begun = running.begin(stated_downtime(core.config.downtime_limit), events);
        let streams =
            begun.map_err(|source| MigrateError::of_vm("begin its own migration", source))?;
        self.begun = true;
        if streams.len() != self.queues.len() {
            let source =
                format!("{} streams instead of {}", streams.len(), self.queues.len()).into();
            return Err(MigrateError::Vm { action: "stream the guest", source });
        }
        let context = StreamContext {
            chooser: Arc::clone(&core.chooser),
            signal: Arc::clone(&core.signal),
            windows: core.windows.clone(),
            queues: self.queues.clone(),
            results: core.inputs.0.clone(),
            cpu: core.cpu.clone(),
            compressors: core.config.compression.compressors.clone(),
            workers: worker_threads(core.config.compression.workers),
            kept_bytes: core.config.compression.delta_memory,
        };
        let no_thread = |source| MigrateError::Local { action: "start a thread", source };
        self.streams = Some(Streams::start(streams, &context).map_err(no_thread)?);
        Ok(())
    }

    /// Lets as much be on its way as fits the downtime limit at the present speed.
    fn fit_windows<V: Resume>(&mut self, core: &Core<'_, V>) {
        let (bytes, frames) = core.orders.sent().so_far();
        let (bytes_before, frames_before) = std::mem::replace(&mut self.sent, (bytes, frames));
        let Some(bytes_per_s) = core.chooser.link_bytes_per_s() else { return };
        if frames == frames_before {
            return;
        }
        let frame_bytes = (bytes - bytes_before) as f64 / (frames - frames_before) as f64;
        let round_trip = core.machine.round_trip();
        let time = on_the_way(core.config.downtime_limit) + round_trip * 2;
        let frames = bytes_per_s * time.as_secs_f64() / frame_bytes;
        let lanes = core.windows.len().max(1);
        let workers = worker_threads(core.config.compression.workers);
        let most = window_frames(core.config.channels, workers, round_trip);
        // One is sent while another one is on its way or being made.
        let frames = ((frames / lanes as f64) as usize).clamp(2, most);
        core.windows.iter().for_each(|window| window.set_limit(frames));
    }
}

/// What may be on its way when the guest is stopped, in time.
fn on_the_way(downtime_limit: Duration) -> Duration {
    (downtime_limit / ON_THE_WAY_PART).min(LONGEST_ON_THE_WAY)
}

/// The downtime that the VMM is told: it knows nothing of what is on its way behind its socket.
fn stated_downtime(limit: Duration) -> Duration {
    (limit - on_the_way(limit)).max(Duration::from_millis(1))
}

fn taken<V: Resume>(core: &Core<'_, V>) -> LaneTotals {
    let mut totals = LaneTotals::default();
    core.lanes.iter().map(Lane::take_totals).for_each(|lane| totals.join(&lane));
    totals
}

impl<V: StreamedVm> GuestSide<V> for StreamedGuest {
    fn execute(&mut self, core: &mut Core<'_, V>, action: Action) -> Option<Input> {
        match action {
            Action::StartLog => Some(Input::LogStarted {
                populated_pages: core.machine.stats().memory_bytes
                    / vmferry_memory::PAGE_SIZE as u64,
                stood_still: Duration::ZERO,
            }),
            Action::SendRound { .. } => self.begin(core).err().map(Input::Failed),
            Action::SwitchOver => {
                let Held::Running(running) = &mut core.held else { return None };
                let failed = |source| MigrateError::Vm { action: "let it stop the guest", source };
                running.set_downtime(ANY_DOWNTIME).err().map(|error| Input::Failed(failed(error)))
            }
            Action::LimitDowntime(limit) => {
                core.config.downtime_limit = limit;
                // One that stands still already has its reason.
                let Held::Running(running) = &mut core.held else { return None };
                let failed =
                    |source| MigrateError::Vm { action: "keep to another downtime", source };
                let set = running.set_downtime(stated_downtime(limit));
                set.err().map(|error| Input::Failed(failed(error)))
            }
            Action::Save => {
                let Held::Paused(paused) = &mut core.held else { return None };
                self.finishing = Instant::now();
                let failed = |source| MigrateError::Vm { action: "send what is left", source };
                paused.finish().err().map(|error| Input::Failed(failed(error)))
            }
            Action::SumDigest => {
                Some(Input::Digest(self.streams.as_ref().map_or(0, Streams::digest)))
            }
            // The others are not for a guest that its VMM streams.
            _ => None,
        }
    }

    fn frames_of(&mut self, core: &Core<'_, V>, _lane: u8) -> FrameSource {
        let workers = worker_threads(core.config.compression.workers);
        let queue = Arc::new(Outgoing::new(workers + FRAMES_AHEAD, Arc::clone(&core.signal)));
        self.queues.push(Arc::clone(&queue));
        FrameSource::Queue(queue)
    }

    fn lanes_are_open(&mut self, _core: &Core<'_, V>) -> Result<(), MigrateError> {
        Ok(())
    }

    fn heard(&mut self, core: &mut Core<'_, V>, event: StreamEvent) -> Input {
        match event {
            // The last one is the machine's own, and begins when the guest is stopped.
            StreamEvent::Pass { .. } if !matches!(core.held, Held::Running(_)) => Input::Tick,
            StreamEvent::Pass { number, pages, dirty_pages_per_s } => {
                if let Some(streams) = &self.streams {
                    streams.set_pass(number);
                }
                Input::Pass { round: number, pages, dirty_pages_per_s, totals: taken(core) }
            }
            StreamEvent::Stopped { stood_still, expected_downtime } => {
                core.held.stopped();
                if let Some(streams) = &self.streams {
                    streams.next_pass();
                }
                let (expected, totals) = (expected_downtime, taken(core));
                Input::Stopped { stood_still, expected, totals }
            }
            StreamEvent::Completed => {
                let paused = match &core.held {
                    Held::Paused(paused) => paused.is_paused_by_others(),
                    _ => false,
                };
                Input::Saved { state: GuestBytes::new(), took: self.finishing.elapsed(), paused }
            }
            StreamEvent::Failed(source) => {
                Input::Failed(MigrateError::of_vm("stream the guest", source))
            }
        }
    }

    fn review(&mut self, core: &mut Core<'_, V>) -> Option<Duration> {
        self.streams.as_ref()?;
        let left = REVIEW.saturating_sub(self.reviewed.elapsed());
        if !left.is_zero() {
            return Some(left);
        }
        self.reviewed = Instant::now();
        self.fit_windows(core);
        Some(REVIEW)
    }

    fn give_up(&mut self) {
        if let Some(streams) = &self.streams {
            streams.give_up();
        }
    }

    fn stop(&mut self, core: &mut Core<'_, V>) {
        // The VMM first: what it still writes may have to be read until it has given up.
        if self.begun
            && let Held::Running(running) = &mut core.held
            && let Err(error) = running.end_streams()
        {
            core.resume_failure.get_or_insert(error);
        }
        self.streams = None;
    }
}
