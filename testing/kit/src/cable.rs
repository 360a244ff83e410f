//! A cable between two hosts: a TCP relay that can be cut, frozen and mended.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};

/// What the cable does with bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Carries them.
    Whole,
    /// Holds them, and connections stay.
    Frozen,
    /// Holds those that go back, to where the cable is entered.
    BackFrozen,
    /// Closes all connections and refuses new ones.
    Cut,
}

/// A TCP relay to one address.
#[derive(Clone, Debug)]
pub struct Cable {
    inner: Arc<Inner>,
    /// Where it is entered.
    pub address: SocketAddr,
}

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
    /// Where it leads, once that is known.
    to: Mutex<Option<SocketAddr>>,
    open: Mutex<Vec<TcpStream>>,
    /// Bytes until the connections are closed, once.
    fuse: AtomicU64,
    is_armed: AtomicBool,
    carried: AtomicU64,
    connections: AtomicU64,
}

impl Default for Cable {
    fn default() -> Self {
        Self::new()
    }
}

impl Cable {
    /// A cable that leads nowhere yet: connections are closed.
    ///
    /// # Panics
    /// If there is no port.
    #[must_use]
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let inner = Arc::new(Inner {
            state: Mutex::new(State::Whole),
            changed: Condvar::new(),
            to: Mutex::default(),
            open: Mutex::default(),
            fuse: AtomicU64::new(0),
            is_armed: AtomicBool::new(false),
            carried: AtomicU64::new(0),
            connections: AtomicU64::new(0),
        });
        let of_thread = Arc::clone(&inner);
        std::thread::spawn(move || {
            for accepted in listener.incoming() {
                let (accepted, inner) = (accepted.unwrap(), Arc::clone(&of_thread));
                std::thread::spawn(move || inner.join(accepted));
            }
        });
        Self { inner, address }
    }

    /// Leads to this address from now on.
    pub fn lead_to(&self, to: SocketAddr) {
        *self.inner.to.lock() = Some(to);
    }

    /// Closes all connections, and refuses new ones until the cable is mended.
    pub fn cut(&self) {
        self.inner.set(State::Cut);
        self.break_links();
    }

    /// Holds all bytes, like a cable that was pulled out.
    pub fn freeze(&self) {
        self.inner.set(State::Frozen);
    }

    /// Holds all bytes that go back to where the cable is entered.
    pub fn freeze_back(&self) {
        self.inner.set(State::BackFrozen);
    }

    /// Carries bytes and accepts connections again.
    pub fn mend(&self) {
        self.inner.set(State::Whole);
    }

    /// Closes all connections. New ones work.
    pub fn break_links(&self) {
        for stream in self.inner.open.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Closes all connections after this number of further bytes, in both directions together.
    pub fn break_after(&self, bytes: u64) {
        self.inner.fuse.store(bytes, Ordering::Release);
        self.inner.is_armed.store(true, Ordering::Release);
    }

    /// Bytes carried so far.
    #[must_use]
    pub fn carried(&self) -> u64 {
        self.inner.carried.load(Ordering::Relaxed)
    }

    /// Connections so far.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.inner.connections.load(Ordering::Relaxed)
    }
}

impl Inner {
    fn set(&self, state: State) {
        *self.state.lock() = state;
        self.changed.notify_all();
    }

    fn join(self: Arc<Self>, near: TcpStream) {
        let Some(to) = *self.to.lock() else { return };
        if *self.state.lock() == State::Cut {
            return;
        }
        self.connections.fetch_add(1, Ordering::Relaxed);
        let Ok(far) = TcpStream::connect(to) else { return };
        let copy = |stream: &TcpStream| stream.try_clone().unwrap();
        self.open.lock().extend([copy(&near), copy(&far)]);
        let (a, b) = ((copy(&near), copy(&far)), (far, near));
        let of_thread = Arc::clone(&self);
        std::thread::spawn(move || of_thread.carry(a.0, a.1, false));
        self.carry(b.0, b.1, true);
    }

    fn carry(&self, mut from: TcpStream, mut to: TcpStream, back: bool) {
        let mut bytes = vec![0; 32 << 10];
        loop {
            let read = match from.read(&mut bytes) {
                Ok(0) | Err(_) => break,
                Ok(read) => read,
            };
            let mut state = self.state.lock();
            while *state == State::Frozen || back && *state == State::BackFrozen {
                self.changed.wait(&mut state);
            }
            drop(state);
            let mut passed = read;
            if self.is_armed.load(Ordering::Acquire) {
                let left = self.fuse.load(Ordering::Acquire);
                passed = read.min(left as usize);
                self.fuse.store(left - passed as u64, Ordering::Release);
            }
            if to.write_all(&bytes[..passed]).is_err() {
                break;
            }
            self.carried.fetch_add(passed as u64, Ordering::Relaxed);
            if passed < read && self.is_armed.swap(false, Ordering::AcqRel) {
                for stream in self.open.lock().drain(..) {
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }
}
