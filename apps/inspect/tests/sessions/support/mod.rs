//! A recorded session, built with the code that real sessions use.

#![allow(dead_code, reason = "each test uses a part")]

use std::sync::Arc;

use vmferry_codec::{
    Batch, Choice, Compressors, DeltaUse, EncodedFrame, Encoder, HotPages, Method, PageHashes,
    PageMark, Piece, StreamEncoder,
};
use vmferry_inspect::{Inspector, Outcome};
use vmferry_memory::{GuestBytes, GuestMemory, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout};
use vmferry_microvm::state::{SectionKind, StateWriter};
use vmferry_transport::{Direction, RecordingHeader, RecordingSide};
use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlMessage, FRAME_HEADER_BYTES, FrameHeader, GuestIdentity, Hello,
    HelloReply, HelloStatus, PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN, Release, Role, SessionId,
    Token, table_checksum,
};

/// The protocol versions that each test runs with.
pub const VERSIONS: std::ops::RangeInclusive<u16> = PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION_MAX;

pub const SESSION: SessionId = SessionId([5; 16]);
pub const TOKEN: Token = Token([9; 16]);
pub const PAGES: u64 = 2048;

/// The four files of a session with one lane, as the source records them.
#[derive(Clone)]
pub struct Recorded {
    pub control: Vec<u8>,
    pub control_back: Vec<u8>,
    pub data: Vec<u8>,
    pub data_back: Vec<u8>,
    /// Offset of each frame in `data`: raw, raw again, deltas, compressed, zeros, with the ends of
    /// rounds in between.
    pub frames: Vec<usize>,
    /// Offset of each message in `control`.
    pub messages: Vec<usize>,
    /// Offset of each message in `control_back`.
    pub messages_back: Vec<usize>,
}

pub fn begin(direction: Direction, connection: u32) -> Vec<u8> {
    RecordingHeader { side: RecordingSide::Source, direction, connection, at: 1_790_000_000 }
        .encode()
        .to_vec()
}

pub fn hello(version: u16, role: Role, token: Token) -> Vec<u8> {
    let (version_min, lane, attempt) = (PROTOCOL_VERSION_MIN, 0, 0);
    Hello { version_min, version_max: version, role, lane, token, attempt }.encode().to_vec()
}

pub fn reply(version: u16) -> Vec<u8> {
    let (version_min, placed) = (PROTOCOL_VERSION_MIN, 0);
    HelloReply { status: HelloStatus::Ok, version_min, version_max: version, version, placed }
        .encode()
        .to_vec()
}

impl Recorded {
    /// A session of `lanes` lanes; the recorded lane carries frames of pages.
    pub fn new(version: u16, lanes: u8) -> Self {
        Self::with(version, lanes, false, data(version))
    }

    /// A session of one lane with a VMM's migration stream: pages to be kept uncompressed and
    /// compressed, deltas of both, and bytes that are not pages.
    pub fn carried(version: u16) -> Self {
        Self::with(version, 1, true, pieces(version))
    }

    fn with(version: u16, lanes: u8, streams: bool, (data, frames): (Vec<u8>, Vec<usize>)) -> Self {
        let last = frames.len() as u64;
        let release =
            (version > 1).then(|| Release { vmferry: "0.1.0".into(), vmm: "microvm 0.1.0".into() });
        let mut control =
            [begin(Direction::ToDestination, 0), hello(version, Role::Control, Token([0; 16]))]
                .concat();
        let mut messages = Vec::new();
        for message in [
            ControlMessage::Begin {
                session: SESSION,
                guest: GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "web".into() },
                vmm: "vmferry-microvm".into(),
                config: b"{}".to_vec(),
                layout: vec![SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }],
                lanes,
                verify: false,
                reconnect_ms: 30_000,
                release: release.clone(),
                streams: streams && version > 1,
                used_bytes: Vec::new(),
                fetch_lanes: None,
                witness: None,
            },
            ControlMessage::Final {
                lane_sequences: vec![last],
                digest: 7,
                state: state(),
                paused: false,
                kind: vmferry_wire::SessionKind::PreCopy,
                storage_sample: Vec::new(),
            },
            ControlMessage::Commit { session: SESSION },
        ] {
            messages.push(control.len());
            message.encode(version, &mut control);
        }
        let mut control_back = [begin(Direction::ToSource, 0), reply(version)].concat();
        let mut messages_back = Vec::new();
        for message in [
            ControlMessage::Accept {
                token: TOKEN,
                release,
                algorithms: None,
                verifies_placed: false,
                post_copy: None,
                compares_storage: false,
            },
            ControlMessage::Placed { lane: 0, sequence: last },
            ControlMessage::Ready { digest: 7, load_us: 80 },
            ControlMessage::Running { session: SESSION, start_us: 90 },
        ] {
            messages_back.push(control_back.len());
            message.encode(version, &mut control_back);
        }
        let data_back = [begin(Direction::ToSource, 1), reply(version)].concat();
        Self { control, control_back, data, data_back, frames, messages, messages_back }
    }

    /// Reads all four files. Returns the outcomes, the output, and the contradictions.
    pub fn inspect(&self) -> ([Outcome; 4], String, Vec<String>) {
        self.inspect_with(Inspector::new(1 << 20, true), "file")
    }

    /// The same with this inspector, and this path for all four files.
    pub fn inspect_with(
        &self,
        mut inspector: Inspector,
        path: &str,
    ) -> ([Outcome; 4], String, Vec<String>) {
        let (outcomes, told) = self.read_by(&mut inspector, path);
        (outcomes, told, inspector.disagreements())
    }

    pub fn read_by(&self, inspector: &mut Inspector, path: &str) -> ([Outcome; 4], String) {
        let mut told = String::new();
        let outcomes =
            [&self.control, &self.control_back, &self.data, &self.data_back].map(|file| {
                let outcome = inspector.file(path, &file[..], &mut |record| {
                    told += &format!("{record}\n");
                    Ok(())
                });
                let outcome = outcome.unwrap();
                told += &format!("{}, {} records\n", outcome.end, outcome.records);
                outcome
            });
        (outcomes, told)
    }

    /// Appends bytes to the body of a message in `control` and corrects the message's header.
    pub fn append(&mut self, message: usize, bytes: &[u8]) {
        let start = self.messages[message];
        let end = self.messages.get(message + 1).copied().unwrap_or(self.control.len());
        self.control.splice(end..end, bytes.iter().copied());
        self.messages[message + 1..].iter_mut().for_each(|at| *at += bytes.len());
        let (head, rest) = self.control[start..].split_at_mut(CONTROL_HEADER_BYTES);
        let body = &rest[..end + bytes.len() - start - CONTROL_HEADER_BYTES];
        head[..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
        head[8..].copy_from_slice(&table_checksum(body).to_le_bytes());
    }

    /// A frame in `data`.
    pub fn frame(&self, number: usize) -> &[u8] {
        let end = self.frames.get(number + 1).copied().unwrap_or(self.data.len());
        &self.data[self.frames[number]..end]
    }
}

/// Changes a frame's header and corrects its checksum.
pub fn change_header(frame: &mut [u8], change: impl FnOnce(FrameHeader) -> FrameHeader) {
    let header = FrameHeader::parse(frame.first_chunk().unwrap()).unwrap();
    frame[..FRAME_HEADER_BYTES].copy_from_slice(&change(header).encode());
}

/// Corrects the checksums of a frame's table and header.
pub fn seal(frame: &mut [u8]) {
    let header = FrameHeader::parse(frame.first_chunk().unwrap()).unwrap();
    let table = table_checksum(&frame[FRAME_HEADER_BYTES..][..header.table_bytes()]);
    change_header(frame, |header| FrameHeader { table_checksum: table, ..header });
}

pub fn state() -> GuestBytes {
    let mut writer = StateWriter::new();
    writer.section(&SectionKind::mandatory("vcpu.regs", 1), 0, &[1; 32]).unwrap();
    writer.section(&SectionKind::mandatory("serial", 1), 0, &[2; 9]).unwrap();
    writer.finish()
}

/// A data channel: pages raw, raw again, as deltas, compressed and zero.
fn data(version: u16) -> (Vec<u8>, Vec<usize>) {
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Private).unwrap();
    let hashes = PageHashes::for_memory(&memory);
    let mut encoder = Encoder::new(Compressors::default(), Arc::new(HotPages::new(1 << 20)));
    let mut data = [begin(Direction::ToDestination, 1), hello(version, Role::Data, TOKEN)].concat();
    let (mut frames, mut sequence) = (Vec::new(), 0);
    let write = |page: u64, byte: u8| {
        let text = format!("page {page}, {byte}; ");
        let mut content: Vec<u8> = text.bytes().cycle().take(PAGE_SIZE).collect();
        content[100] = byte;
        memory.copy_in(PageRun { slot: SlotId(0), first: page, pages: 1 }, &content).unwrap();
    };
    let mut send = |round, pages: &[u64], choice| {
        for end in [false, true] {
            let mut frame = EncodedFrame::new();
            if end {
                frame.end_of_round(round);
            } else {
                let copy = frame.pages_mut(pages.len());
                for (page, into) in pages.iter().zip(copy.chunks_exact_mut(PAGE_SIZE)) {
                    let run = PageRun { slot: SlotId(0), first: *page, pages: 1 };
                    memory.copy_out(run, into).unwrap();
                }
                let batch = Batch { round, slot: SlotId(0), pages };
                encoder.encode(&mut frame, batch, &hashes, choice).unwrap();
            }
            sequence += 1;
            frame.set_sequence(sequence);
            frames.push(data.len());
            frame.write_to(&mut data).unwrap();
        }
    };
    let keep = Choice { pack: None, delta: DeltaUse::Make };
    (1..5).for_each(|page| write(page, 1));
    send(1, &[1, 2, 3, 4], keep);
    send(2, &[1, 2, 3, 4], keep);
    for page in 1..5 {
        let run = PageRun { slot: SlotId(0), first: page, pages: 1 };
        let mut content = vec![0; PAGE_SIZE];
        memory.copy_out(run, &mut content).unwrap();
        content[2000] ^= 1;
        memory.copy_in(run, &content).unwrap();
    }
    send(3, &[1, 2, 3, 4], keep);
    (8..11).for_each(|page| write(page, 1));
    let pack = Choice { pack: Some(Method::zstd(1)), delta: DeltaUse::Off };
    send(4, &[8, 9, 10], pack);
    // Only zero pages. The end of the last round is left out, so FINAL names this frame.
    send(5, &[20, 21], pack);
    data.truncate(frames.pop().unwrap());
    (data, frames)
}

/// The bytes of a page in a stream.
fn page_of_stream(page: u64, round: u32) -> Vec<u8> {
    let mut content: Vec<u8> =
        format!("page {page} of a stream; ").bytes().cycle().take(PAGE_SIZE).collect();
    content[10] = round as u8;
    content
}

/// A data channel with a VMM's migration stream, one piece per frame: three pages to keep
/// uncompressed, three to keep compressed, deltas of all, the same compressed, and bytes without
/// pages.
fn pieces(version: u16) -> (Vec<u8>, Vec<usize>) {
    let kept = HotPages::new(16 * PAGE_SIZE as u64);
    let mut encoder = StreamEncoder::new(Compressors::default());
    let mut data = [begin(Direction::ToDestination, 1), hello(version, Role::Data, TOKEN)].concat();
    let (mut frames, mut offset) = (Vec::new(), 0);
    let pack = Some(Method::zstd(1));
    let sent = [(0..3, None), (3..6, pack), (0..6, None), (0..6, pack), (0..0, pack)];
    for (round, (pages, pack)) in (2..).zip(sent) {
        let mut bytes = format!("piece {round} of a stream").into_bytes();
        let mut marks = Vec::new();
        for page in pages {
            marks.push(PageMark { at: bytes.len(), slot: SlotId(0), page });
            bytes.extend_from_slice(&page_of_stream(page, round));
            bytes.extend_from_slice(b"behind it");
        }
        let choice = Choice { pack, delta: DeltaUse::Make };
        let mut frame = EncodedFrame::new();
        frame.bytes_mut(bytes.len()).copy_from_slice(&bytes);
        let piece = Piece { offset, bytes: bytes.len(), pages: &marks, zero_pages: 2, round };
        frame.divide(piece, &kept, choice);
        encoder.encode(&mut frame, choice.pack).unwrap();
        frame.set_sequence(frames.len() as u64 + 1);
        offset += bytes.len() as u64;
        frames.push(data.len());
        frame.write_to(&mut data).unwrap();
    }
    (data, frames)
}
