//! A channel of QEMU's `multifd` capability.
//!
//! Source: QEMU's `migration/multifd.h` (`MultiFDInit_t`, `MultiFDPacket_t`,
//! `MultiFDPacketDeviceState_t`), `multifd.c`, and `multifd-nocomp.c` (since 9.2). All numbers are
//! big-endian.

use std::sync::Arc;

use vmferry::vmm::streamed::{Marks, PageMark, Recogniser};

use super::PAGE;
use super::blocks::{Blocks, Known};
use super::bytes::{Found, be32, be64, expect, found, some};

/// `MULTIFD_MAGIC` and `MULTIFD_VERSION`, before the greeting and before each packet.
pub(super) const MAGIC: &[u8; 8] = &[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1];

/// `MultiFDInit_t`.
const GREETING: usize = 64;

/// `MULTIFD_PACKET_SIZE` in pages: a packet has this number of offsets, used or not.
const MAX_PAGES: usize = 512 * 1024 / PAGE;

/// Offsets in a `MultiFDPacket_t`.
const FLAGS: usize = 8;
const PAGES_ALLOC: usize = 12;
const NORMAL_PAGES: usize = 16;
const NEXT_PACKET_SIZE: usize = 20;
/// Since 9.0; 0 before.
const ZERO_PAGES: usize = 32;
const BLOCK: usize = 64;
const BLOCK_BYTES: usize = 256;
const OFFSETS: usize = BLOCK + BLOCK_BYTES;
const PACKET: usize = OFFSETS + 8 * MAX_PAGES;

/// Offsets in a `MultiFDPacketDeviceState_t`, since 10.0.
const DEVICE_NEXT_PACKET_SIZE: usize = 12 + 256 + 4;
const DEVICE_PACKET: usize = DEVICE_NEXT_PACKET_SIZE + 4;

/// `MULTIFD_FLAG_…`.
const SYNC: u32 = 1;
/// The compression methods: one bit each, or numbered.
const METHOD: u32 = 0x1f << 1;
const DEVICE_STATE: u32 = 1 << 6;

/// Finds pages in a multifd channel.
#[derive(Debug)]
pub struct MultifdChannel {
    blocks: Arc<Blocks>,
    place: Place,
    /// The offsets in their block of the pages whose contents follow, in bytes.
    offsets: [u64; MAX_PAGES],
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The channel's greeting.
    Greeting,
    /// A packet.
    Packet,
    /// The contents of pages of a block, between two indices of the packet's offsets.
    Contents { block: Known, next: usize, end: usize },
    /// This number of bytes without pages.
    Skip(u64),
    /// Data that is not recognized.
    End,
}

impl MultifdChannel {
    /// Creates a recognizer for a channel of a guest with these blocks, from its first byte.
    #[must_use]
    pub fn new(blocks: Arc<Blocks>) -> Self {
        Self { blocks, place: Place::Greeting, offsets: [0; MAX_PAGES] }
    }
}

impl Recogniser for MultifdChannel {
    fn look(&mut self, bytes: &[u8], marks: &mut Marks) -> usize {
        let mut at = 0;
        loop {
            at += match self.step(&bytes[at..], at, marks) {
                Found::Whole(taken) => taken,
                Found::Short => return at,
                Found::Other => {
                    self.place = Place::End;
                    0
                }
            };
        }
    }
}

impl MultifdChannel {
    /// Takes the next part, and returns its length. The length is at least 1, or the place has
    /// changed and will take at least one byte.
    fn step(&mut self, bytes: &[u8], at: usize, marks: &mut Marks) -> Found<usize> {
        match self.place {
            Place::Greeting => {
                found!(expect(bytes, 0, MAGIC));
                if bytes.len() < GREETING {
                    return Found::Short;
                }
                self.place = Place::Packet;
                Found::Whole(GREETING)
            }
            Place::Packet => self.packet(bytes, marks),
            Place::Contents { block, next, end } => {
                let whole = (bytes.len() / PAGE).min(end - next);
                for (content, &offset) in self.offsets[next..next + whole].iter().enumerate() {
                    if let Some(page) = block.page(offset) {
                        let at = at + content * PAGE;
                        marks.pages.push(PageMark { at, slot: block.slot, page });
                    }
                }
                let next = next + whole;
                self.place = match next < end {
                    true => Place::Contents { block, next, end },
                    false => Place::Packet,
                };
                some(whole * PAGE)
            }
            Place::Skip(left) => {
                let taken = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
                self.place = match left - taken as u64 {
                    0 => Place::Packet,
                    left => Place::Skip(left),
                };
                some(taken)
            }
            Place::End => some(bytes.len()),
        }
    }

    fn packet(&mut self, bytes: &[u8], marks: &mut Marks) -> Found<usize> {
        found!(expect(bytes, 0, MAGIC));
        let flags = found!(be32(bytes, FLAGS));
        if flags & !(SYNC | METHOD | DEVICE_STATE) != 0 {
            return Found::Other;
        }
        if flags & DEVICE_STATE != 0 {
            self.place = skip(found!(be32(bytes, DEVICE_NEXT_PACKET_SIZE)));
            return Found::Whole(DEVICE_PACKET);
        }
        if bytes.len() < PACKET {
            return Found::Short;
        }
        let (normal, zero) = (found!(be32(bytes, NORMAL_PAGES)), found!(be32(bytes, ZERO_PAGES)));
        let allocated = found!(be32(bytes, PAGES_ALLOC));
        let pages = normal.saturating_add(zero);
        if allocated > MAX_PAGES as u32 || pages > allocated {
            return Found::Other;
        }
        // Without pages, the size may be that of the previous packet.
        let content_bytes = match normal {
            0 => 0,
            _ => found!(be32(bytes, NEXT_PACKET_SIZE)),
        };
        let whole = flags & METHOD == 0;
        if whole && content_bytes != normal * PAGE as u32 {
            return Found::Other;
        }
        marks.zero_pages += u64::from(zero);
        let name = &bytes[BLOCK..OFFSETS];
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        let Some(block) = self.blocks.find(name).filter(|_| whole && normal > 0) else {
            self.place = skip(content_bytes);
            return Found::Whole(PACKET);
        };
        let end = normal as usize;
        for (index, offset) in self.offsets[..end].iter_mut().enumerate() {
            *offset = found!(be64(bytes, OFFSETS + 8 * index));
        }
        self.place = Place::Contents { block, next: 0, end };
        Found::Whole(PACKET)
    }
}

/// What follows a packet with this number of bytes that hold no whole page.
fn skip(bytes: u32) -> Place {
    if bytes == 0 { Place::Packet } else { Place::Skip(bytes.into()) }
}
