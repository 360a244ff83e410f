//! The thread that sends a lane's frames on its channel, and its handle.

use std::io::{Read, Write};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use vmferry_codec::EncodedFrame;
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter, RateLimiter};

use super::queue::Next;
use super::{FrameSummary, QueuedFrame, SourceLane};
use crate::cpu::CpuMeter;
use crate::data::source::page_encoder::PageEncoder;
use crate::data::source::sent::SentCounters;
use crate::error::MigrateError;
use crate::link::{DataChannel, channel_name, lost};
use crate::machine::source::io::Input;

/// State shared by all senders.
#[derive(Clone)]
pub struct SenderContext {
    /// The cap over all lanes.
    pub limiter: RateLimiter,
    /// Queue for results.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// Counters of what was written to the channels, for progress displays.
    pub sent: Arc<SentCounters>,
}

/// A lane's running sender. It sends the lane's frames in order until the lane is closed. It
/// outlives its channel: on a new one it first sends all frames again that are not placed.
pub struct LaneSender {
    lane: Arc<SourceLane>,
    results: Sender<Input>,
    thread: Option<JoinHandle<()>>,
    next_channel: Arc<Mutex<Option<SendingHalf>>>,
    /// How often the lane's channel was dialed before.
    attempt: u64,
    closer: ChannelCloser,
    watcher: Option<JoinHandle<()>>,
}

/// The sending half of a channel.
struct SendingHalf {
    writer: ChannelWriter,
    /// How often the channel was dialed before.
    attempt: u64,
}

impl LaneSender {
    /// Starts the threads on the lane's greeted channel. With an `encoder` the sender makes frames
    /// itself while nothing is compressed.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(
        lane: Arc<SourceLane>,
        encoder: Option<PageEncoder>,
        context: SenderContext,
        channel: DataChannel,
    ) -> std::io::Result<Self> {
        let (number, attempt) = (lane.number(), 0);
        let DataChannel { reader, writer, closer } = channel;
        let mut sender = Self {
            lane: Arc::clone(&lane),
            results: context.results.clone(),
            thread: None,
            next_channel: Arc::default(),
            attempt,
            closer,
            watcher: None,
        };
        let thread = SenderThread {
            lane,
            encoder,
            context,
            channel: SendingHalf { writer, attempt },
            next_channel: Arc::clone(&sender.next_channel),
            sequence: 0,
        };
        let builder = std::thread::Builder::new().name(format!("lane{number}-send"));
        sender.thread = Some(builder.spawn(|| thread.run())?);
        sender.watch(reader)?;
        Ok(sender)
    }

    /// How often the lane's channel was dialed before.
    pub fn attempt(&self) -> u64 {
        self.attempt
    }

    /// Closes the lane's channel. A thread that sends on it sees the channel as lost.
    pub fn close_channel(&self) {
        self.closer.close();
    }

    /// Continues on a new, greeted channel. Frames that the new channel's greeting acknowledges
    /// must have left the window.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn attach(&mut self, attempt: u64, channel: DataChannel) -> std::io::Result<()> {
        self.end_watch();
        let DataChannel { reader, writer, closer } = channel;
        (self.attempt, self.closer) = (attempt, closer);
        *self.next_channel.lock() = Some(SendingHalf { writer, attempt });
        self.lane.queue.interrupt();
        self.watch(reader)
    }

    /// Waits for the end of the channel, which an idle sender would not notice. The destination
    /// sends nothing on it.
    fn watch(&mut self, mut reader: ChannelReader) -> std::io::Result<()> {
        let (lane, attempt, results) = (self.lane.number, self.attempt, self.results.clone());
        let watcher =
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
        self.watcher = Some(watcher);
        Ok(())
    }

    fn end_watch(&mut self) {
        self.closer.close();
        if let Some(watcher) = self.watcher.take() {
            // The thread only reads.
            let _ = watcher.join();
        }
    }
}

impl Drop for LaneSender {
    /// Waits for the threads. The lane must be closed.
    fn drop(&mut self) {
        self.end_watch();
        if let Some(thread) = self.thread.take() {
            // A panic in a sender was noticed because its results are missing, and the migration
            // has ended.
            let _ = thread.join();
        }
    }
}

struct SenderThread {
    lane: Arc<SourceLane>,
    /// Encodes pages while nothing is compressed.
    encoder: Option<PageEncoder>,
    context: SenderContext,
    channel: SendingHalf,
    next_channel: Arc<Mutex<Option<SendingHalf>>>,
    /// Frames sent so far; the number of the last one.
    sequence: u64,
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
            let mut sent = match self.next() {
                Ok(Next::Frame(frame)) => self.send(frame, idle_since),
                Ok(Next::Interrupted) => self.change_channel(),
                Ok(Next::Closed) => return,
                Ok(Next::Empty) => {
                    self.lane.queue.wait();
                    continue;
                }
                Err(error) => {
                    let _ = self.context.results.send(Input::Failed(error));
                    return;
                }
            };
            while let Err(not_sent) = sent {
                let NotSent::Lost(error) = not_sent else { return };
                let (lane, attempt) = (self.lane.number, self.channel.attempt);
                let _ = self.context.results.send(Input::LaneLost { lane, attempt, error });
                if !self.lane.queue.await_interruption() {
                    return;
                }
                sent = self.change_channel();
            }
            idle_since = Instant::now();
        }
    }

    /// The lane's next frame: one from the queue, else one that is made here.
    fn next(&mut self) -> Result<Next<QueuedFrame>, MigrateError> {
        match self.lane.queue.take() {
            Next::Empty => Ok(self.encode()?.map_or(Next::Empty, Next::Frame)),
            next => Ok(next),
        }
    }

    /// Makes a frame if the lane has pages to send, a buffer is free, and nothing is compressed.
    fn encode(&mut self) -> Result<Option<QueuedFrame>, MigrateError> {
        let Self { lane, encoder: Some(encoder), .. } = self else { return Ok(None) };
        if !lane.chooser.skips_compression() {
            return Ok(None);
        }
        let Some((batch, buffer)) = lane.next_batch()? else { return Ok(None) };
        let decision = lane.chooser.choose_uncompressed(batch.round());
        let frame = lane.encode(encoder, &batch, buffer, decision)?;
        lane.queue.pass();
        Ok(Some(frame))
    }

    /// Numbers and sends a frame. A frame that could not be sent is kept like all that are not
    /// placed.
    fn send(&mut self, queued: QueuedFrame, idle_since: Instant) -> Result<(), NotSent> {
        let QueuedFrame { mut frame, summary } = queued;
        let begun = Instant::now();
        self.sequence += 1;
        frame.set_sequence(self.sequence);
        let bytes = frame.wire_bytes() as u64;
        let sent = self.write(&frame, matches!(summary, FrameSummary::EndOfRound { .. }));
        if sent.is_ok() {
            let took = begun.elapsed();
            self.lane.chooser.sent(self.lane.number, bytes, begun - idle_since, took);
        }
        self.context.sent.frame(bytes);
        self.lane.window.sent(self.sequence, frame);
        self.count(bytes, summary);
        sent
    }

    /// Writes a frame within the bandwidth cap.
    fn write(&mut self, frame: &EncodedFrame, flush: bool) -> Result<(), NotSent> {
        if !self.context.limiter.take(frame.wire_bytes() as u64) {
            return Err(NotSent::Ended);
        }
        let writer = &mut self.channel.writer;
        let written =
            frame.write_to(writer).and_then(|()| if flush { writer.flush() } else { Ok(()) });
        let channel = || channel_name(Some(self.lane.number));
        written.map_err(|error| NotSent::Lost(lost(&channel(), "sending pages", &error)))
    }

    fn count(&self, bytes: u64, summary: FrameSummary) {
        let mut totals = self.lane.totals.lock();
        totals.bytes += bytes;
        match summary {
            FrameSummary::Pages { counts, decision } => {
                self.context.sent.pages(&counts);
                totals.add(&counts, &decision);
            }
            FrameSummary::EndOfRound { rearm_time, log, free_pages } => {
                totals.rearm = rearm_time;
                totals.log = log;
                totals.free_pages = free_pages;
                let totals = std::mem::take(&mut *totals);
                let (lane, end_sequence) = (self.lane.number, self.sequence);
                let sent = Input::LaneSent { lane, end_sequence, totals };
                let _ = self.context.results.send(sent);
            }
        }
    }

    /// Switches to the next channel if there is one. Frames that are not placed are sent again
    /// first.
    fn change_channel(&mut self) -> Result<(), NotSent> {
        let Some(channel) = self.next_channel.lock().take() else { return Ok(()) };
        self.channel = channel;
        let (lane, mut frames, mut bytes) = (self.lane.number, 0, 0);
        let mut again = self.lane.window.take_unplaced();
        let mut sent = Ok(());
        while let Some((sequence, frame)) = again.pop_front() {
            if sent.is_ok() {
                sent = self.write(&frame, again.is_empty());
                frames += 1;
                bytes += frame.wire_bytes() as u64;
            }
            self.lane.window.sent(sequence, frame);
        }
        let _ = self.context.results.send(Input::Resent { lane, frames, bytes });
        sent
    }
}
