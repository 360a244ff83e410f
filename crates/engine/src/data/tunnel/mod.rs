//! Tunnels: the streams of a carried guest after the switchover with post-copy.
//!
//! ```text
//!  the VMM's socket -> reader -> outgoing buffer -> sender -> channel
//!  the VMM's socket <- writer <- incoming buffer <- receiver <- channel
//! ```
//! A tunnel carries one byte stream in each direction over a fetch lane, and outlives the lane's
//! channels: bytes are kept until the other side has received them, and sent again on the next
//! channel. Reader and writer live as long as the tunnel, sender and receiver as long as a channel.
//! So the VMM never sees that a link was lost.
//!
//! The VMM's sockets are never shut down here: a VMM whose migration fails has to drain them.

mod channel;
mod flight;
mod ring;
mod vmm;

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use vmferry_memory::GuestBytes;
use vmferry_transport::RateLimiter;

use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::DataChannel;
use channel::Channel;
use flight::Flight;
use ring::Ring;

/// Bytes that are buffered in each direction. It bounds what is in flight, too.
const BUFFER_BYTES: usize = 8 << 20;

/// Where a tunnel ends at its VMM.
#[derive(Default)]
pub struct TunnelEnd {
    /// What arrives is written here.
    pub into_vmm: Option<UnixStream>,
    /// What is read from here is sent.
    pub from_vmm: Option<UnixStream>,
    /// Bytes that were read from there already.
    pub first: Option<GuestBytes>,
    /// Called when the VMM has closed `from_vmm`.
    pub on_end: Option<Box<dyn FnOnce() + Send>>,
}

/// How a tunnel sends.
#[derive(Clone, Default)]
pub struct TunnelWay {
    /// For bytes that no thread waits for: they are sent within this cap, and leave the queues on
    /// the way short. `None` for bytes that threads wait for.
    pub background: Option<RateLimiter>,
    /// Counts the bytes that were read from the VMM and sent.
    pub on_sent: Option<Arc<dyn Fn(u64) + Send + Sync>>,
}

/// Called when the channel is lost, once for each channel.
pub type OnLoss = Box<dyn FnOnce(MigrateError) + Send>;

/// A tunnel, which outlives its channels. After a drop, none of its threads is left.
pub struct Tunnel {
    shared: Arc<Shared>,
    channel: Option<Channel>,
    at_vmm: Vec<JoinHandle<()>>,
}

struct Shared {
    lane: u8,
    way: TunnelWay,
    cpu: CpuMeter,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// From the VMM: bytes that the other side has not received, from `acknowledged` on.
    outgoing: Ring,
    acknowledged: u64,
    /// The next byte to send on the present channel.
    next: u64,
    /// The other side has said on the present channel where to continue.
    is_agreed: bool,
    flight: Flight,
    /// For the VMM: bytes that were not written yet.
    incoming: Ring,
    /// Number of bytes that have arrived.
    received: u64,
    /// The number that the other side was told on the present channel.
    told: Option<u64>,
    /// Identifies the present channel. The threads of an earlier one end.
    channel: u64,
    /// The tunnel ends.
    closed: bool,
}

impl Tunnel {
    /// A tunnel of this lane without a channel and without a VMM.
    #[must_use]
    pub fn new(lane: u8, way: TunnelWay, cpu: CpuMeter) -> Self {
        let flight = if way.background.is_some() { Flight::paced() } else { Flight::unlimited() };
        let state = State {
            outgoing: Ring::new(BUFFER_BYTES),
            acknowledged: 0,
            next: 0,
            is_agreed: false,
            flight,
            incoming: Ring::new(BUFFER_BYTES),
            received: 0,
            told: None,
            channel: 0,
            closed: false,
        };
        let shared =
            Shared { lane, way, cpu, state: Mutex::new(state), changed: Condvar::default() };
        Self { shared: Arc::new(shared), channel: None, at_vmm: Vec::new() }
    }

    /// Connects it with its VMM.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn begin(&mut self, end: TunnelEnd) -> std::io::Result<()> {
        let TunnelEnd { into_vmm, from_vmm, first, on_end } = end;
        if let Some(socket) = from_vmm {
            self.at_vmm.push(vmm::read_from(&self.shared, socket, first, on_end)?);
        }
        if let Some(socket) = into_vmm {
            self.at_vmm.push(vmm::write_into(&self.shared, socket)?);
        }
        Ok(())
    }

    /// Uses a greeted channel, in place of the earlier one.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn attach(&mut self, channel: DataChannel, on_loss: OnLoss) -> std::io::Result<()> {
        self.detach();
        self.channel = Some(Channel::start(&self.shared, channel, on_loss)?);
        Ok(())
    }

    /// Closes the channel, if there is one.
    pub fn detach(&mut self) {
        self.shared.leave_channel();
        self.channel = None;
    }
}

impl Shared {
    /// Ends the threads of the present channel, and returns the next one's number.
    fn leave_channel(&self) -> u64 {
        let mut state = self.state.lock();
        state.channel += 1;
        (state.is_agreed, state.told) = (false, None);
        state.flight.restart();
        let number = state.channel;
        drop(state);
        self.changed.notify_all();
        number
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.detach();
        for thread in self.at_vmm.drain(..) {
            // A panic there was noticed because bytes are missing.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
