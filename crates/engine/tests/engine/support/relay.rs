//! A relay between source and destination that parses the frames on the data channels, and may send
//! something else in their place.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;

use vmferry_kit::relay::{UnixAcceptor, copy};
use vmferry_transport::Address;
use vmferry_wire::{
    FRAME_HEADER_BYTES, FrameHeader, HELLO_BYTES, Hello, Role, Run, RunTable, table_checksum,
};

/// A frame in transit.
#[derive(Clone, Debug)]
pub struct Wire {
    pub header: FrameHeader,
    pub runs: Vec<Run>,
    pub payload: Vec<u8>,
}

impl Wire {
    fn read_from(from: &mut impl Read) -> Option<Self> {
        let mut header = [0; FRAME_HEADER_BYTES];
        from.read_exact(&mut header).ok()?;
        let header = FrameHeader::parse(&header).expect("the source sends frames");
        let mut table = vec![0; header.table_bytes()];
        from.read_exact(&mut table).ok()?;
        let mut payload = vec![0; header.payload_bytes as usize];
        from.read_exact(&mut payload).ok()?;
        let runs = match header.runs {
            0 => Vec::new(),
            _ => RunTable::parse(&header, &table, u64::MAX).expect("a table").runs().collect(),
        };
        Some(Self { header, runs, payload })
    }

    /// The packed part of the payload.
    pub fn packed(&self) -> &[u8] {
        &self.payload[self.payload.len() - self.header.packed_bytes as usize..]
    }

    pub fn packed_mut(&mut self) -> &mut [u8] {
        let from = self.payload.len() - self.header.packed_bytes as usize;
        &mut self.payload[from..]
    }

    /// The frame as bytes, with lengths and checksums that match its present content. A
    /// caller that changes the packed part must set `packed_bytes` and `delta_bytes`.
    pub fn sealed(mut self) -> Vec<u8> {
        let mut table = Vec::new();
        self.runs.iter().for_each(|run| run.encode(&mut table));
        self.header.runs = self.runs.len() as u32;
        self.header.payload_bytes = self.payload.len() as u32;
        self.header.table_checksum = table_checksum(&table);
        [&self.header.encode()[..], &table, &self.payload].concat()
    }
}

/// Recomputes the checksum of a frame's header after its bytes were changed.
pub fn seal_header(frame: &mut [u8]) {
    // Headers and run tables use the same CRC-32C.
    let checksum = table_checksum(&frame[..FRAME_HEADER_BYTES - 4]);
    frame[FRAME_HEADER_BYTES - 4..FRAME_HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
}

/// Modifies a lane's frame: `None` lets it pass. After a partial frame the relay closes the
/// channel.
pub type Damage = dyn FnMut(u8, &Wire) -> Option<Vec<u8>> + Send;

/// The relay. After a drop it accepts no more connections.
pub struct Relay(UnixAcceptor);

impl Relay {
    /// Listens at `path` and forwards to `to`, a Unix socket.
    pub fn start(path: PathBuf, to: &Address, damage: Box<Damage>) -> Self {
        let Address::Unix(to) = to.clone() else { panic!("relays Unix sockets") };
        let damage = Mutex::new(damage);
        Self(UnixAcceptor::start(path, move |source| {
            let destination = UnixStream::connect(&to).unwrap();
            let (from, into) = (destination.try_clone().unwrap(), source.try_clone().unwrap());
            std::thread::spawn(move || copy(from, into));
            forward(source, destination, &damage);
        }))
    }

    pub fn address(&self) -> Address {
        Address::Unix(self.0.path().to_owned())
    }
}

/// Whether this is only the beginning of a frame, after which the channel must end.
fn is_cut(bytes: &[u8]) -> bool {
    let header = bytes.first_chunk().and_then(|header| FrameHeader::parse(header).ok());
    header.is_some_and(|header| {
        bytes.len() < FRAME_HEADER_BYTES + header.table_bytes() + header.payload_bytes as usize
    })
}

/// Forwards from the source: the greeting, then frames on a data channel and bytes on the others.
fn forward(mut from: UnixStream, mut to: UnixStream, damage: &Mutex<Box<Damage>>) {
    let mut hello = [0; HELLO_BYTES];
    if from.read_exact(&mut hello).and_then(|()| to.write_all(&hello)).is_err() {
        return;
    }
    let hello = Hello::parse(&hello).expect("the source greets");
    if hello.role != Role::Data {
        return copy(from, to);
    }
    while let Some(frame) = Wire::read_from(&mut from) {
        let changed = damage.lock().unwrap()(hello.lane, &frame);
        let bytes = changed.unwrap_or_else(|| frame.sealed());
        if to.write_all(&bytes).is_err() || is_cut(&bytes) {
            break;
        }
    }
    // Only the destination sees the end of the channel. The source is notified on the control
    // channel, however busy this machine is.
    let _ = to.shutdown(Shutdown::Write);
    let _ = std::io::copy(&mut from, &mut std::io::sink());
}
