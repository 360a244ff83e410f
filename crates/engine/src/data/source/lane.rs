//! The sending thread of one lane of the source.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::Sender;
use vmferry_codec::EncodedFrame;
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter, RateLimiter};

use super::chooser::Chooser;
use super::outgoing::{Next, Outgoing};
use super::pool::{Finished, FrameInfo, Maker};
use super::window::Window;
use crate::cpu::CpuMeter;
use crate::driver::source::connect::DataChannel;
use crate::driver::source::orders::SentCounters;
use crate::error::MigrateError;
use crate::link::{channel_name, lost};
use crate::machine::source::io::Input;
use crate::rounds::tracker::LaneTotals;

/// State shared by all lanes.
#[derive(Clone)]
pub struct LaneContext {
    /// The cap over all lanes.
    pub limiter: RateLimiter,
    /// Receives measurements of the link.
    pub chooser: Arc<Chooser>,
    /// Queue for results.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// Counters of what was written to the channels, for progress displays.
    pub sent: Arc<SentCounters>,
}

/// The source of a lane's frames.
pub enum FrameSource {
    /// The workers and the lane's sender itself.
    Maker(Box<Maker>),
    /// Other threads, through this queue.
    Queue(Arc<Outgoing<Finished>>),
}

impl FrameSource {
    fn outgoing(&self) -> Arc<Outgoing<Finished>> {
        match self {
            Self::Maker(maker) => maker.outgoing(),
            Self::Queue(outgoing) => Arc::clone(outgoing),
        }
    }

    fn next(&mut self) -> Result<Next<Finished>, MigrateError> {
        match self {
            Self::Maker(maker) => maker.next(),
            Self::Queue(outgoing) => outgoing.take_or_make(|| Ok(None)),
        }
    }
}

/// A running lane. It sends its frames in order until its queue is closed. It outlives its channel:
/// on a new one it first sends all frames again that are not placed.
pub struct Lane {
    number: u8,
    outgoing: Arc<Outgoing<Finished>>,
    totals: Arc<Mutex<LaneTotals>>,
    results: Sender<Input>,
    sender: Option<JoinHandle<()>>,
    next: Arc<NextChannel>,
    /// How often the lane's channel was dialed before.
    attempt: u64,
    closer: ChannelCloser,
    watch: Option<JoinHandle<()>>,
}

/// The next channel for a lane whose channel is lost, and how often it was dialed before.
#[derive(Debug, Default)]
struct NextChannel(Mutex<Option<(ChannelWriter, u64)>>);

impl NextChannel {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<(ChannelWriter, u64)>> {
        lock(&self.0)
    }
}

impl Lane {
    /// Starts the threads on the lane's greeted channel.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(
        number: u8,
        frames: FrameSource,
        window: Arc<Window<EncodedFrame>>,
        context: LaneContext,
        channel: DataChannel,
    ) -> std::io::Result<Self> {
        let next = Arc::new(NextChannel::default());
        let (outgoing, totals) = (frames.outgoing(), Arc::default());
        let results = context.results.clone();
        let DataChannel { writer, reader, closer, .. } = channel;
        let sender = SenderThread {
            number,
            outgoing: Arc::clone(&outgoing),
            frames,
            window,
            context,
            writer,
            attempt: 0,
            next: Arc::clone(&next),
            sequence: 0,
            totals: Arc::clone(&totals),
        };
        let sender = std::thread::Builder::new()
            .name(format!("lane{number}-send"))
            .spawn(|| sender.run())?;
        let sender = Some(sender);
        let mut lane = Self {
            number,
            outgoing,
            totals,
            results,
            sender,
            next,
            attempt: 0,
            closer,
            watch: None,
        };
        lane.watch(reader)?;
        Ok(lane)
    }

    /// How often the lane's channel was dialed before.
    pub fn attempt(&self) -> u64 {
        self.attempt
    }

    /// What the lane has sent since the last call or the end of the last round.
    pub fn take_totals(&self) -> LaneTotals {
        std::mem::take(&mut *lock(&self.totals))
    }

    /// Closes the queue. The frame being sent is the last one.
    pub fn end(&self) {
        self.outgoing.close();
    }

    /// Closes the lane's channel. A thread that sends on it sees the channel as lost.
    pub fn close(&self) {
        self.closer.close();
    }

    /// Continues on a new, greeted channel. Frames that the new channel's greeting acknowledges
    /// must have left the window.
    /// # Errors
    /// The system can't create a thread.
    pub fn attach(&mut self, attempt: u64, channel: DataChannel) -> std::io::Result<()> {
        self.end_watch();
        let DataChannel { writer, reader, closer, .. } = channel;
        (self.attempt, self.closer) = (attempt, closer);
        *self.next.lock() = Some((writer, attempt));
        self.outgoing.interrupt();
        self.watch(reader)
    }

    /// Waits for the end of the channel, which an idle sender would not notice. The destination
    /// sends nothing on it.
    fn watch(&mut self, mut reader: ChannelReader) -> std::io::Result<()> {
        let (lane, attempt, results) = (self.number, self.attempt, self.results.clone());
        let watch =
            std::thread::Builder::new().name(format!("lane{lane}-watch")).spawn(move || {
                let bounded = reader.set_timeout(None);
                let error = match bounded.map(|()| reader.read(&mut [0])) {
                    Ok(Ok(0)) => std::io::ErrorKind::UnexpectedEof.into(),
                    Ok(Ok(_)) => std::io::Error::other("the other side talks on a data channel"),
                    Ok(Err(error)) => error,
                    Err(error) => std::io::Error::other(error),
                };
                let error = lost(&channel_name(Some(lane)), "sending pages", &error);
                let _ = results.send(Input::LaneLost { lane, attempt, error });
            })?;
        self.watch = Some(watch);
        Ok(())
    }

    fn end_watch(&mut self) {
        self.closer.close();
        if let Some(watch) = self.watch.take() {
            // The thread only reads.
            let _ = watch.join();
        }
    }
}

impl Drop for Lane {
    /// Waits for the threads. The queue must be closed.
    fn drop(&mut self) {
        self.end_watch();
        if let Some(sender) = self.sender.take() {
            // A panic in a lane was noticed because its results are missing, and the migration has
            // ended.
            let _ = sender.join();
        }
    }
}

struct SenderThread {
    number: u8,
    outgoing: Arc<Outgoing<Finished>>,
    frames: FrameSource,
    window: Arc<Window<EncodedFrame>>,
    context: LaneContext,
    writer: ChannelWriter,
    /// How often the channel was dialed before.
    attempt: u64,
    next: Arc<NextChannel>,
    /// Frames sent so far; the number of the last one.
    sequence: u64,
    /// Totals of the present round.
    totals: Arc<Mutex<LaneTotals>>,
}

/// Why a frame was not sent.
enum NotSent {
    /// The session ends.
    Ended,
    /// The channel was lost.
    Lost(MigrateError),
}

impl SenderThread {
    fn run(mut self) {
        let cpu = self.context.cpu.clone();
        let _cpu = cpu.count_this_thread();
        let mut idle_since = Instant::now();
        loop {
            let mut sent = match self.frames.next() {
                Ok(Next::Frame(frame)) => self.send_new(frame, idle_since),
                Ok(Next::Interrupted) => self.change_channel(),
                Ok(Next::Closed) => return,
                Err(error) => {
                    let _ = self.context.results.send(Input::Failed(error));
                    return;
                }
            };
            while let Err(not_sent) = sent {
                let NotSent::Lost(error) = not_sent else { return };
                let (lane, attempt) = (self.number, self.attempt);
                let _ = self.context.results.send(Input::LaneLost { lane, attempt, error });
                if !self.outgoing.await_interruption() {
                    return;
                }
                sent = self.change_channel();
            }
            idle_since = Instant::now();
        }
    }

    /// Numbers and sends a frame. A frame that could not be sent is kept like all that are not
    /// placed.
    fn send_new(&mut self, finished: Finished, idle_since: Instant) -> Result<(), NotSent> {
        let Finished { mut frame, what } = finished;
        let begun = Instant::now();
        self.sequence += 1;
        frame.set_sequence(self.sequence);
        let bytes = frame.wire_bytes() as u64;
        let sent = self.send(&frame, matches!(what, FrameInfo::EndOfRound { .. }));
        if sent.is_ok() {
            let took = begun.elapsed();
            self.context.chooser.sent(self.number, bytes, begun - idle_since, took);
        }
        self.context.sent.frame(bytes);
        self.window.sent(self.sequence, frame);
        self.count(bytes, what);
        sent
    }

    /// Switches to the next channel if there is one. Frames that are not placed are sent again
    /// first.
    fn change_channel(&mut self) -> Result<(), NotSent> {
        let Some((writer, attempt)) = self.next.lock().take() else { return Ok(()) };
        (self.writer, self.attempt) = (writer, attempt);
        let (lane, mut frames, mut bytes) = (self.number, 0, 0);
        let mut again = self.window.take_unplaced();
        let mut sent = Ok(());
        while let Some((sequence, frame)) = again.pop_front() {
            if sent.is_ok() {
                sent = self.send(&frame, again.is_empty());
                frames += 1;
                bytes += frame.wire_bytes() as u64;
            }
            self.window.sent(sequence, frame);
        }
        let _ = self.context.results.send(Input::Resent { lane, frames, bytes });
        sent
    }

    /// Sends a frame within the bandwidth cap.
    fn send(&mut self, frame: &EncodedFrame, flush: bool) -> Result<(), NotSent> {
        if !self.context.limiter.take(frame.wire_bytes() as u64) {
            return Err(NotSent::Ended);
        }
        let written = frame
            .write_to(&mut self.writer)
            .and_then(|()| if flush { self.writer.flush() } else { Ok(()) });
        let channel = || channel_name(Some(self.number));
        written.map_err(|error| NotSent::Lost(lost(&channel(), "sending pages", &error)))
    }

    fn count(&mut self, bytes: u64, what: FrameInfo) {
        let mut totals = lock(&self.totals);
        totals.bytes += bytes;
        match what {
            FrameInfo::Pages(counts, decision) => {
                self.context.sent.pages(&counts);
                totals.add(&counts, &decision);
            }
            FrameInfo::EndOfRound { rearm, log, free } => {
                totals.rearm = rearm;
                totals.log = log;
                totals.free_pages = free;
                let totals = std::mem::take(&mut *totals);
                let (lane, end_sequence) = (self.number, self.sequence);
                let sent = Input::LaneSent { lane, end_sequence, totals };
                let _ = self.context.results.send(sent);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
