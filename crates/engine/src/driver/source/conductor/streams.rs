//! Carried guests: their VMM streams them.

use std::sync::Arc;
use std::time::{Duration, Instant};
use vmferry_handover::Resume;

use vmferry_memory::GuestBytes;

use super::storage::{prepare_sample, sample};
use super::{Core, GuestSide};
use crate::config::compression::worker_threads;
use crate::config::window_frames;
use crate::data::source::page_encoder::PageEncoder;
use crate::data::source::streams::{Cutting, StreamContext, Streams};
use crate::data::tunnel::TunnelEnd;
use crate::error::MigrateError;
use crate::machine::source::io::{Action, Input, Saved};
use crate::rounds::tracker::LaneTotals;
use crate::vmm::streamed::{LateStreams, PostCopyStart, StreamEvent, StreamedVm};
use vmferry_handover::SourceGuest;

/// How often the limit of data in flight is adjusted.
const REVIEW: Duration = Duration::from_millis(100);

/// Data in flight when the guest is stopped adds to the downtime. It is limited to what the link
/// carries in this fraction of the downtime limit ...
const ON_THE_WAY_PART: u32 = 4;

/// ... and at most in this time.
const LONGEST_ON_THE_WAY: Duration = Duration::from_millis(100);

/// The downtime that is passed to a VMM when the user accepts any downtime.
const ANY_DOWNTIME: Duration = Duration::from_secs(2000);

/// The VMM's streams, and the state of sending them.
pub(super) struct StreamedGuest {
    streams: Option<Streams>,
    /// The VMM has started its own migration, which must be ended whatever happens to its streams.
    begun: bool,
    reviewed: Instant,
    /// Bytes and frames sent until then.
    sent: (u64, u64),
    finishing: Instant,
    /// Pages that the VMM sends while the guest runs at the destination, with post-copy.
    late_pages: Option<u64>,
    /// The destination compares a sample of the guest's storage.
    samples_storage: bool,
}

impl StreamedGuest {
    pub(super) fn new<V: Resume>(_core: &Core<'_, V>) -> Self {
        let now = Instant::now();
        Self {
            streams: None,
            begun: false,
            reviewed: now,
            sent: (0, 0),
            finishing: now,
            late_pages: None,
            samples_storage: false,
        }
    }

    fn begin<V: StreamedVm>(&mut self, core: &mut Core<'_, V>) -> Result<(), MigrateError> {
        let SourceGuest::Running(running) = &mut core.guest else { return Ok(()) };
        let inputs = core.inputs.0.clone();
        let events = Box::new(move |event| {
            // The receiver is gone once the migration is over.
            let _ = inputs.send(Input::Vmm(event));
        });
        if !core.machine.has_post_copy() {
            running.vm().forbid_post_copy();
        }
        let begun = running.vm().begin(stated_downtime(core.config.downtime_limit), events);
        let streams =
            begun.map_err(|source| MigrateError::of_vm("begin its own migration", source))?;
        self.begun = true;
        if streams.len() != core.lanes.len() {
            let source =
                format!("{} streams instead of {}", streams.len(), core.lanes.len()).into();
            return Err(MigrateError::Vm { action: "stream the guest", source });
        }
        let context = StreamContext {
            chooser: Arc::clone(&core.chooser),
            signal: Arc::clone(&core.signal),
            lanes: core.lanes.clone(),
            results: core.inputs.0.clone(),
            cpu: core.cpu.clone(),
            compressors: core.config.compression.compressors.clone(),
            workers: worker_threads(core.config.compression.workers),
            kept_bytes: core.config.compression.delta_memory,
        };
        self.streams = Some(Streams::start(streams, &context).map_err(MigrateError::no_thread)?);
        Ok(())
    }

    /// The VMM has sent what the destination needs to load.
    fn saved<V: StreamedVm>(&self, core: &mut Core<'_, V>, state: GuestBytes) -> Input {
        let took = self.finishing.elapsed();
        let SourceGuest::Paused(guest) = &mut core.guest else {
            return Input::Saved(Saved { state, took, ..Saved::default() });
        };
        let paused = guest.is_paused_by_others();
        let sample = self.samples_storage.then(|| sample(guest, StreamedVm::storage)).flatten();
        Input::Saved(Saved { state, took, paused, sample })
    }

    /// The rest of the stream goes through the fetch lanes, and requests for pages come through
    /// them.
    fn tunnel<V: StreamedVm>(&self, core: &mut Core<'_, V>) -> Result<(), MigrateError> {
        let SourceGuest::Paused(paused) = &mut core.guest else { return Ok(()) };
        let failed = |source| MigrateError::Vm { action: "send what is left", source };
        let LateStreams { requests, urgent, .. } =
            paused.with_vm(StreamedVm::late_streams).map_err(failed)?;
        let left = self.streams.as_ref().and_then(|streams| streams.left(0));
        let Cutting { socket, first } =
            left.ok_or_else(|| failed("its stream has not ended where it was cut".into()))?;
        let urgent =
            TunnelEnd { into_vmm: Some(requests), from_vmm: urgent, ..TunnelEnd::default() };
        let (from_vmm, first) = (Some(socket), Some(first));
        let rest = TunnelEnd { from_vmm, first, ..TunnelEnd::default() };
        core.fetch.begin([urgent, rest])
    }

    /// Adjusts the windows so that data in flight fits the downtime limit at the present rate.
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
        let lanes = core.lanes.len().max(1);
        let workers = worker_threads(core.config.compression.workers);
        let most = window_frames(core.config.channels.get(), workers, round_trip);
        // One frame is being sent while another one is in flight or being made.
        let frames = ((frames / lanes as f64) as usize).clamp(2, most);
        core.lanes.iter().for_each(|lane| lane.set_window(frames));
    }
}

/// The limit of data in flight when the guest is stopped, as a time.
fn on_the_way(downtime_limit: Duration) -> Duration {
    (downtime_limit / ON_THE_WAY_PART).min(LONGEST_ON_THE_WAY)
}

/// The downtime that is passed to the VMM, which does not know of data in flight beyond its socket.
fn stated_downtime(limit: Duration) -> Duration {
    (limit - on_the_way(limit)).max(Duration::from_millis(1))
}

fn taken<V: Resume>(core: &Core<'_, V>) -> LaneTotals {
    let mut totals = LaneTotals::default();
    core.lanes.iter().for_each(|lane| totals.join(&lane.take_totals()));
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
                let SourceGuest::Running(running) = &mut core.guest else { return None };
                let failed = |source| MigrateError::Vm { action: "let it stop the guest", source };
                running
                    .vm()
                    .set_downtime(ANY_DOWNTIME)
                    .err()
                    .map(|error| Input::Failed(failed(error)))
            }
            Action::LimitDowntime(limit) => {
                core.config.downtime_limit = limit;
                // A guest that is already stopped is not affected.
                let SourceGuest::Running(running) = &mut core.guest else { return None };
                let failed =
                    |source| MigrateError::Vm { action: "keep to another downtime", source };
                let set = running.vm().set_downtime(stated_downtime(limit));
                set.err().map(|error| Input::Failed(failed(error)))
            }
            Action::Save => {
                let SourceGuest::Paused(paused) = &mut core.guest else { return None };
                self.finishing = Instant::now();
                let failed = |source| MigrateError::Vm { action: "send what is left", source };
                if let Err(error) = paused.with_vm(StreamedVm::finish) {
                    return Some(Input::Failed(failed(error)));
                }
                // With post-copy the VMM sends the last byte when the guest has long been running.
                let pages = self.late_pages?;
                let state = pages.to_le_bytes().into();
                Some(self.saved(core, state))
            }
            Action::PrepareStorageSample => {
                self.samples_storage = prepare_sample(core, StreamedVm::storage);
                None
            }
            Action::BeginCarriedPostCopy => {
                let SourceGuest::Running(running) = &mut core.guest else { return None };
                let failed = |source| MigrateError::Vm { action: "begin its post-copy", source };
                match running.vm().begin_post_copy() {
                    Ok(PostCopyStart::Begun) => None,
                    Ok(PostCopyStart::TooLate) => Some(Input::TooLateForPostCopy),
                    Err(error) => Some(Input::Failed(failed(error))),
                }
            }
            Action::CutStreams { pages } => {
                self.late_pages = Some(pages);
                if let Some(streams) = &self.streams {
                    streams.cut();
                }
                None
            }
            Action::ServePages { .. } => self.tunnel(core).err().map(Input::Failed),
            Action::ReconnectVmm => {
                let SourceGuest::Committed(committed) = &mut core.guest else { return None };
                core.fetch.reconnect(|| committed.reconnect()).err().map(Input::NotReconnected)
            }
            Action::SumDigest => {
                Some(Input::Digest(self.streams.as_ref().map_or(0, Streams::digest)))
            }
            // The other actions do not apply to carried guests.
            _ => None,
        }
    }

    fn sender_encoder(&self, _core: &Core<'_, V>) -> Option<PageEncoder> {
        None
    }

    fn lanes_are_open(&mut self, _core: &Core<'_, V>) -> Result<(), MigrateError> {
        Ok(())
    }

    fn heard(&mut self, core: &mut Core<'_, V>, event: StreamEvent) -> Input {
        match event {
            // The last round is the machine's own, and begins when the guest is stopped.
            StreamEvent::Pass { .. } if !matches!(core.guest, SourceGuest::Running(_)) => {
                Input::Tick
            }
            StreamEvent::Pass { number, pages, dirty_pages_per_s } => {
                if let Some(streams) = &self.streams {
                    streams.set_pass(number);
                }
                Input::Pass { round: number, pages, dirty_pages_per_s, totals: taken(core) }
            }
            StreamEvent::Stopped { stood_still, expected_downtime, pages } => {
                core.guest.paused_by_vmm();
                if let Some(streams) = &self.streams {
                    streams.next_pass();
                }
                let (expected, totals) = (expected_downtime, taken(core));
                Input::Stopped { stood_still, expected, pages, totals }
            }
            StreamEvent::Completed => self.saved(core, GuestBytes::new()),
            StreamEvent::Failed(source) => {
                Input::Failed(MigrateError::of_vm("stream the guest", source))
            }
            StreamEvent::Ended(source) => Input::VmmEnded(source),
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
        core.fetch.end_tunnels();
        // The VMM first: its remaining output may have to be read until it has aborted.
        if self.begun
            && let SourceGuest::Running(running) = &mut core.guest
            && let Err(error) = running.vm().resume()
        {
            core.resume_failure.get_or_insert(error);
        }
        self.streams = None;
    }
}
