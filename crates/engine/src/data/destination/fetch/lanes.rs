//! All fetch lanes of a session, which outlive their channels.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmferry_memory::PageRun;
use vmferry_wire::{FetchLanes as Announced, LaneOffer};

use super::FetchContext;
use super::handle::FetchHandle;
use super::handlers::FaultHandlers;
use super::lane::{Duty, FetchLane, Requester};
use crate::cpu::CpuMeter;
use crate::data::destination::missing::MissingPages;
use crate::error::MigrateError;
use crate::link::DataChannel;
use crate::machine::destination::io::Input;

/// The fetch lanes of a session. After a drop, none of its threads is left.
pub struct FetchLanes {
    /// Dropped before the lanes, to which its threads send requests.
    handlers: Option<FaultHandlers>,
    context: Option<FetchContext>,
    lanes: Arc<Mutex<Lanes>>,
}

/// The lanes as the fault handlers share them.
pub(super) struct Lanes {
    /// The number of the first lane.
    first: u8,
    announced: Announced,
    all: Vec<Lane>,
    runs: bool,
    losses: Losses,
}

/// Channels that were lost while the guest ran.
#[derive(Default)]
struct Losses {
    /// Number of channels that replaced lost ones.
    reconnections: u32,
    /// Since when at least one lane has lacked a channel.
    since: Option<Instant>,
    /// How long that lasted in all, up to `since`.
    down: Duration,
}

#[derive(Default)]
struct Lane {
    /// How often the lane's channel was dialed before, if it had one.
    attempt: Option<u64>,
    channel: Channel,
}

#[derive(Default)]
enum Channel {
    #[default]
    None,
    /// Nothing is missing yet.
    Idle(DataChannel),
    Fetching(FetchLane),
}

impl FetchLanes {
    /// Lanes without channels, of which the first has this number.
    #[must_use]
    pub fn new(first: u8, announced: Announced) -> Self {
        let all = (0..announced.count()).map(|_| Lane::default()).collect();
        let lanes = Lanes { first, announced, all, runs: false, losses: Losses::default() };
        Self { handlers: None, context: None, lanes: Arc::new(Mutex::new(lanes)) }
    }

    /// Lanes that [start](Self::start) before the source has offered any.
    #[must_use]
    pub fn unannounced() -> Self {
        Self::new(0, Announced { faults: 0, background: 0 })
    }

    /// Replaces all lanes by those that the source offers, and closes the old channels. What was
    /// requested on them is requested on the new ones.
    pub fn renew(&self, LaneOffer { first, lanes: announced, .. }: LaneOffer) {
        let all = (0..announced.count()).map(|_| Lane::default()).collect();
        let mut lanes = self.lanes.lock();
        let (runs, losses) = (lanes.runs, std::mem::take(&mut lanes.losses));
        let new = Lanes { first, announced, all, runs, losses };
        let old = std::mem::replace(&mut *lanes, new);
        drop(lanes);
        // The handlers need the lock, and the lanes' threads must end.
        drop(old);
    }

    /// Whether this is the number of a fetch lane.
    #[must_use]
    pub fn has(&self, lane: u8) -> bool {
        self.lanes.lock().index(lane).is_some()
    }

    /// Prepares a lane for a channel that was dialed `attempt` times before. False if this attempt
    /// is not newer than the present channel's; it may be a replay.
    #[must_use]
    pub fn expect(&self, lane: u8, attempt: u64) -> bool {
        let mut lanes = self.lanes.lock();
        let Some(known) = lanes.get(lane) else { return false };
        if known.attempt.is_some_and(|present| attempt <= present) {
            return false;
        }
        known.attempt = Some(attempt);
        let old = std::mem::take(&mut known.channel);
        drop(lanes);
        drop(old);
        true
    }

    /// Uses a greeted channel for a lane that [expects](Self::expect) it. Pages that threads wait
    /// for are requested again: the answers may have been lost with the previous channel.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn join(&self, lane: u8, channel: DataChannel) -> io::Result<()> {
        let mut lanes = self.lanes.lock();
        let (duty, runs) = (lanes.duty(lane), lanes.runs);
        let Some(known) = lanes.get(lane) else { return Ok(()) };
        known.channel = match &self.context {
            None => Channel::Idle(channel),
            Some(context) => {
                let attempt = known.attempt.unwrap_or_default();
                let fetching = FetchLane::start((lane, attempt), channel, context.clone())?;
                let requester = Arc::clone(fetching.requester());
                known.channel = Channel::Fetching(fetching);
                if runs {
                    lanes.losses.reconnections += 1;
                    lanes.note_losses();
                }
                drop(lanes);
                match duty {
                    Duty::Faults => requester.request(&context.missing.awaited()),
                    Duty::Background if runs => requester.begin_background(),
                    Duty::Background => {}
                }
                return Ok(());
            }
        };
        Ok(())
    }

    /// Whether a lane's present channel is the one that was dialed this number of times before.
    #[must_use]
    pub fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.lanes.lock().get(lane).is_some_and(|lane| lane.attempt == Some(attempt))
    }

    /// Starts to fetch: the lanes that have channels, and the threads that read the faults.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(
        &mut self,
        missing: MissingPages,
        results: crossbeam_channel::Sender<Input>,
        cpu: CpuMeter,
    ) -> Result<(), MigrateError> {
        let context = FetchContext { missing: Arc::new(missing), results, cpu };
        // From here on dropping this ends the registration, if nothing needs it any more.
        self.context = Some(context.clone());
        {
            let mut lanes = self.lanes.lock();
            let first = lanes.first;
            for (number, lane) in (first..).zip(&mut lanes.all) {
                lane.channel = match std::mem::take(&mut lane.channel) {
                    Channel::Idle(channel) => {
                        let attempt = lane.attempt.unwrap_or_default();
                        let started = FetchLane::start((number, attempt), channel, context.clone());
                        Channel::Fetching(started.map_err(MigrateError::no_thread)?)
                    }
                    other => other,
                };
            }
        }
        let lanes = Arc::clone(&self.lanes);
        let handlers = FaultHandlers::start(&context, move |share, pages| {
            request(&lanes, share, pages);
        });
        self.handlers = Some(handlers.map_err(MigrateError::no_thread)?);
        Ok(())
    }

    /// The missing pages, once they are known.
    #[must_use]
    pub fn missing(&self) -> Option<&Arc<MissingPages>> {
        self.context.as_ref().map(|context| &context.missing)
    }

    /// The guest runs: all missing pages are fetched, whether or not a thread waits for them.
    pub fn begin_background(&self) {
        let Some(context) = &self.context else { return };
        let requesters = {
            let mut lanes = self.lanes.lock();
            lanes.runs = true;
            lanes.requesters(Duty::Background)
        };
        requesters.iter().for_each(|requester| requester.begin_background());
        if context.missing.left() == 0 {
            let _ = context.results.send(Input::Fetched);
        }
    }

    /// The guest is discarded, and threads that wait for a page of its memory go on.
    pub fn discard(&self) {
        if let Some(context) = &self.context {
            // Fails only for memory that was unmapped meanwhile.
            let _ = context.missing.finish();
        }
    }

    /// A handle to the progress, for a guest that runs from now on. `None` if nothing is fetched.
    #[must_use]
    pub fn handle(&self, source: String) -> Option<FetchHandle> {
        let context = self.context.clone()?;
        Some(FetchHandle::new(source, context, Arc::clone(&self.lanes)))
    }

    /// A lane has lost its channel. The other lanes take over what was requested on it.
    pub fn lost(&self) {
        let Some(context) = &self.context else { return };
        let (faults, background) = {
            let mut lanes = self.lanes.lock();
            lanes.note_losses();
            (lanes.for_faults(0), lanes.requesters(Duty::Background))
        };
        if let Some(requester) = faults {
            requester.request(&context.missing.awaited());
        }
        background.iter().for_each(|requester| requester.fill());
    }
}

#[cfg(test)]
impl FetchLanes {
    /// Requests pages as the fault handler of a share does.
    pub fn request(&self, share: usize, runs: &[PageRun]) {
        request(&self.lanes, share, runs);
    }
}

/// Requests pages that threads wait for. Without a channel they are requested on the next one.
fn request(lanes: &Mutex<Lanes>, share: usize, runs: &[PageRun]) {
    let requester = lanes.lock().for_faults(share);
    if let Some(requester) = requester {
        requester.request(runs);
    }
}

impl Drop for FetchLanes {
    fn drop(&mut self) {
        drop(self.handlers.take());
        let ended = std::mem::take(&mut self.lanes.lock().all);
        drop(ended);
        // A guest that may have been promised to run keeps waiting for what is missing. The next
        // process needs the registration, and without it the pages would read as zeros.
        if let Some(context) = &self.context
            && context.missing.is_needless()
        {
            // Fails only for memory that was unmapped meanwhile.
            let _ = context.missing.finish();
        }
    }
}

impl Lanes {
    fn index(&self, lane: u8) -> Option<usize> {
        let index = usize::from(lane.checked_sub(self.first)?);
        (index < self.all.len()).then_some(index)
    }

    fn get(&mut self, lane: u8) -> Option<&mut Lane> {
        let index = self.index(lane)?;
        self.all.get_mut(index)
    }

    fn duty(&self, lane: u8) -> Duty {
        let faults = self.first.saturating_add(self.announced.faults);
        if lane < faults { Duty::Faults } else { Duty::Background }
    }

    fn requesters(&self, duty: Duty) -> Vec<Arc<Requester>> {
        let of_duty = |(number, _): &(u8, &Lane)| self.duty(*number) == duty;
        let requester = |(_, lane): (u8, &Lane)| match &lane.channel {
            Channel::Fetching(lane) => Some(Arc::clone(lane.requester())),
            Channel::None | Channel::Idle(_) => None,
        };
        (self.first..).zip(&self.all).filter(of_duty).filter_map(requester).collect()
    }

    /// Number of lanes.
    pub(super) fn count(&self) -> u32 {
        self.announced.count().into()
    }

    /// Number of lanes without a channel.
    fn lost_channels(&self) -> u32 {
        let is_lost = |lane: &&Lane| match &lane.channel {
            Channel::Fetching(lane) => !lane.requester().is_open(),
            Channel::None | Channel::Idle(_) => true,
        };
        self.all.iter().filter(is_lost).count() as u32
    }

    /// Notes since when channels are lost, or that none is any more.
    fn note_losses(&mut self) {
        // Without lanes, the source has not offered any since the receiver was restarted.
        let is_lost = self.runs && (self.all.is_empty() || self.lost_channels() > 0);
        match self.losses.since {
            None if is_lost => self.losses.since = Some(Instant::now()),
            Some(since) if !is_lost => {
                self.losses.down += since.elapsed();
                self.losses.since = None;
            }
            _ => {}
        }
    }

    /// Number of channels that are lost now, and for how long at least one has been.
    pub(super) fn lost_now(&mut self) -> (u32, Option<Duration>) {
        self.note_losses();
        (self.lost_channels(), self.losses.since.map(|since| since.elapsed()))
    }

    /// How many lost channels were replaced, and for how long at least one was lost in all.
    pub(super) fn reconnections(&self) -> (u32, Duration) {
        let Losses { reconnections, since, down } = &self.losses;
        (*reconnections, *down + since.map_or(Duration::ZERO, |since| since.elapsed()))
    }

    /// The lane for the faults of a share of the memory: another one while that has no channel.
    fn for_faults(&self, share: usize) -> Option<Arc<Requester>> {
        let mut lanes = self.requesters(Duty::Faults);
        lanes.retain(|lane| lane.is_open());
        lanes.get(share % lanes.len().max(1)).cloned()
    }
}
