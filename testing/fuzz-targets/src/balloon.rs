//! Any bytes, read as actions of a driver and an embedder on a balloon.
//!
//! The queue of hints has a reference model here, which reads the same memory word by word and
//! shares no code with the device. After each call both must have reported the same hints in the
//! same order, and guest memory must be identical. For the other queues the target only checks the
//! rules that no driver can break.

use std::sync::Arc;

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmferry_balloon::{
    Balloon, BalloonConfig, CommandId, Features, Progress, QueueKind, SavedPhase,
};

use super::input::Input;
use host::Host;
use twin::{Event, Image, PAGE, REGIONS, Ring, Twin};

mod host;
mod twin;

/// The address of the buffers if the rings are at their usual place.
const BUFFERS: u64 = 0x8000;
/// More calls than a queue can have buffers.
const MANY: usize = 100;

type Device = Balloon<Arc<GuestMemoryMmap<()>>, Host, Host>;

struct World {
    memory: Arc<GuestMemoryMmap<()>>,
    host: Host,
    config: BalloonConfig,
    device: Device,
    twin: Twin,
    /// The driver's rings, by its numbers.
    rings: [Option<Ring>; 5],
    kinds: [Option<QueueKind>; 5],
    /// Whether the rings may lie anywhere, including on each other.
    wild: bool,
}

/// Executes the actions of the bytes.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut world = World::new(&mut input);
    world.set_up(&mut input);
    let mut steps = 0;
    while !input.is_empty() && steps < 2000 {
        world.step(&mut input);
        world.check();
        steps += 1;
    }
    (0..5).for_each(|index| world.process_all(index));
    world.check();
}

impl World {
    fn new(input: &mut Input) -> Self {
        let ranges = REGIONS.map(|(start, bytes)| (GuestAddress(start), bytes as usize));
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap());
        let host = Host::default();
        let left_out = u64::from(input.byte()) & 0x3f;
        let config = BalloonConfig {
            features: Features::ALL.without(Features(left_out)),
            queue_size: 1 << (input.byte() % 7),
        };
        let device = Balloon::new(config, Arc::clone(&memory), host.clone(), host.clone()).unwrap();
        let twin = Twin {
            features: 0,
            active: false,
            poison: 0,
            shown: 0,
            last: 0,
            started: false,
            ended: false,
            ring: None,
        };
        let (rings, kinds) = ([None; 5], [None; 5]);
        Self { memory, host, config, device, twin, rings, kinds, wild: false }
    }

    /// Negotiates and activates as a driver does, sometimes incorrectly.
    fn set_up(&mut self, input: &mut Input) {
        let (features, way) = (u64::from(input.byte()), input.byte());
        let offered = self.device.offered();
        let wanted = Features::ALL.0 & !(features & 0x3f) & !(features >> 6 << 28 & 0x3000_0000);
        let features = Features(wanted & offered.0);
        self.device.negotiate(features).unwrap();
        self.twin.features = features.0;
        let poison = u32::from(input.byte()) * 0x0101_0101;
        self.device.write_config(12, &poison.to_le_bytes());
        self.twin.poison = if features.contains(Features::PAGE_POISON) { poison } else { 0 };
        self.host.seen().keeps_poison = self.twin.poison != 0;
        self.host.seen().discards_fail = way & 4 != 0;
        let kinds: Vec<QueueKind> =
            QueueKind::ALL.into_iter().filter(|kind| kind.exists(features)).collect();
        (self.rings, self.kinds, self.twin.ring) = ([None; 5], [None; 5], None);
        let mut queues = vec![];
        for (place, kind) in kinds.into_iter().enumerate() {
            let index = if way & 1 != 0 { place as u16 } else { kind.number() };
            let mut queue = Queue::new(self.config.queue_size).unwrap();
            let base = PAGE * (1 + u64::from(index));
            let mut places = [base, base + 0x400, base + 0x600];
            self.wild = way & 2 != 0;
            if self.wild {
                places =
                    places.map(|usual| if input.byte() & 3 == 0 { input.number() } else { usual });
                queue.set_size(1 << (input.byte() % 8));
            }
            // Misaligned addresses stay at 0.
            let _ = queue.try_set_desc_table_address(GuestAddress(places[0]));
            let _ = queue.try_set_avail_ring_address(GuestAddress(places[1]));
            let _ = queue.try_set_used_ring_address(GuestAddress(places[2]));
            queue.set_ready(true);
            let mut ring = Ring {
                size: queue.size().into(),
                descriptors: queue.desc_table(),
                available: queue.avail_ring(),
                used: queue.used_ring(),
                next_available: 0,
                next_used: 0,
                broken: false,
            };
            let mut image = Image::of(&self.memory);
            ring.broken = !ring.is_inside(&mut image);
            for at in [ring.available, ring.used] {
                let _ = self.memory.write_slice(&[0; 4], GuestAddress(at));
            }
            self.rings[usize::from(index)] = Some(ring);
            self.kinds[usize::from(index)] = Some(kind);
            if kind == QueueKind::FreePage {
                self.twin.ring = Some(ring);
            }
            queues.push((index, queue));
        }
        self.device.activate(queues).unwrap();
        self.twin.active = true;
    }

    fn step(&mut self, input: &mut Input) {
        match input.byte() % 20 {
            0..=3 => {
                let index = u16::from(input.byte() % 6);
                let _ = self.process(index);
            }
            4 => {
                let id = self.device.start_hints().map(CommandId::number);
                let can = self.twin.has(Features::FREE_PAGE_HINT) && !self.device.needs_reset();
                assert_eq!(id.is_some(), can);
                if let Some(id) = id {
                    assert!(id >= 2 && id != self.twin.last, "{id}");
                    self.twin.last = id;
                    self.twin.show(id);
                }
            }
            5 => self.stop_hints(),
            6 => {
                self.device.withdraw_hints();
                self.twin.show(0);
            }
            7 => {
                self.device.finish_hints();
                self.twin.show(1);
            }
            8 | 9 => {
                let command = match input.byte() % 4 {
                    0 => 0,
                    1 => self.twin.last.wrapping_sub(1),
                    _ => self.twin.last,
                };
                let length =
                    if input.byte().is_multiple_of(8) { input.byte() as usize % 9 } else { 4 };
                self.put(BUFFERS, &[&command.to_le_bytes()[..], &[0; 5]].concat()[..length]);
                let mut chain = vec![(BUFFERS, length as u64, false)];
                if input.byte().is_multiple_of(4) {
                    chain.push(range(input));
                }
                self.offer(self.index_of(QueueKind::FreePage), &chain);
            }
            10 | 11 => {
                let chain: Vec<_> = (0..1 + input.byte() % 3).map(|_| range(input)).collect();
                self.offer(self.index_of(QueueKind::FreePage), &chain);
            }
            12 => {
                let bytes = input.bytes(32);
                self.put(BUFFERS + 0x1000, bytes);
                let index = usize::from(input.byte() % 5);
                self.offer(index, &[(BUFFERS + 0x1000, bytes.len() as u64, false)]);
            }
            13 => {
                let index = usize::from(input.byte() % 5);
                let chain: Vec<_> = (0..1 + input.byte() % 4).map(|_| range(input)).collect();
                self.offer(index, &chain);
            }
            14 => {
                let at = if input.byte() & 1 == 0 { input.number() } else { input.word().into() };
                let bytes = input.bytes(24);
                self.put(at, bytes);
            }
            15 => self.use_config(input),
            16 => {
                if input.byte() & 1 == 0 {
                    self.device.request_statistics();
                } else {
                    self.device.set_target(input.word().into());
                }
            }
            17 => match input.byte() % 4 {
                0 => {
                    let index = input.byte() % 6;
                    self.device.disable_queue(index.into());
                    if let Some(kind) = self.kinds.get_mut(usize::from(index)) {
                        if *kind == Some(QueueKind::FreePage) {
                            self.twin.ring = None;
                        }
                        *kind = None;
                    }
                }
                _ => {
                    let awaited = self.twin.awaits().then_some(Event::Complete(self.twin.shown));
                    self.device.reset();
                    assert_eq!(self.take_events(), awaited.into_iter().collect::<Vec<_>>());
                    self.twin.show(0);
                    self.twin.active = false;
                    self.set_up(input);
                }
            },
            18 => self.move_device(input.byte() & 1 == 0),
            _ => self.restore_damaged(input),
        }
    }

    fn use_config(&mut self, input: &mut Input) {
        let (offset, length) = (u64::from(input.byte() % 24), input.byte() as usize % 9);
        if input.byte() & 1 == 0 {
            self.device.write_config(offset, input.bytes(length));
        } else {
            self.device.read_config(offset, &mut vec![0; length]);
        }
    }

    fn index_of(&self, kind: QueueKind) -> usize {
        self.kinds.iter().position(|known| *known == Some(kind)).unwrap_or(0)
    }

    /// Writes if the address is in guest memory.
    fn put(&self, at: u64, bytes: &[u8]) {
        let _ = self.memory.write_slice(bytes, GuestAddress(at));
    }

    /// Makes a chain available as a driver does. Each descriptor has an address, a length, and
    /// whether the device may write.
    fn offer(&mut self, index: usize, chain: &[(u64, u64, bool)]) {
        let Some(ring) = self.rings[index] else { return };
        let mut next = [0; 2];
        if self.memory.read_slice(&mut next, GuestAddress(ring.available.wrapping_add(2))).is_err()
        {
            return;
        }
        let next = u16::from_le_bytes(next);
        let head = u64::from(next).wrapping_mul(3) % ring.size;
        for (place, (start, length, writable)) in (0..).zip(chain) {
            let index = (head + place) % ring.size;
            let goes_on = place as usize + 1 < chain.len();
            let flags = u64::from(goes_on) | u64::from(*writable) << 1;
            let rest = length & 0xffff_ffff | flags << 32 | ((index + 1) % ring.size) << 48;
            self.put(ring.descriptors.wrapping_add(16 * index), &start.to_le_bytes());
            self.put(ring.descriptors.wrapping_add(16 * index + 8), &rest.to_le_bytes());
        }
        let place = u64::from(next) % ring.size;
        self.put(ring.available.wrapping_add(4 + 2 * place), &(head as u16).to_le_bytes());
        self.put(ring.available.wrapping_add(2), &next.wrapping_add(1).to_le_bytes());
    }

    fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.host.seen().events)
    }

    fn process(&mut self, index: u16) -> Progress {
        let kind = self.kinds.get(usize::from(index)).copied().flatten();
        self.host.seen().queue = kind;
        if kind != Some(QueueKind::FreePage) {
            let progress = self.device.process(index);
            self.host.seen().queue = None;
            assert_eq!(self.take_events(), [], "amid {kind:?}");
            return progress;
        }
        assert_eq!(index as usize, self.index_of(QueueKind::FreePage));
        let mut image = Image::of(&self.memory);
        let progress = self.device.process(index);
        self.host.seen().queue = None;
        let (events, more) = self.twin.process(&mut image);
        assert_eq!(self.take_events(), events);
        assert_eq!(progress == Progress::More, more);
        assert!(image == Image::of(&self.memory), "the rings differ");
        progress
    }

    fn process_all(&mut self, index: u16) {
        let ends = (0..MANY).any(|_| self.process(index) == Progress::Done);
        // A used ring that overlaps the available ring can produce buffers forever; each call still
        // ends.
        assert!(ends || self.wild, "queue {index} never ends");
    }

    fn stop_hints(&mut self) {
        let mut image = Image::of(&self.memory);
        self.twin.show(0);
        let (events, _) = self.twin.process(&mut image);
        self.device.stop_hints();
        assert_eq!(events, [], "the twin reports a hint that was stopped");
        assert_eq!(self.take_events(), [], "reported after the stop");
        assert!(image == Image::of(&self.memory), "the rings differ");
    }

    fn move_device(&mut self, says_done: bool) {
        let image = Image::of(&self.memory);
        let state = self.device.save();
        self.device = self.restore(&state).expect("a saved state can be restored");
        assert_eq!(self.device.save(), state);
        if says_done {
            self.device.restored_after_migration();
            if self.twin.last != 0 {
                self.twin.show(1);
            }
        }
        assert!(image == Image::of(&self.memory), "a move changes no memory");
        assert_eq!(self.take_events(), []);
    }

    fn restore(
        &self,
        state: &vmferry_balloon::BalloonState,
    ) -> Result<Device, vmferry_balloon::BalloonError> {
        let (host, interrupt) = (self.host.clone(), self.host.clone());
        Balloon::restore(self.config, Arc::clone(&self.memory), host, interrupt, state)
    }

    /// A damaged state is either refused, or restores a usable device.
    fn restore_damaged(&mut self, input: &mut Input) {
        let mut state = self.device.save();
        let number = input.number();
        match input.byte() % 8 {
            0 => state.hints.shown = number as u32,
            1 => state.hints.last = number as u32,
            2 => state.hints.phase = SavedPhase::Started,
            3 => state.negotiated = Some(Features(number)),
            4 => state.statistics_head = Some(number as u16),
            5 => state.active = !state.active,
            _ => {
                let which = input.byte();
                if let Some(queue) = state.queues.get_mut(usize::from(input.byte() % 5)) {
                    match which % 8 {
                        0 => queue.size = number as u16,
                        1 => queue.max_size = number as u16,
                        2 => queue.next_avail = number as u16,
                        3 => queue.next_used = number as u16,
                        4 => queue.descriptors = number,
                        5 => queue.available = number,
                        6 => queue.used = number,
                        _ => queue.index = number as u16,
                    }
                }
            }
        }
        let Ok(mut device) = self.restore(&state) else { return };
        // The device's own warnings may follow, and the queues are unknown.
        let warnings = std::mem::take(&mut self.host.seen().warnings);
        for index in 0..5 {
            let _ = device.process(index);
        }
        device.stop_hints();
        self.host.seen().warnings = warnings;
        self.take_events();
    }

    /// Checks that the device's public figures agree.
    fn check(&self) {
        let mut bytes = [0; 16];
        self.device.read_config(0, &mut bytes);
        let shown = u32::from_le_bytes(bytes[8..12].try_into().unwrap());
        let expected = if self.twin.has(Features::FREE_PAGE_HINT) { self.twin.shown } else { 0 };
        assert_eq!(shown, expected);
        assert_eq!(self.device.awaited_hints().is_some(), self.twin.awaits());
        assert_eq!(self.device.is_active(), self.twin.active);
    }
}

/// A range for the device to write, mostly near guest memory.
fn range(input: &mut Input) -> (u64, u64, bool) {
    let (kind, page, pages) = (input.byte(), u64::from(input.byte()), u64::from(input.byte()));
    let writable = kind & 0x40 == 0;
    match kind % 4 {
        0 => (input.number(), input.number(), writable),
        1 => (page * PAGE / 8, pages * PAGE / 8, writable),
        _ => (page % 32 * PAGE, pages % 8 * PAGE, writable),
    }
}
