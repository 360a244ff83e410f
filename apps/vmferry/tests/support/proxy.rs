//! A network between source and destination that fails on command, or at the worst moment: when
//! COMMIT is on its way. The proxy reads the control channels as they pass, and can hold a message
//! back while a test acts.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use vmferry_kit::relay::copy;
use vmferry_transport::TICKET_BYTES;

/// Bounds the waits: reaching it is a failure.
const PATIENCE: Duration = Duration::from_secs(60);

/// The sizes of a source's greeting and its answer.
const HELLO_BYTES: usize = 40;
const REPLY_BYTES: usize = 24;

/// The roles of a data channel and of a daemon's stream in a greeting.
const DATA: u8 = 2;
const STREAM: u8 = 6;

/// The first byte of a ticket, which may come before a greeting.
const TICKET: u8 = b'T';

/// Messages on a control channel, by their type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    Final = 5,
    Ready = 6,
    Commit = 9,
    Running = 10,
    Answer = 16,
}

/// A plain TCP proxy.
pub struct Proxy {
    pub address: String,
    shared: Arc<Shared>,
}

struct Shared {
    target: String,
    cut: AtomicBool,
    healed: AtomicBool,
    /// Whether COMMIT cuts the link.
    fragile: bool,
    open: Mutex<Vec<TcpStream>>,
    hold: Mutex<Hold>,
    changed: Condvar,
}

/// What happens to the first message of a kind.
struct Hold {
    message: Option<Message>,
    state: State,
    /// The number of answered queries of a source in doubt.
    answers: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Awaited,
    Held,
    Released,
    Lost,
}

impl Proxy {
    /// A proxy in front of a destination at `tcp:HOST:PORT` that cuts the link when COMMIT passes.
    pub fn before(address: &str) -> Self {
        Self::make(address, "127.0.0.1", true, None)
    }

    /// A proxy that holds back the first message of a kind, if any, and fails only on command. It
    /// listens at `host`, in the calling thread's network namespace.
    pub fn holding(address: &str, host: &str, message: Option<Message>) -> Self {
        Self::make(address, host, false, message)
    }

    fn make(address: &str, host: &str, fragile: bool, message: Option<Message>) -> Self {
        let listener = TcpListener::bind((host, 0)).unwrap();
        let shared = Arc::new(Shared {
            target: address.strip_prefix("tcp:").unwrap().to_owned(),
            cut: AtomicBool::new(false),
            healed: AtomicBool::new(false),
            fragile,
            open: Mutex::default(),
            hold: Mutex::new(Hold { message, state: State::Awaited, answers: 0 }),
            changed: Condvar::new(),
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

    /// Whether the link was cut, as COMMIT does.
    pub fn is_cut(&self) -> bool {
        self.shared.cut.load(Ordering::Acquire)
    }

    /// Cuts every connection and refuses new ones. A held message is lost.
    pub fn cut(&self) {
        self.shared.healed.store(false, Ordering::Release);
        self.shared.cut_all();
    }

    /// Accepts new connections again.
    pub fn heal(&self) {
        self.shared.healed.store(true, Ordering::Release);
    }

    /// Waits until the message to hold back is on its way.
    pub fn await_held(&self) {
        let hold = self.shared.hold.lock().unwrap();
        let (hold, _) = self
            .shared
            .changed
            .wait_timeout_while(hold, PATIENCE, |hold| hold.state == State::Awaited)
            .unwrap();
        assert_eq!(hold.state, State::Held, "{:?} never came", hold.message);
    }

    /// Waits until `count` queries of a source in doubt were answered and the answers have passed.
    pub fn await_answers(&self, count: u32) {
        let hold = self.shared.hold.lock().unwrap();
        let (hold, _) = self
            .shared
            .changed
            .wait_timeout_while(hold, PATIENCE, |hold| hold.answers < count)
            .unwrap();
        assert!(hold.answers >= count, "only {} answers came", hold.answers);
    }

    /// Forwards the held message.
    pub fn release(&self) {
        self.shared.decide(State::Released);
    }

    /// Drops the held message.
    pub fn lose(&self) {
        self.shared.decide(State::Lost);
    }
}

impl Shared {
    fn passes(&self) -> bool {
        !self.cut.load(Ordering::Acquire) || self.healed.load(Ordering::Acquire)
    }

    fn decide(&self, state: State) {
        let mut hold = self.hold.lock().unwrap();
        // A lost message stays lost.
        if hold.state == State::Held {
            hold.state = state;
        }
        self.changed.notify_all();
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
        let shared = Arc::clone(self);
        std::thread::spawn(move || shared.forward(source, destination));
    }

    /// Forwards the greetings, then bytes on a data channel and messages on the others.
    fn forward(self: &Arc<Self>, mut source: TcpStream, mut destination: TcpStream) {
        let mut first = [0];
        if !matches!(source.peek(&mut first), Ok(1)) {
            return;
        }
        if first[0] == TICKET {
            let mut ticket = [0; TICKET_BYTES];
            let read = source.read_exact(&mut ticket);
            if read.and_then(|()| destination.write_all(&ticket)).is_err() {
                return;
            }
        }
        let mut hello = [0; HELLO_BYTES];
        if source.read_exact(&mut hello).and_then(|()| destination.write_all(&hello)).is_err() {
            return;
        }
        let (back_from, back_to) = (destination.try_clone().unwrap(), source.try_clone().unwrap());
        if let DATA | STREAM = hello[12] {
            std::thread::spawn(move || copy(back_from, back_to));
            return copy(source, destination);
        }
        let shared = Arc::clone(self);
        std::thread::spawn(move || {
            let (mut from, mut to, mut reply) = (back_from, back_to, [0; REPLY_BYTES]);
            if from.read_exact(&mut reply).and_then(|()| to.write_all(&reply)).is_ok() {
                shared.messages(from, to);
            }
        });
        self.messages(source, destination);
    }

    /// Forwards messages one by one, and then the end of the stream.
    fn messages(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut header = [0; 12];
        while from.read_exact(&mut header).is_ok() {
            let length = u32::from_le_bytes(header[..4].try_into().unwrap());
            let mut body = vec![0; length as usize];
            if from.read_exact(&mut body).is_err() {
                break;
            }
            let is = |message: Message| u16::from(header[4]) == message as u16;
            if self.fragile && is(Message::Commit) && !self.healed.load(Ordering::Acquire) {
                return self.cut_all();
            }
            if !self.passes_hold(is) {
                continue;
            }
            if to.write_all(&header).and_then(|()| to.write_all(&body)).is_err() {
                break;
            }
            if is(Message::Answer) {
                self.hold.lock().unwrap().answers += 1;
                self.changed.notify_all();
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }

    /// Holds the message back if it is the selected one. Returns whether it may be forwarded then.
    fn passes_hold(&self, is: impl Fn(Message) -> bool) -> bool {
        let mut hold = self.hold.lock().unwrap();
        if hold.state != State::Awaited || !hold.message.is_some_and(is) {
            return true;
        }
        hold.state = State::Held;
        self.changed.notify_all();
        // A test that has failed decides nothing any more.
        let (hold, _) = self
            .changed
            .wait_timeout_while(hold, 3 * PATIENCE, |hold| hold.state == State::Held)
            .unwrap();
        hold.state == State::Released
    }

    fn cut_all(&self) {
        self.cut.store(true, Ordering::Release);
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let mut hold = self.hold.lock().unwrap();
        if hold.state == State::Held {
            hold.state = State::Lost;
        }
        self.changed.notify_all();
    }
}
