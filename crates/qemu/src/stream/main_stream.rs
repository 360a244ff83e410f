//! QEMU's main migration stream.
//!
//! Source: QEMU's `docs/devel/migration/main.rst` ("Stream structure"), `migration/savevm.c` and
//! `migration/ram.c`.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use vmferry::vmm::streamed::{Marks, PageMark, Recogniser};

use super::PAGE;
use super::blocks::{Blocks, Known};
use super::bytes::{Found, be16, be32, byte, expect, found, some};
use super::record::{Kind, Record, record, table_entry};

/// Magic (`QEMU_VM_FILE_MAGIC`) and version of the stream.
pub(super) const FILE_HEADER: &[u8; 8] = b"QEVM\0\0\0\x03";

/// Section types, `QEMU_VM_…` in `migration/savevm.h`.
const EOF: u8 = 0x00;
const SECTION_START: u8 = 0x01;
const SECTION_PART: u8 = 0x02;
const SECTION_END: u8 = 0x03;
const SECTION_FULL: u8 = 0x04;
const COMMAND: u8 = 0x08;
const SECTION_FOOTER: u8 = 0x7e;

/// What follows the number of RAM's section at its start: name, instance, version.
const RAM: &[u8; 12] = b"\x03ram\0\0\0\0\0\0\0\x04";

/// What follows the number of the section with the guest's run state before QEMU stopped it: name,
/// instance, version. Source: `migration/global_state.c`.
const GLOBAL_STATE: &[u8; 20] = b"\x0bglobalstate\0\0\0\0\0\0\0\x01";

/// The longest text of that section, including its terminating zero.
const MAX_RUN_STATE: usize = 100;

/// Finds pages in the main stream.
#[derive(Debug)]
pub struct MainStream {
    blocks: Arc<Blocks>,
    place: Place,
    /// This number of further bytes is ignored.
    skip: usize,
    /// The number of RAM's section.
    section: u32,
    /// The block of the last record, which the next record may continue.
    block: Option<Known>,
    /// Whether the section that is being read is RAM's last.
    last: bool,
    /// Receives whether the guest was paused when QEMU stopped it.
    tell_paused: Option<Sender<bool>>,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The header of the stream.
    Header,
    /// The machine's name and whatever else precedes RAM's first section.
    Configuration,
    /// A section, a command or the footer of a section of RAM.
    Section,
    /// The table of blocks, with the remaining total of block bytes.
    Table(u64),
    /// A record of RAM.
    Record,
    /// A section of something else, whose end is unknown, or unrecognized data.
    Elsewhere,
    /// The sections of devices, after RAM's last one.
    Devices,
    /// Nothing of interest.
    End,
}

impl MainStream {
    /// Creates a recognizer for the stream of a guest with these blocks, from its first byte.
    #[must_use]
    pub fn new(blocks: Arc<Blocks>) -> Self {
        let (place, skip, section, block) = (Place::Header, 0, 0, None);
        Self { blocks, place, skip, section, block, last: false, tell_paused: None }
    }

    /// Also sends to `tell` whether the guest was already paused when QEMU stopped it, as soon as
    /// the stream says so. If it never does, `tell` is dropped together with this.
    #[must_use]
    pub fn telling_paused(mut self, tell: Sender<bool>) -> Self {
        self.tell_paused = Some(tell);
        self
    }
}

impl Recogniser for MainStream {
    fn look(&mut self, bytes: &[u8], marks: &mut Marks) -> usize {
        let mut at = 0;
        loop {
            let rest = &bytes[at..];
            let skipped = self.skip.min(rest.len());
            if skipped > 0 {
                self.skip -= skipped;
                at += skipped;
                continue;
            }
            at += match self.step(rest, at, marks) {
                Found::Whole(taken) => taken,
                Found::Short => return at,
                Found::Other => {
                    // The skipped data may have switched to another block.
                    self.block = None;
                    self.place = Place::Elsewhere;
                    0
                }
            };
        }
    }
}

impl MainStream {
    /// Takes the next part, and returns its length. The length is at least 1, or the place changes
    /// and makes progress: only unrecognized data leads to `Elsewhere`, and `Elsewhere` accepts
    /// anything.
    fn step(&mut self, bytes: &[u8], at: usize, marks: &mut Marks) -> Found<usize> {
        match self.place {
            Place::Header => {
                let header = expect(bytes, 0, FILE_HEADER);
                self.place = match header {
                    Found::Whole(()) => Place::Configuration,
                    Found::Short => return Found::Short,
                    Found::Other => Place::End,
                };
                Found::Whole(0)
            }
            Place::Configuration => self.find_ram(bytes),
            Place::Section => self.section(bytes),
            Place::Table(left) => {
                let (length, block_bytes) = found!(table_entry(bytes, left));
                self.place = match left - block_bytes {
                    0 => Place::Record,
                    left => Place::Table(left),
                };
                Found::Whole(length)
            }
            Place::Record => {
                let record = found!(record(bytes));
                if record.length > bytes.len() {
                    return Found::Short;
                }
                self.take(record, at, marks);
                Found::Whole(record.length)
            }
            Place::Elsewhere => self.find_record(bytes),
            Place::Devices => self.find_run_state(bytes),
            Place::End => some(bytes.len()),
        }
    }

    /// Finds the beginning of RAM's first section. It is unmistakable, so the data before it need
    /// not be understood.
    fn find_ram(&mut self, bytes: &[u8]) -> Found<usize> {
        let found = search(
            bytes,
            |byte| byte == SECTION_START,
            |bytes| {
                let section = found!(be32(bytes, 1));
                found!(expect(bytes, 5, RAM));
                let records = 5 + RAM.len();
                match found!(record(&bytes[records..])).kind {
                    Kind::Table(_) => {
                        self.section = section;
                        Found::Whole(records)
                    }
                    _ => Found::Other,
                }
            },
        );
        if let Found::Whole((_, true)) = found {
            self.place = Place::Record;
        }
        found.map(|(taken, _)| taken)
    }

    fn section(&mut self, bytes: &[u8]) -> Found<usize> {
        match found!(byte(bytes, 0)) {
            SECTION_FOOTER if found!(be32(bytes, 1)) == self.section => Found::Whole(5),
            kind @ (SECTION_PART | SECTION_END) if found!(be32(bytes, 1)) == self.section => {
                self.last = kind == SECTION_END;
                self.place = Place::Record;
                Found::Whole(5)
            }
            COMMAND => {
                self.skip = found!(be16(bytes, 3)).into();
                Found::Whole(5)
            }
            EOF => {
                self.place = Place::End;
                Found::Whole(1)
            }
            _ => {
                self.place = Place::Elsewhere;
                Found::Whole(0)
            }
        }
    }

    fn take(&mut self, record: Record<'_>, at: usize, marks: &mut Marks) {
        if let Some(name) = record.name {
            self.block = self.blocks.find(name);
        }
        match record.kind {
            Kind::Mark | Kind::Packed => {}
            Kind::Table(bytes) => self.place = Place::Table(bytes),
            Kind::End if self.last => self.place = Place::Devices,
            Kind::End => self.place = Place::Section,
            Kind::Zero => marks.zero_pages += 1,
            Kind::Page => {
                let page = self.block.and_then(|known| Some((known, known.page(record.offset)?)));
                if let Some((Known { slot, .. }, page)) = page {
                    let at = at + record.length - PAGE;
                    marks.pages.push(PageMark { at, slot, page });
                }
            }
        }
    }

    /// Finds the section with the guest's state before QEMU stopped it, wherever it is.
    fn find_run_state(&mut self, bytes: &[u8]) -> Found<usize> {
        let Some(tell) = &self.tell_paused else {
            self.place = Place::End;
            return Found::Whole(0);
        };
        let is_needle = |byte| byte == SECTION_FULL;
        let found = search(bytes, is_needle, |bytes| {
            // Section numbers are small.
            if found!(be16(bytes, 1)) != 0 {
                return Found::Other;
            }
            found!(expect(bytes, 5, GLOBAL_STATE));
            let at = 5 + GLOBAL_STATE.len();
            let length = found!(be32(bytes, at)) as usize;
            if !(1..=MAX_RUN_STATE).contains(&length) {
                return Found::Other;
            }
            let end = at + 4 + length;
            let Some(text) = bytes.get(at + 4..end) else { return Found::Short };
            // An error means that the receiver is gone.
            let _ = tell.send(is_paused(text));
            Found::Whole(end)
        });
        if let Found::Whole((_, true)) = found {
            (self.place, self.tell_paused) = (Place::End, None);
        }
        found.map(|(taken, _)| taken)
    }

    /// Finds the end of another section, or a command, that is followed by a section of RAM.
    fn find_record(&mut self, bytes: &[u8]) -> Found<usize> {
        let is_needle = |byte| matches!(byte, SECTION_FOOTER | COMMAND);
        let found = search(bytes, is_needle, |bytes| {
            let (high, low) = (found!(be16(bytes, 1)), found!(be16(bytes, 3)));
            // Section and command numbers are small; the commands between two sections have no
            // data.
            let fits = match bytes[0] {
                SECTION_FOOTER => high == 0,
                _ => high <= 0xff && low == 0,
            };
            if !fits {
                return Found::Other;
            }
            found!(self.ram_begins(&bytes[5..]));
            Found::Whole(5)
        });
        if let Found::Whole((_, true)) = found {
            self.place = Place::Section;
        }
        found.map(|(taken, _)| taken)
    }

    /// Whether a section of RAM begins there, judged by its type, its number and its first record.
    fn ram_begins(&self, bytes: &[u8]) -> Found<()> {
        if !matches!(found!(byte(bytes, 0)), SECTION_PART | SECTION_END)
            || found!(be32(bytes, 1)) != self.section
        {
            return Found::Other;
        }
        let first = found!(record(&bytes[5..]));
        let pages = match (first.kind, first.name) {
            (Kind::Mark, _) => return Found::Whole(()),
            (Kind::Table(_), _) => return Found::Other,
            (Kind::End, _) => {
                let [a, b, c, d] = self.section.to_be_bytes();
                return expect(bytes, 5 + 8, &[SECTION_FOOTER, a, b, c, d]);
            }
            (_, Some(name)) => self.blocks.find(name).map_or(u64::MAX, |known| known.pages),
            (_, None) => self.block.map_or(self.blocks.largest(), |known| known.pages),
        };
        if first.offset / (PAGE as u64) < pages { Found::Whole(()) } else { Found::Other }
    }
}

/// Whether a guest was paused, by the name of its run state, which ends with a zero. A suspended
/// guest (ACPI S3) is not paused.
pub(crate) fn is_paused(name: &[u8]) -> bool {
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    !matches!(name, b"running" | b"suspended")
}

/// Takes bytes up to and including a match, and returns whether there was one. Without a match it
/// takes all bytes that can't be the beginning of one.
fn search(
    bytes: &[u8],
    is_needle: impl Fn(u8) -> bool,
    mut fits: impl FnMut(&[u8]) -> Found<usize>,
) -> Found<(usize, bool)> {
    let mut at = 0;
    while let Some(skipped) = bytes[at..].iter().position(|&byte| is_needle(byte)) {
        at += skipped;
        match fits(&bytes[at..]) {
            Found::Whole(length) => return Found::Whole((at + length, true)),
            Found::Short => return some(at).map(|taken| (taken, false)),
            Found::Other => at += 1,
        }
    }
    some(bytes.len()).map(|taken| (taken, false))
}
