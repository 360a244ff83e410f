//! The reference model of the queue of hints: the specification, applied to memory word by word. It
//! shares no code with the device.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmferry_balloon::Features;

/// Guest memory: 64 KiB, a hole of 16 KiB, 32 KiB.
pub const REGIONS: [(u64, u64); 2] = [(0, 0x1_0000), (0x1_4000, 0x8000)];
pub const PAGE: u64 = 4096;

/// What the device reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Hint { page: u64, id: u32, poison: Option<u32> },
    Complete(u32),
}

/// The state that the specification defines for hints and for a queue.
#[derive(Clone)]
pub struct Twin {
    pub features: u64,
    pub active: bool,
    pub poison: u32,
    pub shown: u32,
    pub last: u32,
    pub started: bool,
    pub ended: bool,
    pub ring: Option<Ring>,
}

#[derive(Clone, Copy)]
pub struct Ring {
    pub size: u64,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    pub next_available: u16,
    pub next_used: u16,
    pub broken: bool,
}

/// Guest memory at one moment.
#[derive(PartialEq)]
pub struct Image(Vec<(u64, Vec<u8>)>);

impl Image {
    pub fn of(memory: &GuestMemoryMmap<()>) -> Self {
        let copy = |(start, bytes): (u64, u64)| {
            let mut content = vec![0; bytes as usize];
            memory.read_slice(&mut content, GuestAddress(start)).unwrap();
            (start, content)
        };
        Self(REGIONS.into_iter().map(copy).collect())
    }

    pub fn at(&mut self, address: u64, bytes: u64) -> Option<&mut [u8]> {
        self.0.iter_mut().find_map(|(start, content)| {
            let first = usize::try_from(address.checked_sub(*start)?).ok()?;
            content.get_mut(first..first.checked_add(bytes as usize)?)
        })
    }

    pub fn number(&mut self, address: u64, bytes: u64) -> Option<u64> {
        let all = self.at(address, bytes)?;
        Some(all.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    pub fn write(&mut self, address: u64, bytes: &[u8]) {
        self.at(address, bytes.len() as u64).unwrap().copy_from_slice(bytes);
    }
}

pub struct Chain {
    pub readable: Vec<(u64, u64)>,
    pub writable: Vec<(u64, u64)>,
}

impl Ring {
    pub fn is_inside(&self, image: &mut Image) -> bool {
        image.at(self.descriptors, 16 * self.size).is_some()
            && image.at(self.available, 6 + 2 * self.size).is_some()
            && image.at(self.used, 6 + 8 * self.size).is_some()
    }

    pub fn offered(&self, image: &mut Image) -> u16 {
        image.number(self.available + 2, 2).unwrap() as u16
    }

    pub fn chain(&self, image: &mut Image, head: u64) -> Option<Chain> {
        let mut chain = Chain { readable: vec![], writable: vec![] };
        let (mut table, mut entries, mut index) = (self.descriptors, self.size, head);
        let (mut inside, mut total) = (false, 0_u64);
        loop {
            if index >= entries {
                return None;
            }
            let at = table.checked_add(16 * index)?;
            let start = image.number(at, 8)?;
            let rest = image.number(at.checked_add(8)?, 8)?;
            let (length, flags, next) = (rest & 0xffff_ffff, rest >> 32 & 0xffff, rest >> 48);
            if flags & 4 != 0 {
                if inside || length % 16 != 0 || length / 16 > 0xffff {
                    return None;
                }
                (table, entries, index, inside) = (start, length / 16, 0, true);
                continue;
            }
            total += length;
            let count = chain.readable.len() + chain.writable.len();
            if count as u64 == self.size || total > 0xffff_ffff {
                return None;
            }
            if flags & 2 != 0 {
                chain.writable.push((start, length));
            } else if chain.writable.is_empty() {
                chain.readable.push((start, length));
            } else {
                return None;
            }
            if flags & 1 == 0 {
                return Some(chain);
            }
            index = next;
        }
    }
}

impl Twin {
    pub fn has(&self, feature: Features) -> bool {
        self.features & feature.0 != 0
    }

    /// One call for the queue of hints: the reported events, and whether more calls must follow.
    pub fn process(&mut self, image: &mut Image) -> (Vec<Event>, bool) {
        let mut events = vec![];
        let Some(mut ring) = self.ring.filter(|ring| !ring.broken) else { return (events, false) };
        let more = self.take(&mut ring, image, &mut events);
        ring.broken = more.is_none();
        self.ring = Some(ring);
        (events, more.unwrap_or(false))
    }

    pub fn take(
        &mut self,
        ring: &mut Ring,
        image: &mut Image,
        events: &mut Vec<Event>,
    ) -> Option<bool> {
        if !ring.is_inside(image) {
            return None;
        }
        let mut taken = 0;
        while taken < ring.size {
            let ahead = ring.offered(image).wrapping_sub(ring.next_available);
            if ring.available == 0 || u64::from(ahead) > ring.size {
                return None;
            }
            if ahead == 0 {
                break;
            }
            let place = u64::from(ring.next_available) % ring.size;
            let head = image.number(ring.available + 4 + 2 * place, 2).unwrap();
            ring.next_available = ring.next_available.wrapping_add(1);
            if head >= ring.size {
                return None;
            }
            if let Some(chain) = ring.chain(image, head) {
                self.hints(&chain, image, events);
            }
            let place = ring.used + 4 + 8 * (u64::from(ring.next_used) % ring.size);
            image.write(place, &head.to_le_bytes());
            ring.next_used = ring.next_used.wrapping_add(1);
            image.write(ring.used + 2, &ring.next_used.to_le_bytes());
            taken += 1;
        }
        if ring.offered(image) != ring.next_available {
            return Some(true);
        }
        if taken == 0 || !self.has(Features::EVENT_IDX) {
            return Some(false);
        }
        image.write(ring.used + 4 + 8 * ring.size, &ring.next_available.to_le_bytes());
        Some(ring.offered(image) != ring.next_available)
    }

    pub fn hints(&mut self, chain: &Chain, image: &mut Image, events: &mut Vec<Event>) {
        let bytes: u64 = chain.readable.iter().map(|(_, bytes)| bytes).sum();
        if bytes == 4 {
            let pieces = chain.readable.iter().filter(|(_, bytes)| *bytes > 0);
            let command: Option<Vec<u8>> = pieces
                .map(|(start, bytes)| image.at(*start, *bytes).map(|piece| piece.to_vec()))
                .collect::<Option<Vec<_>>>()
                .map(|pieces| pieces.concat());
            if let Some(command) = command {
                self.command(u32::from_le_bytes(command.try_into().unwrap()), events);
            }
        }
        if !self.started {
            return;
        }
        let poison = self.has(Features::PAGE_POISON).then_some(self.poison);
        for (start, bytes) in &chain.writable {
            let end = start.saturating_add(*bytes);
            for page in
                REGIONS.into_iter().flat_map(|(start, bytes)| start / PAGE..(start + bytes) / PAGE)
            {
                if *start <= page * PAGE && (page + 1) * PAGE <= end {
                    events.push(Event::Hint { page: page * PAGE, id: self.shown, poison });
                }
            }
        }
    }

    pub fn command(&mut self, command: u32, events: &mut Vec<Event>) {
        if self.started && command != self.shown {
            (self.started, self.ended) = (false, true);
            events.push(Event::Complete(self.shown));
        } else if !self.ended && self.shown >= 2 && command == self.shown {
            self.started = true;
        }
    }

    pub fn show(&mut self, command: u32) {
        (self.shown, self.started, self.ended) = (command, false, false);
    }

    pub fn awaits(&self) -> bool {
        self.shown >= 2 && !self.ended
    }
}
