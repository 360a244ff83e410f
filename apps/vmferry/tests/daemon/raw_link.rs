//! A link to a daemon without a daemon at this end.

use std::io::{Read, Write};
use std::time::Duration;

use vmferry_codec::{
    Choice, Compressors, Decompressors, EncodedFrame, Frame, HotPages, Piece, StreamDecoder,
    StreamEncoder,
};
use vmferry_control::TlsFiles;
use vmferry_transport::{ChannelReader, ChannelWriter};
use vmferry_wire::{FrameKind, Hello, Role, Token};

use crate::support::Hosts;

/// The beginning of a frame, and the acknowledgement of one.
const FRAME: u8 = b'V';
const PLACED: u8 = 2;

/// An open stream to libvirt of `host-b`, with the certificate of `host-a`.
pub struct RawLink {
    reader: ChannelReader,
    writer: ChannelWriter,
    sequence: u64,
    offset: u64,
    decoder: StreamDecoder,
    received: Vec<u8>,
}

impl RawLink {
    pub fn open(hosts: &Hosts) -> Self {
        let address = format!("tls:{}", hosts.b.cable.address);
        let files = TlsFiles::in_directory(&hosts.directory.path().join("host-a"));
        let channel = files.dialer(address.parse().unwrap()).unwrap().connect().unwrap();
        let (mut reader, mut writer) = channel.split();
        reader.set_timeout(Some(Duration::from_secs(60))).unwrap();
        let hello = Hello {
            version_min: 1,
            version_max: 1,
            role: Role::Stream,
            lane: 0,
            token: Token([9; 16]),
            attempt: 1,
        };
        writer.write_all(&hello.encode()).unwrap();
        let session = "09090909-0909-0909-0909-090909090909";
        let opening = [&[1, 0][..], &[0; 8], &[6, 0], b"host-b", &[36, 0], session.as_bytes()];
        writer.write_all(&opening.concat()).unwrap();
        let mut answer = [0; 9];
        reader.read_exact(&mut answer).unwrap();
        assert_eq!(answer[0], 1, "the stream is opened");
        let decoder = StreamDecoder::new(Decompressors::default(), 1);
        Self { reader, writer, sequence: 0, offset: 0, decoder, received: Vec::new() }
    }

    /// Calls a procedure of libvirt and returns the whole reply.
    pub fn call(&mut self, procedure: u32, arguments: &[u8]) -> Vec<u8> {
        let serial = self.sequence as u32;
        let words = [28 + arguments.len() as u32, 0x2000_8086, 1, procedure, 0, serial, 0];
        let mut packet: Vec<u8> = words.into_iter().flat_map(u32::to_be_bytes).collect();
        packet.extend_from_slice(arguments);
        self.send(&packet);
        while self.received.len() < 4 || self.received.len() < self.announced() {
            self.receive();
        }
        let announced = self.announced();
        self.received.drain(..announced).collect()
    }

    fn announced(&self) -> usize {
        u32::from_be_bytes(*self.received.first_chunk().unwrap()) as usize
    }

    fn send(&mut self, bytes: &[u8]) {
        let mut frame = EncodedFrame::new();
        frame.bytes_mut(bytes.len()).copy_from_slice(bytes);
        let (pages, zero_pages, round) = (&[][..], 0, 1);
        let piece = Piece { offset: self.offset, bytes: bytes.len(), pages, zero_pages, round };
        frame.divide(piece, &HotPages::new(0), Choice::default());
        StreamEncoder::new(Compressors::default()).encode(&mut frame, None).unwrap();
        self.sequence += 1;
        self.offset += bytes.len() as u64;
        frame.set_sequence(self.sequence);
        frame.write_to(&mut self.writer).unwrap();
    }

    /// Receives records up to a frame, and acknowledges it.
    fn receive(&mut self) {
        loop {
            let mut kind = [0];
            self.reader.read_exact(&mut kind).unwrap();
            match kind[0] {
                FRAME => break,
                PLACED => self.reader.read_exact(&mut [0; 8]).unwrap(),
                5 => {}
                other => panic!("record {other}"),
            }
        }
        let mut frame = Frame::new();
        let header = frame.read_from(&mut [FRAME].chain(&mut self.reader)).unwrap().unwrap();
        assert_eq!(header.kind, FrameKind::Stream);
        self.received.extend_from_slice(self.decoder.decode(&frame).unwrap().bytes);
        let placed = [&[PLACED][..], &header.sequence.to_le_bytes()].concat();
        self.writer.write_all(&placed).unwrap();
    }
}
