//! A recorded session, made of the same parts as a real one.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::sync::Arc;

use vmferry_codec::{
    Batch, Choice, Compressors, DeltaUse, EncodedFrame, Encoder, HotPages, Method, PageHashes,
};
use vmferry_inspect::{Inspector, Outcome};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout};
use vmferry_microvm::state::{SectionKind, StateWriter};
use vmferry_transport::{Direction, RecordingHeader, RecordingSide};
use vmferry_wire::{
    ControlMessage, FRAME_HEADER_BYTES, FrameHeader, GuestIdentity, Hello, HelloReply, HelloStatus,
    Role, SessionId, Token, table_checksum,
};

pub const SESSION: SessionId = SessionId([5; 16]);
const TOKEN: Token = Token([9; 16]);
const PAGES: u64 = 2048;

/// The four files of a session with one lane, as the source records them, in their order.
#[derive(Clone)]
pub struct Recorded {
    pub control: Vec<u8>,
    pub control_back: Vec<u8>,
    pub data: Vec<u8>,
    pub data_back: Vec<u8>,
    /// Where each frame begins in `data`: raw, raw again, changes, compressed, zeros; each round's end among them.
    pub frames: Vec<usize>,
    /// Where each message begins in `control`.
    pub messages: Vec<usize>,
}

fn begin(direction: Direction, connection: u32) -> Vec<u8> {
    RecordingHeader { side: RecordingSide::Source, direction, connection, at: 1_790_000_000 }
        .encode()
        .to_vec()
}

fn hello(role: Role, token: Token) -> Vec<u8> {
    Hello { version_min: 1, version_max: 1, role, lane: 0, token, attempt: 0 }.encode().to_vec()
}

fn reply() -> Vec<u8> {
    HelloReply { status: HelloStatus::Ok, version_min: 1, version_max: 1, version: 1, placed: 0 }
        .encode()
        .to_vec()
}

impl Recorded {
    pub fn new(lanes: u8) -> Self {
        let (data, frames) = data();
        let last = 9;
        let mut control =
            [begin(Direction::ToDestination, 0), hello(Role::Control, Token([0; 16]))].concat();
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
                release: None,
                streams: false,
            },
            ControlMessage::Final { lane_sequences: vec![last], digest: 7, state: state() },
            ControlMessage::Commit { session: SESSION },
        ] {
            messages.push(control.len());
            message.encode(1, &mut control);
        }
        let mut control_back = [begin(Direction::ToSource, 0), reply()].concat();
        for message in [
            ControlMessage::Accept { token: TOKEN, release: None, algorithms: None },
            ControlMessage::Placed { lane: 0, sequence: last },
            ControlMessage::Ready { digest: 7, load_us: 80 },
            ControlMessage::Running { session: SESSION, start_us: 90 },
        ] {
            message.encode(1, &mut control_back);
        }
        let data_back = [begin(Direction::ToSource, 1), reply()].concat();
        Self { control, control_back, data, data_back, frames, messages }
    }

    /// Reads all four; the outcomes, what was told, and where they contradict each other.
    pub fn inspect(&self) -> ([Outcome; 4], String, Vec<String>) {
        let mut inspector = Inspector::new(1 << 20, true);
        let mut told = String::new();
        let outcomes =
            [&self.control, &self.control_back, &self.data, &self.data_back].map(|file| {
                let outcome = inspector.file("file", &file[..], &mut |record| {
                    told += &format!("{record}\n");
                    Ok(())
                });
                let outcome = outcome.unwrap();
                told += &format!("{}, {} records\n", outcome.end, outcome.records);
                outcome
            });
        (outcomes, told, inspector.disagreements())
    }

    /// The frame of this number in `data`.
    pub fn frame(&self, number: usize) -> &[u8] {
        let end = self.frames.get(number + 1).copied().unwrap_or(self.data.len());
        &self.data[self.frames[number]..end]
    }
}

/// Changes a frame's header, with its checksum right.
pub fn change_header(frame: &mut [u8], change: impl FnOnce(FrameHeader) -> FrameHeader) {
    let header = FrameHeader::parse(frame.first_chunk().unwrap()).unwrap();
    frame[..FRAME_HEADER_BYTES].copy_from_slice(&change(header).encode());
}

/// Makes the checksums of a frame's table and header right.
pub fn seal(frame: &mut [u8]) {
    let header = FrameHeader::parse(frame.first_chunk().unwrap()).unwrap();
    let table = table_checksum(&frame[FRAME_HEADER_BYTES..][..header.table_bytes()]);
    change_header(frame, |header| FrameHeader { table_checksum: table, ..header });
}

fn state() -> Vec<u8> {
    let mut writer = StateWriter::new();
    writer.section(&SectionKind::mandatory("vcpu.regs", 1), 0, &[1; 32]).unwrap();
    writer.section(&SectionKind::mandatory("serial", 1), 0, &[2; 9]).unwrap();
    writer.finish()
}

/// A data channel: pages raw, again, changed, compressed and zero.
fn data() -> (Vec<u8>, Vec<usize>) {
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Private).unwrap();
    let hashes = PageHashes::for_memory(&memory);
    let mut encoder = Encoder::new(Compressors::default(), Arc::new(HotPages::new(1 << 20)));
    let mut data = [begin(Direction::ToDestination, 1), hello(Role::Data, TOKEN)].concat();
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
    // Zeros alone, with the frame that ends the last round left out: FINAL names this one.
    send(5, &[20, 21], pack);
    data.truncate(frames.pop().unwrap());
    (data, frames)
}
