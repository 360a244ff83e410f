//! A network between source and destination that fails when it is told to, or at the worst moment:
//! when COMMIT is on its way.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// A plain TCP proxy that reads the control channel as it passes.
pub struct Proxy {
    pub address: String,
    shared: Arc<Shared>,
}

struct Shared {
    target: String,
    cut: AtomicBool,
    healed: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    /// Stands before a destination at `tcp:HOST:PORT`.
    pub fn before(address: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let shared = Arc::new(Shared {
            target: address.strip_prefix("tcp:").unwrap().to_owned(),
            cut: AtomicBool::new(false),
            healed: AtomicBool::new(false),
            open: Mutex::default(),
        });
        let address = format!("tcp:{}", listener.local_addr().unwrap());
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                accepting.connect(stream.unwrap());
            }
        });
        Self { address, shared }
    }

    /// The destination's address.
    pub fn target(&self) -> String {
        format!("tcp:{}", self.shared.target)
    }

    /// Whether the link was cut, as it is when COMMIT comes by.
    pub fn is_cut(&self) -> bool {
        self.shared.cut.load(Ordering::Acquire)
    }

    /// Cuts every connection, and lets no new one through.
    pub fn cut(&self) {
        self.shared.cut_all();
    }

    /// Lets new connections through again.
    pub fn heal(&self) {
        self.shared.healed.store(true, Ordering::Release);
    }
}

impl Shared {
    fn passes(&self) -> bool {
        !self.cut.load(Ordering::Acquire) || self.healed.load(Ordering::Acquire)
    }

    fn connect(self: &Arc<Self>, source: TcpStream) {
        if !self.passes() {
            return;
        }
        let Ok(destination) = TcpStream::connect(&self.target) else { return };
        for stream in [&source, &destination] {
            stream.set_nodelay(true).unwrap();
            self.open.lock().unwrap().push(stream.try_clone().unwrap());
        }
        let (back_from, back_to) = (destination.try_clone().unwrap(), source.try_clone().unwrap());
        std::thread::spawn(move || copy(back_from, back_to));
        let shared = Arc::clone(self);
        std::thread::spawn(move || shared.forward(source, destination));
    }

    /// From the source: the greeting, then bytes on a data channel, messages on the others.
    fn forward(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut hello = [0; 40];
        if from.read_exact(&mut hello).and_then(|()| to.write_all(&hello)).is_err() {
            return;
        }
        if hello[12] == 2 {
            return copy(from, to);
        }
        let mut header = [0; 12];
        while from.read_exact(&mut header).is_ok() {
            let length = u32::from_le_bytes(header[..4].try_into().unwrap());
            let mut body = vec![0; length as usize];
            if from.read_exact(&mut body).is_err() {
                return;
            }
            if header[4] == 9 && !self.healed.load(Ordering::Acquire) {
                return self.cut_all();
            }
            if to.write_all(&header).and_then(|()| to.write_all(&body)).is_err() {
                return;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }

    fn cut_all(&self) {
        self.cut.store(true, Ordering::Release);
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}
