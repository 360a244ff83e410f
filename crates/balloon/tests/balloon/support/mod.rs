//! A driver for tests: it sets up queues in guest memory and adds buffers to them.
//!
//! `virtio-queue` has its own (`MockSplitQueue`), but its used ring is in the second half of the
//! available ring, and the return of used buffers cannot be observed.

use std::io;
use std::sync::{Arc, Mutex};

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmferry_balloon::{
    Balloon, BalloonConfig, BalloonHost, CommandId, Features, GuestRange, Interrupt, Progress,
    QueueKind, Statistics, Warning,
};

pub type Memory = Arc<GuestMemoryMmap<()>>;
pub type Device = Balloon<Memory, Host, Host>;

pub const SIZE: u16 = 16;
/// Guest memory: 1 MiB, a hole of 1 MiB, 256 KiB.
pub const REGIONS: [(u64, usize); 2] = [(0, 1 << 20), (2 << 20, 256 << 10)];
/// Address of device-readable buffers, after the rings.
const CONTENT: u64 = 0x4_0000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Discard(u64, u64),
    Hint { start: u64, bytes: u64, id: u32, poison: Option<u32> },
    Complete(u32),
    Deflated(u64, u64),
    Statistics(Box<Statistics>),
    Warning(Warning),
    Used(u16),
    ConfigChanged,
}

/// Records all calls of the device.
#[derive(Clone, Default)]
pub struct Host {
    pub events: Arc<Mutex<Vec<Event>>>,
    pub discard_fails: Arc<Mutex<bool>>,
}

impl Host {
    fn note(&self, event: Event) {
        self.events.lock().unwrap().push(event);
    }
}

impl BalloonHost for Host {
    fn discard(&mut self, range: GuestRange) -> io::Result<()> {
        self.note(Event::Discard(range.start.0, range.bytes));
        match *self.discard_fails.lock().unwrap() {
            true => Err(io::ErrorKind::OutOfMemory.into()),
            false => Ok(()),
        }
    }

    fn hint(&mut self, range: GuestRange, id: CommandId, poison: Option<u32>) {
        let GuestRange { start, bytes } = range;
        self.note(Event::Hint { start: start.0, bytes, id: id.number(), poison });
    }

    fn hints_complete(&mut self, id: CommandId) {
        self.note(Event::Complete(id.number()));
    }

    fn deflated(&mut self, range: GuestRange) {
        self.note(Event::Deflated(range.start.0, range.bytes));
    }

    fn statistics(&mut self, statistics: &Statistics) {
        self.note(Event::Statistics(Box::new(*statistics)));
    }

    fn warning(&mut self, warning: Warning) {
        self.note(Event::Warning(warning));
    }
}

impl Interrupt for Host {
    fn used_buffers(&mut self, queue: u16) {
        self.note(Event::Used(queue));
    }

    fn config_changed(&mut self) {
        self.note(Event::ConfigChanged);
    }
}

/// The driver's side of a queue.
#[derive(Clone, Copy, Default)]
struct Ring {
    /// The next descriptor to use; none is used twice before it is returned.
    descriptor: u16,
    available: u16,
    used: u16,
}

pub struct Driver {
    pub memory: Memory,
    pub host: Host,
    pub device: Device,
    pub config: BalloonConfig,
    rings: [Ring; 5],
    content: u64,
}

impl Driver {
    /// A driver that has accepted `features`, with the queue numbers of the specification.
    pub fn new(features: Features) -> Self {
        let mut driver = Self::unnegotiated(Features::ALL);
        driver.negotiate(features);
        let numbers = QueueKind::ALL.into_iter().filter(|kind| kind.exists(features));
        driver.activate(&numbers.map(QueueKind::number).collect::<Vec<_>>());
        driver.take_events();
        driver
    }

    pub fn unnegotiated(offered: Features) -> Self {
        let ranges = REGIONS.map(|(start, bytes)| (GuestAddress(start), bytes));
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap());
        let host = Host::default();
        let config = BalloonConfig { features: offered, queue_size: SIZE };
        let device = Balloon::new(config, Arc::clone(&memory), host.clone(), host.clone()).unwrap();
        Self { memory, host, device, config, rings: Default::default(), content: CONTENT }
    }

    pub fn negotiate(&mut self, features: Features) {
        self.device.negotiate(features.with(Features::VERSION_1)).unwrap();
    }

    pub fn activate(&mut self, indexes: &[u16]) {
        let queues = indexes.iter().map(|index| (*index, queue(*index))).collect();
        self.device.activate(queues).unwrap();
    }

    /// Makes a buffer of these descriptors available. Each is an address, a length, and whether the
    /// device may write.
    pub fn add(&mut self, index: u16, descriptors: &[(u64, u32, bool)]) -> u16 {
        let first = self.rings[usize::from(index)].descriptor;
        for (place, (address, length, writable)) in descriptors.iter().enumerate() {
            let this = first + place as u16;
            let next = place + 1 < descriptors.len();
            let flags = u16::from(next) | u16::from(*writable) << 1;
            self.write_descriptor(index, this % SIZE, *address, *length, flags, (this + 1) % SIZE);
        }
        self.rings[usize::from(index)].descriptor = (first + descriptors.len() as u16) % SIZE;
        self.offer(index, first % SIZE);
        first % SIZE
    }

    pub fn write_descriptor(
        &self,
        index: u16,
        place: u16,
        address: u64,
        length: u32,
        flags: u16,
        next: u16,
    ) {
        let at = GuestAddress(descriptors(index) + 16 * u64::from(place));
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.memory.write_slice(&bytes, at).unwrap();
    }

    /// Puts a descriptor chain's head into the available ring.
    pub fn offer(&mut self, index: u16, head: u16) {
        let ring = &mut self.rings[usize::from(index)];
        let at = available(index) + 4 + 2 * u64::from(ring.available % SIZE);
        ring.available = ring.available.wrapping_add(1);
        let next = ring.available;
        self.memory.write_obj(head, GuestAddress(at)).unwrap();
        self.set_available(index, next);
    }

    pub fn set_available(&self, index: u16, next: u16) {
        self.memory.write_obj(next, GuestAddress(available(index) + 2)).unwrap();
    }

    /// Makes a device-readable buffer with this content available.
    pub fn send(&mut self, index: u16, content: &[u8]) -> u16 {
        let at = self.place(content);
        self.add(index, &[(at, content.len() as u32, false)])
    }

    /// Writes bytes to an unused part of guest memory.
    pub fn place(&mut self, content: &[u8]) -> u64 {
        let at = self.content;
        self.memory.write_slice(content, GuestAddress(at)).unwrap();
        self.content += (content.len() as u64).next_multiple_of(64);
        at
    }

    pub fn send_numbers(&mut self, index: u16, numbers: &[u32]) -> u16 {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.send(index, &bytes)
    }

    pub fn command(&mut self, command: u32) {
        self.send(QueueKind::FreePage.number(), &command.to_le_bytes());
    }

    pub fn hint(&mut self, start: u64, bytes: u32) {
        self.add(QueueKind::FreePage.number(), &[(start, bytes, true)]);
    }

    /// Kicks a queue until all buffers are processed, and returns the events.
    pub fn kick(&mut self, index: u16) -> Vec<Event> {
        while self.device.process(index) == Progress::More {}
        self.take_events()
    }

    pub fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut *self.host.events.lock().unwrap())
    }

    /// The buffers that were returned since the last call.
    pub fn used(&mut self, index: u16) -> Vec<u16> {
        let ring = &mut self.rings[usize::from(index)];
        let end: u16 = self.memory.read_obj(GuestAddress(used(index) + 2)).unwrap();
        let mut heads = Vec::new();
        while ring.used != end {
            let at = used(index) + 4 + 8 * u64::from(ring.used % SIZE);
            let element: [u32; 2] = self.memory.read_obj(GuestAddress(at)).unwrap();
            assert_eq!(element[1], 0, "the device writes into no buffer");
            heads.push(element[0] as u16);
            ring.used = ring.used.wrapping_add(1);
        }
        heads
    }

    pub fn config(&self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.device.read_config(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Saves the device and continues with another one restored from its state.
    pub fn move_device(&mut self) {
        let state = self.device.save();
        let text = serde_json::to_string(&state).unwrap();
        let read = serde_json::from_str(&text).unwrap();
        assert_eq!(state, read);
        let memory = Arc::clone(&self.memory);
        let (host, interrupt) = (self.host.clone(), self.host.clone());
        self.device = Balloon::restore(self.config, memory, host, interrupt, &read).unwrap();
    }
}

pub fn descriptors(index: u16) -> u64 {
    0x1_0000 + 0x1000 * u64::from(index)
}

pub fn available(index: u16) -> u64 {
    descriptors(index) + 0x400
}

pub fn used(index: u16) -> u64 {
    descriptors(index) + 0x800
}

pub fn queue(index: u16) -> Queue {
    let mut queue = Queue::new(SIZE).unwrap();
    queue.try_set_desc_table_address(GuestAddress(descriptors(index))).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(available(index))).unwrap();
    queue.try_set_used_ring_address(GuestAddress(used(index))).unwrap();
    queue.set_ready(true);
    queue
}

/// The warnings among the events.
pub fn warnings(events: &[Event]) -> Vec<&Warning> {
    events
        .iter()
        .filter_map(|event| if let Event::Warning(warning) = event { Some(warning) } else { None })
        .collect()
}
