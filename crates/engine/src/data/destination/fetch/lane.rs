//! One fetch lane: the half of a channel that requests pages, and the thread that places them.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::Mutex;
use vmferry_codec::{Decoder, Decompressors, Frame};
use vmferry_memory::PageRun;
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
    requests: Mutex<Requests>,
    /// The channel has not ended.
    open: AtomicBool,
    /// When the lane was started.
    begun: Instant,
}

/// The requests of a lane.
#[derive(Default)]
struct Requests {
    /// Whether pages are requested in the background.
    background: bool,
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
            requests: Mutex::default(),
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

impl Requests {
    fn record(&mut self, run: PageRun) {
        self.outstanding.push_back(Outstanding { run, since: Instant::now() });
        self.pages += run.pages;
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
    pub fn request(&self, runs: &[PageRun]) {
        // Locked until the requests are written, so that they are answered in the recorded order.
        let mut requests = self.requests.lock();
        self.write(runs.iter().copied().inspect(|run| requests.record(*run)));
    }

    /// From now on this lane requests pages in the background.
    pub fn begin_background(&self) {
        self.requests.lock().background = true;
        self.fill();
    }

    /// Requests background pages until the window is full.
    pub fn fill(&self) {
        // Locked as above.
        let mut requests = self.requests.lock();
        let mut runs = Vec::new();
        while requests.background
            && let Some(most) = requests.pace.next_pages(requests.pages)
            && let Some(run) = self.missing.queue_next(most)
        {
            requests.record(run);
            requests.pace.requested();
            runs.push(run);
        }
        if !runs.is_empty() {
            self.write(runs);
        }
    }

    /// The oldest request was answered. Returns whether a page is still missing that a thread waits
    /// for: then the answer was to another request.
    fn answered(&self) -> bool {
        let mut requests = self.requests.lock();
        let Some(Outstanding { run, since }) = requests.outstanding.pop_front() else {
            return false;
        };
        requests.pages -= run.pages;
        if !requests.background {
            return self.missing.has_any(run);
        }
        let (now, begun) = (Instant::now(), self.begun);
        requests.pace.answered(now - begun, now - since, run.pages);
        // A page that the answer lacked is requested again.
        self.missing.unqueue([run]);
        false
    }

    /// The channel has ended, and outstanding answers will not come.
    fn end(&self) {
        self.open.store(false, Ordering::Release);
        let mut requests = self.requests.lock();
        let lost = std::mem::take(&mut requests.outstanding);
        if std::mem::take(&mut requests.background) {
            self.missing.unqueue(lost.into_iter().map(|lost| lost.run));
        }
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
        if requester.answered() {
            let reason = "the answer to a request for a page lacks it";
            return MigrateError::protocol(channel_name(Some(lane)), offset, reason);
        }
        requester.fill();
    }
}
