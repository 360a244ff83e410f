//! A TCP relay that records what the source has sent on each connection.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// The recorded data of one connection.
#[derive(Clone, Default)]
pub struct Recording(Arc<Mutex<Vec<u8>>>);

impl Recording {
    pub fn said(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }

    fn keep(&self, bytes: &[u8]) {
        let mut kept = self.0.lock().unwrap();
        let room = KEPT_BYTES.saturating_sub(kept.len());
        kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }
}

/// The limit of recorded bytes: a greeting and some frames.
const KEPT_BYTES: usize = 2 << 20;

/// The relay. Its threads end with the connections, and with the test.
pub struct Recorder {
    pub address: SocketAddr,
    recordings: Arc<Mutex<Vec<Recording>>>,
}

impl Recorder {
    /// Relays to `to`.
    pub fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let recordings: Arc<Mutex<Vec<Recording>>> = Arc::default();
        let kept = Arc::clone(&recordings);
        std::thread::spawn(move || {
            for source in listener.incoming() {
                let (source, destination) = (source.unwrap(), TcpStream::connect(to).unwrap());
                let recording = Recording::default();
                kept.lock().unwrap().push(recording.clone());
                let back = (destination.try_clone().unwrap(), source.try_clone().unwrap());
                std::thread::spawn(move || {
                    copy(source, destination, |bytes| recording.keep(bytes))
                });
                std::thread::spawn(move || copy(back.0, back.1, |_| ()));
            }
        });
        Self { address, recordings }
    }

    /// All connections so far, oldest first.
    pub fn recordings(&self) -> Vec<Recording> {
        self.recordings.lock().unwrap().clone()
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, hear: impl Fn(&[u8])) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(read @ 1..) = from.read(&mut bytes) {
        hear(&bytes[..read]);
        if to.write_all(&bytes[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
