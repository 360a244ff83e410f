//! One fetch lane: the half of a channel that requests pages, and the thread that places them.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::Mutex;
use vmferry_codec::{Decoder, Decompressors, Frame};
use vmferry_memory::{PageRun, SlotId};
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};
use vmferry_wire::PageRequest;

use super::pace::Pace;
use super::{FetchContext, place};
use crate::data::destination::missing::MissingPages;
use crate::data::destination::place::FrameReader;
use crate::error::MigrateError;
use crate::link::{DataChannel, channel_name, lost};
use crate::machine::destination::io::Input;

/// What a fetch lane is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// Pages that threads of the guest wait for.
    Faults,
    /// All other missing pages.
    Background,
}

/// One fetch lane with its channel. Dropping it closes the channel and waits for the thread.
pub struct FetchLane {
    requester: Arc<Requester>,
    thread: Option<JoinHandle<()>>,
}

/// The half of a fetch lane that sends requests.
pub struct Requester {
    writer: Mutex<ChannelWriter>,
    closer: ChannelCloser,
    missing: Arc<MissingPages>,
    background: Mutex<Background>,
    /// The channel has not ended.
    open: AtomicBool,
    /// When the lane was started.
    begun: Instant,
}

/// The background requests of a lane.
#[derive(Default)]
struct Background {
    begun: bool,
    /// Requests whose answers have not come, in the order in which they were made.
    outstanding: VecDeque<Outstanding>,
    pages: u64,
    pace: Pace,
}

struct Outstanding {
    run: PageRun,
    since: Instant,
}

impl FetchLane {
    /// Starts the lane on a greeted channel that was dialed `attempt` times before.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(
        (lane, attempt): (u8, u64),
        channel: DataChannel,
        context: FetchContext,
    ) -> io::Result<Self> {
        let DataChannel { reader, writer, closer } = channel;
        let requester = Arc::new(Requester {
            writer: Mutex::new(writer),
            closer,
            missing: Arc::clone(&context.missing),
            background: Mutex::default(),
            open: AtomicBool::new(true),
            begun: Instant::now(),
        });
        let fetching = Arc::clone(&requester);
        let thread =
            std::thread::Builder::new().name(format!("lane{lane}-fetch")).spawn(move || {
                let _cpu = context.cpu.count_this_thread();
                let error = fetch(lane, reader, &fetching, &context);
                // If only one direction is broken, the source would not notice the loss otherwise.
                fetching.closer.close();
                fetching.end();
                let error = context.missing.give_up_load().err().unwrap_or(error);
                let _ = context.results.send(match error {
                    error @ MigrateError::LinkLost { .. } => {
                        Input::LaneLost { lane, attempt, error }
                    }
                    error => Input::Failed(error),
                });
            })?;
        Ok(Self { requester, thread: Some(thread) })
    }

    /// The half that sends requests.
    #[must_use]
    pub fn requester(&self) -> &Arc<Requester> {
        &self.requester
    }
}

impl Drop for FetchLane {
    fn drop(&mut self) {
        self.requester.closer.close();
        if let Some(thread) = self.thread.take() {
            // A panic there was noticed as a lane that no longer answers.
            let _ = thread.join();
        }
    }
}

impl Requester {
    /// Whether the channel has not ended, as far as is known.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// Requests pages that threads wait for. A channel that fails is closed, which its reader
    /// reports.
    pub fn request(&self, pages: &[(SlotId, u64)]) {
        self.write(pages.iter().map(|&(slot, page)| PageRun { slot, first: page, pages: 1 }));
    }

    /// From now on this lane requests pages in the background.
    pub fn begin_background(&self) {
        self.background.lock().begun = true;
        self.fill();
    }

    /// Requests background pages until the window is full.
    pub fn fill(&self) {
        // Locked until the requests are written, so that they are answered in the recorded order.
        let mut background = self.background.lock();
        let mut runs = Vec::new();
        while background.begun
            && let Some(most) = background.pace.next_pages(background.pages)
            && let Some(run) = self.missing.queue_next(most)
        {
            background.outstanding.push_back(Outstanding { run, since: Instant::now() });
            background.pages += run.pages;
            background.pace.requested();
            runs.push(run);
        }
        if !runs.is_empty() {
            self.write(runs);
        }
    }

    /// The oldest background request was answered.
    fn answered(&self) {
        let mut background = self.background.lock();
        if let Some(Outstanding { run, since }) = background.outstanding.pop_front() {
            background.pages -= run.pages;
            let (now, begun) = (Instant::now(), self.begun);
            background.pace.answered(now - begun, now - since, run.pages);
            // A page that the answer lacked is requested again.
            self.missing.unqueue([run]);
        }
    }

    /// The channel has ended, and outstanding answers will not come.
    fn end(&self) {
        self.open.store(false, Ordering::Release);
        let mut background = self.background.lock();
        background.begun = false;
        self.missing.unqueue(background.outstanding.drain(..).map(|lost| lost.run));
    }

    fn write(&self, runs: impl IntoIterator<Item = PageRun>) {
        let mut writer = self.writer.lock();
        let requests = runs.into_iter().filter_map(PageRequest::new);
        let written = requests
            .map(PageRequest::encode)
            .try_for_each(|request| writer.write_all(&request))
            .and_then(|()| writer.flush());
        if written.is_err() {
            self.closer.close();
        }
    }
}

/// Places what arrives until the channel ends, and returns why it did.
fn fetch(
    lane: u8,
    mut reader: ChannelReader,
    requester: &Requester,
    context: &FetchContext,
) -> MigrateError {
    if let Err(error) = reader.set_timeout(None) {
        return lost(&channel_name(Some(lane)), "fetching pages", &io::Error::other(error));
    }
    let mut frames = FrameReader::new(lane, reader);
    let (mut frame, mut decoder) = (Frame::new(), Decoder::new(Decompressors::default()));
    loop {
        let offset = frames.offset();
        if let Err(error) = frames.receive(&mut frame) {
            return error;
        }
        match place(&context.missing, &mut decoder, &frame, (lane, offset)) {
            Ok(true) => {
                let _ = context.results.send(Input::Fetched);
            }
            Ok(false) => {}
            Err(error) => return error,
        }
        requester.answered();
        requester.fill();
    }
}
