//! Hand-made streams in QEMU's format, with the expected marks.

use std::sync::Arc;

use vmferry::vmm::streamed::{Marks, PageMark, Recogniser};
use vmferry_memory::{PAGE_SIZE, SlotId};
use vmferry_qemu::{Blocks, MainStream, MultifdChannel};

pub const RAM: (&str, u64) = ("pc.ram", 1 << 20);
pub const ROM: (&str, u64) = ("/rom@etc/acpi/tables", 32);
/// A block that is not in the layout.
pub const OTHER: (&str, u64) = ("vga.vram", 4096);

/// The layout of the samples.
pub fn blocks() -> Arc<Blocks> {
    Arc::new(Blocks::new([RAM, ROM]))
}

/// The section numbers of RAM and of another section.
pub const RAM_SECTION: u32 = 2;
pub const OTHER_SECTION: u32 = 0x1f;

/// The recognizer for a kind of stream.
pub fn recogniser(multifd: bool) -> Box<dyn Recogniser> {
    match multifd {
        false => Box::new(MainStream::new(blocks())),
        true => Box::new(MultifdChannel::new(blocks())),
    }
}

/// A stream under construction.
#[derive(Clone, Default)]
pub struct Sample {
    pub bytes: Vec<u8>,
    pub marks: Marks,
}

/// A page content that looks like the stream around it.
fn content(number: usize) -> Vec<u8> {
    let mut page = vec![0x08; PAGE_SIZE];
    let [.., id] = RAM_SECTION.to_be_bytes();
    let part = [0x7e, 0, 0, 0, id, 0x02, 0, 0, 0, id, 0, 0, 0, 0, 0, 0, 0x50, 0x28, 0x11, 0x22];
    let ends: Vec<u8> = part.iter().cycle().skip(number % 20).take(400).copied().collect();
    page[..400].copy_from_slice(&ends);
    page[PAGE_SIZE - 400..].copy_from_slice(&ends);
    page
}

impl Sample {
    pub fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub fn put_name(&mut self, name: &str) -> &mut Self {
        self.put(&[name.len() as u8]).put(name.as_bytes())
    }

    /// Everything before RAM's first section.
    pub fn header(&mut self) -> &mut Self {
        self.put(b"QEVM\0\0\0\x03").put(&[7, 0, 0, 0, 12]).put(b"pc-q35-10.00");
        self.put(&[5]).put_name("configuration/capabilities").put(&[0, 0, 0, 1, 0, 0, 0, 1]);
        self.put_name("x-ignore-shared");
        // Return path, ping.
        self.put(&[8, 0, 1, 0, 0]).put(&[8, 0, 2, 0, 4, 0, 0, 0, 1])
    }

    /// Any section's header, with its name.
    pub fn section(&mut self, kind: u8, id: u32, name: &str, version: u32) -> &mut Self {
        self.put(&[kind]).put(&id.to_be_bytes()).put_name(name).put(&[0; 4]);
        self.put(&version.to_be_bytes())
    }

    pub fn word(&mut self, word: u64) -> &mut Self {
        self.put(&word.to_be_bytes())
    }

    /// The table of blocks, with `extra` words after each length.
    pub fn table(&mut self, extra: &[u64]) -> &mut Self {
        let table = [ROM, RAM, OTHER];
        let all: u64 = table.iter().map(|(_, pages)| pages * PAGE_SIZE as u64).sum();
        self.word(all | 0x04);
        for (name, pages) in table {
            self.put_name(name).word(pages * PAGE_SIZE as u64);
            extra.iter().for_each(|&extra| {
                self.word(extra);
            });
        }
        self
    }

    /// RAM's first section, without its end.
    pub fn start(&mut self, extra: &[u64]) -> &mut Self {
        self.section(1, RAM_SECTION, "ram", 4).table(extra)
    }

    /// Everything before the first page.
    pub fn beginning(&mut self) -> &mut Self {
        self.header().start(&[]).end()
    }

    pub fn end(&mut self) -> &mut Self {
        self.word(0x10).footer(RAM_SECTION)
    }

    pub fn footer(&mut self, id: u32) -> &mut Self {
        self.put(&[0x7e]).put(&id.to_be_bytes())
    }

    pub fn part(&mut self) -> &mut Self {
        self.put(&[2]).put(&RAM_SECTION.to_be_bytes())
    }

    pub fn last(&mut self) -> &mut Self {
        self.put(&[3]).put(&RAM_SECTION.to_be_bytes())
    }

    /// A record without its content.
    pub fn record(&mut self, flag: u64, block: Option<&str>, page: u64) -> &mut Self {
        let go_on = if block.is_some() { 0 } else { 0x20 };
        self.word((page * PAGE_SIZE as u64) | flag | go_on);
        if let Some(name) = block {
            self.put_name(name);
        }
        self
    }

    /// A page that must be found.
    pub fn page(&mut self, block: Option<&str>, slot: u16, page: u64) -> &mut Self {
        self.record(0x08, block, page).mark(slot, page).content()
    }

    /// A page that must not be found.
    pub fn lost_page(&mut self, block: Option<&str>, page: u64) -> &mut Self {
        self.record(0x08, block, page).content()
    }

    pub fn zero(&mut self, block: Option<&str>, page: u64) -> &mut Self {
        self.marks.zero_pages += 1;
        self.record(0x02, block, page).put(&[0])
    }

    pub fn mark(&mut self, slot: u16, page: u64) -> &mut Self {
        self.marks.pages.push(PageMark { at: self.bytes.len(), slot: SlotId(slot), page });
        self
    }

    pub fn content(&mut self) -> &mut Self {
        let content = content(self.bytes.len());
        self.put(&content)
    }

    /// The beginning of a multifd channel.
    pub fn greeting(&mut self) -> &mut Self {
        self.put(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]).put(&[0x6b; 16]).put(&[1]).put(&[0; 39])
    }

    /// A multifd packet, without content.
    pub fn packet(&mut self, packet: &Packet<'_>) -> &mut Self {
        self.put(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]);
        for word in [packet.flags, packet.allocated, packet.normal.len() as u32, packet.size] {
            self.put(&word.to_be_bytes());
        }
        self.word(7).put(&(packet.zero.len() as u32).to_be_bytes()).put(&[0; 28]);
        let name = self.bytes.len();
        self.put(packet.block.as_bytes()).bytes.resize(name + 256, 0);
        let offsets = self.bytes.len();
        for page in packet.normal.iter().chain(packet.zero) {
            self.word(page * PAGE_SIZE as u64);
        }
        // Leftovers of the previous packet.
        self.bytes.resize(offsets + 128 * 8, 0x11);
        self.marks.zero_pages += packet.zero.len() as u64;
        self
    }

    /// The same with the contents of its pages.
    pub fn packet_with_pages(&mut self, slot: u16, packet: &Packet<'_>) -> &mut Self {
        let size = (packet.normal.len() * PAGE_SIZE) as u32;
        self.packet(&Packet { size, ..*packet });
        for &page in packet.normal {
            self.mark(slot, page).content();
        }
        self
    }
}

/// The fields of a multifd packet.
#[derive(Clone, Copy)]
pub struct Packet<'a> {
    pub flags: u32,
    pub allocated: u32,
    pub size: u32,
    pub block: &'a str,
    pub normal: &'a [u64],
    pub zero: &'a [u64],
}

impl Default for Packet<'_> {
    fn default() -> Self {
        Self { flags: 0, allocated: 128, size: 0, block: RAM.0, normal: &[], zero: &[] }
    }
}

/// The marks found in a stream that arrives in one piece, and the number of consumed bytes.
pub fn look(multifd: bool, bytes: &[u8]) -> (Marks, usize) {
    let mut marks = Marks::default();
    let taken = recogniser(multifd).look(bytes, &mut marks);
    (marks, taken)
}

/// The same in pieces of these lengths, repeated, with positions from the beginning of the stream.
pub fn look_in_pieces(
    recogniser: &mut dyn Recogniser,
    bytes: &[u8],
    pieces: &[usize],
) -> (Marks, usize) {
    let (mut all, mut marks) = (Marks::default(), Marks::default());
    let (mut taken, mut come) = (0, 0);
    let mut pieces = pieces.iter().cycle();
    while come < bytes.len() {
        come = bytes.len().min(come + pieces.next().unwrap_or(&1).max(&1));
        marks.clear();
        let more = recogniser.look(&bytes[taken..come], &mut marks);
        all.zero_pages += marks.zero_pages;
        all.pages.extend(marks.pages.iter().map(|mark| PageMark { at: mark.at + taken, ..*mark }));
        taken += more;
        let left = come - taken;
        assert!(left < vmferry::vmm::streamed::LONGEST_RECORD, "{left} bytes left");
    }
    (all, taken)
}
