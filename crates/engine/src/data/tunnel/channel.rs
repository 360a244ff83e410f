//! A tunnel's channel: the thread that sends and the thread that receives.

use std::io::{self, BufReader, Read, Write};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::Mutex;
use vmferry_memory::GuestBytes;
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};
use vmferry_wire::{MAX_TUNNEL_BYTES, TUNNEL_HEADER_BYTES, TunnelHeader};

use super::{OnLoss, Shared, State};
use crate::error::MigrateError;
use crate::link::{DataChannel, channel_name, lost};

/// The threads of one channel. Dropping it closes the channel and waits for them. The tunnel must
/// have another channel by then, or must have ended.
pub struct Channel {
    closer: ChannelCloser,
    threads: Vec<JoinHandle<()>>,
}

/// What one channel's threads share.
#[derive(Clone)]
struct Present {
    shared: Arc<Shared>,
    number: u64,
    closer: ChannelCloser,
    on_loss: Arc<Mutex<Option<OnLoss>>>,
}

/// What to send next.
enum Next {
    /// All bytes before this offset have arrived.
    Received(u64),
    /// Bytes from this offset on.
    Data(u64),
}

impl Channel {
    /// Starts to send and to receive.
    pub fn start(shared: &Arc<Shared>, channel: DataChannel, on_loss: OnLoss) -> io::Result<Self> {
        let DataChannel { reader, writer, closer } = channel;
        let present = Present {
            shared: Arc::clone(shared),
            number: shared.leave_channel(),
            closer: closer.clone(),
            on_loss: Arc::new(Mutex::new(Some(on_loss))),
        };
        let mut started = Self { closer, threads: Vec::new() };
        let sending = present.clone();
        let lane = shared.lane;
        let thread = std::thread::Builder::new().name(format!("tunnel{lane}-send"));
        let spawned = thread.spawn(move || sending.end(|present| present.send(writer)));
        started.threads.push(spawned?);
        let thread = std::thread::Builder::new().name(format!("tunnel{lane}-recv"));
        let spawned = thread.spawn(move || present.end(|present| present.receive(reader)));
        // Dropping what has started waits for the other thread.
        started.threads.push(spawned.inspect_err(|_| {
            shared.leave_channel();
        })?);
        Ok(started)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.closer.close();
        for thread in self.threads.drain(..) {
            // A panic there was noticed as a lost channel.
            let _ = thread.join();
        }
    }
}

impl Present {
    /// Runs one of the two threads, and reports why it ended, unless it was replaced.
    fn end(self, work: impl FnOnce(&Self) -> MigrateError) {
        let cpu = self.shared.cpu.clone();
        let _cpu = cpu.count_this_thread();
        let error = work(&self);
        // Before the channel is closed: that makes the other thread fail, too, and the cause would
        // be lost.
        let on_loss = self.on_loss.lock().take();
        // The other thread must end too, and the other side must notice.
        self.closer.close();
        let is_present = {
            let mut state = self.shared.state.lock();
            let is_present = self.is_present(&state);
            if is_present {
                state.is_agreed = false;
            }
            is_present
        };
        self.shared.changed.notify_all();
        if let Some(on_loss) = on_loss.filter(|_| is_present) {
            on_loss(error);
        }
    }

    fn is_present(&self, state: &State) -> bool {
        state.channel == self.number && !state.closed
    }

    fn lost(&self, error: &io::Error) -> MigrateError {
        lost(&channel_name(Some(self.shared.lane)), "post-copy", error)
    }

    fn replaced(&self) -> MigrateError {
        self.lost(&io::Error::other("it was replaced"))
    }

    fn send(&self, mut writer: ChannelWriter) -> MigrateError {
        let mut part = GuestBytes::new();
        loop {
            let Some(next) = self.next(&mut part) else { return self.replaced() };
            let header = match next {
                Next::Received(offset) => TunnelHeader::Received { offset },
                Next::Data(offset) => TunnelHeader::Data { offset, bytes: part.len() as u32 },
            };
            if let Next::Data(offset) = next {
                let bytes = part.len() as u64;
                let limiter = self.shared.way.background.as_ref();
                if limiter.is_some_and(|limiter| !limiter.take(bytes)) {
                    return self.lost(&io::Error::other("the migration ends"));
                }
                self.shared.state.lock().flight.sent(offset + bytes, Instant::now());
                if let Some(on_sent) = &self.shared.way.on_sent {
                    on_sent(bytes);
                }
            }
            let written = writer
                .write_all(&header.encode())
                .and_then(|()| writer.write_all(&part))
                .and_then(|()| writer.flush());
            if let Err(error) = written {
                return self.lost(&error);
            }
        }
    }

    /// Blocks until there is something to send. Bytes are copied into `part`, which is empty for
    /// an acknowledgement. `None` at the end.
    fn next(&self, part: &mut GuestBytes) -> Option<Next> {
        part.clear();
        let mut state = self.shared.state.lock();
        loop {
            if !self.is_present(&state) {
                return None;
            }
            if state.told != Some(state.received) {
                state.told = Some(state.received);
                return Some(Next::Received(state.received));
            }
            let in_flight = state.next - state.acknowledged;
            let room = state.flight.room(in_flight).min(MAX_TUNNEL_BYTES as usize);
            if state.is_agreed && room > 0 {
                let bytes = state.outgoing.peek(in_flight as usize, room);
                if !bytes.is_empty() {
                    part.extend_from_slice(bytes);
                    let offset = state.next;
                    state.next += part.len() as u64;
                    return Some(Next::Data(offset));
                }
            }
            self.shared.changed.wait(&mut state);
        }
    }

    fn receive(&self, mut reader: ChannelReader) -> MigrateError {
        // A guest may need nothing for a long time.
        if let Err(error) = reader.set_timeout(None) {
            return self.lost(&io::Error::other(error));
        }
        let mut reader = BufReader::with_capacity(MAX_TUNNEL_BYTES as usize, reader);
        let (mut header, mut part) = ([0; TUNNEL_HEADER_BYTES], GuestBytes::new());
        part.extend_to(MAX_TUNNEL_BYTES as usize);
        let mut at = 0;
        loop {
            if let Err(error) = reader.read_exact(&mut header) {
                return self.lost(&error);
            }
            let part_at = at;
            let taken = match TunnelHeader::parse(&header) {
                Ok(TunnelHeader::Received { offset }) => self.on_received(offset),
                Ok(TunnelHeader::Data { offset, bytes }) => {
                    let part = &mut part[..bytes as usize];
                    if let Err(error) = reader.read_exact(part) {
                        return self.lost(&error);
                    }
                    at += part.len() as u64;
                    match self.on_data(offset, part) {
                        Ok(true) => Ok(()),
                        Ok(false) => return self.replaced(),
                        Err(reason) => Err(reason),
                    }
                }
                Err(error) => Err(error.to_string()),
            };
            if let Err(reason) = taken {
                let channel = channel_name(Some(self.shared.lane));
                return MigrateError::protocol(channel, part_at, reason);
            }
            at += TUNNEL_HEADER_BYTES as u64;
        }
    }

    /// The other side has received everything before this offset.
    fn on_received(&self, offset: u64) -> Result<(), String> {
        let mut state = self.shared.state.lock();
        if !self.is_present(&state) {
            return Ok(());
        }
        let end = state.acknowledged + state.outgoing.len() as u64;
        let sent = if state.is_agreed { state.next } else { end };
        if !(state.acknowledged..=sent).contains(&offset) {
            let from = state.acknowledged;
            return Err(format!("{offset} bytes were received, of {from} to {sent}"));
        }
        let bytes = offset - state.acknowledged;
        state.outgoing.consume(bytes as usize);
        state.acknowledged = offset;
        if state.is_agreed {
            state.flight.acknowledged(offset, bytes, Instant::now());
        } else {
            (state.is_agreed, state.next) = (true, offset);
        }
        drop(state);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Bytes of the stream have arrived. Returns false if the channel was replaced.
    fn on_data(&self, offset: u64, bytes: &[u8]) -> Result<bool, String> {
        let mut state = self.shared.state.lock();
        if state.told.is_none() || offset != state.received {
            return Err(format!("bytes from {offset} on instead of {}", state.received));
        }
        while state.incoming.room() < bytes.len() {
            if !self.is_present(&state) {
                return Ok(false);
            }
            self.shared.changed.wait(&mut state);
        }
        if !self.is_present(&state) {
            return Ok(false);
        }
        state.incoming.push(bytes);
        state.received += bytes.len() as u64;
        drop(state);
        self.shared.changed.notify_all();
        Ok(true)
    }
}
