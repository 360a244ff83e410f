//! A link between source and destination that can be cut: connections end, and none is accepted
//! until the cut is over.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmferry_kit::relay::{UnixAcceptor, copy};
use vmferry_transport::Address;
use vmferry_wire::{FRAME_HEADER_BYTES, FrameHeader, HELLO_BYTES, HELLO_REPLY_BYTES, Hello, Role};

/// Which channels are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channels {
    /// All of them.
    All,
    /// One lane's.
    Lane(u8),
    /// The control channel.
    Control,
}

impl Channels {
    fn includes(self, hello: &Hello) -> bool {
        match self {
            Self::All => true,
            Self::Lane(lane) => hello.role == Role::Data && hello.lane == lane,
            Self::Control => matches!(hello.role, Role::Control | Role::Resume),
        }
    }
}

/// A scheduled cut.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// The channels that are cut.
    pub channels: Channels,
    /// The round in which it happens, after half of a frame has passed.
    pub round: u32,
    /// Its duration.
    pub lasts: Duration,
}

#[derive(Default)]
struct State {
    /// Cuts that have not happened yet.
    cuts: Vec<Cut>,
    /// Cuts in progress.
    down: Vec<(Channels, Instant)>,
    /// How many control channels were reestablished and answered.
    resumed: usize,
    /// Connections with their greetings.
    open: Vec<(Hello, UnixStream, UnixStream)>,
    /// Lanes from this number on carry no frames.
    first_tunnel: Option<u8>,
}

impl State {
    fn cut(&mut self, cut: &Cut) {
        self.down.push((cut.channels, Instant::now() + cut.lasts));
        self.open.retain(|(hello, source, destination)| {
            let hit = cut.channels.includes(hello);
            if hit {
                let _ = source.shutdown(Shutdown::Both);
                let _ = destination.shutdown(Shutdown::Both);
            }
            !hit
        });
    }
}

/// The link. After a drop it accepts no more connections.
pub struct Cutter {
    acceptor: UnixAcceptor,
    state: Arc<Mutex<State>>,
}

impl Cutter {
    /// Listens at `path` and forwards to `to`, a Unix socket.
    pub fn start(path: PathBuf, to: &Address, cuts: Vec<Cut>) -> Self {
        let Address::Unix(to) = to.clone() else { panic!("cuts Unix sockets") };
        let state = Arc::new(Mutex::new(State { cuts, ..State::default() }));
        let shared = Arc::clone(&state);
        let acceptor = UnixAcceptor::start(path, move |source| connect(source, &to, &shared));
        Self { acceptor, state }
    }

    pub fn address(&self) -> Address {
        Address::Unix(self.acceptor.path().to_owned())
    }

    /// Lanes from this number on are tunnels, in which nothing is read.
    pub fn with_tunnels_from(self, lane: u8) -> Self {
        self.state.lock().unwrap().first_tunnel = Some(lane);
        self
    }

    /// Cuts now.
    pub fn cut_now(&self, channels: Channels, lasts: Duration) {
        self.state.lock().unwrap().cut(&Cut { channels, round: 0, lasts });
    }

    /// Schedules another cut.
    pub fn cut(&self, cut: Cut) {
        self.state.lock().unwrap().cuts.push(cut);
    }

    /// The number of cuts that have not happened yet.
    pub fn left(&self) -> usize {
        self.state.lock().unwrap().cuts.len()
    }
}

fn connect(mut source: UnixStream, to: &Path, state: &Mutex<State>) {
    let mut bytes = [0; HELLO_BYTES];
    if source.read_exact(&mut bytes).is_err() {
        return;
    }
    let hello = Hello::parse(&bytes).expect("the source greets");
    let Ok(mut destination) = UnixStream::connect(to) else { return };
    {
        let mut state = state.lock().unwrap();
        let now = Instant::now();
        state.down.retain(|(_, until)| now < *until);
        if state.down.iter().any(|(channels, _)| channels.includes(&hello)) {
            return;
        }
        let ends = (source.try_clone().unwrap(), destination.try_clone().unwrap());
        state.open.push((hello, ends.0, ends.1));
    }
    if destination.write_all(&bytes).is_err() {
        return;
    }
    let mut reply = [0; HELLO_REPLY_BYTES];
    let answered = destination.read_exact(&mut reply).and_then(|()| source.write_all(&reply));
    if answered.is_err() {
        return;
    }
    state.lock().unwrap().resumed += usize::from(hello.role == Role::Resume);
    let (from, into) = (destination.try_clone().unwrap(), source.try_clone().unwrap());
    std::thread::spawn(move || copy(from, into));
    let first_tunnel = state.lock().unwrap().first_tunnel;
    match hello.role {
        Role::Data if first_tunnel.is_none_or(|first| hello.lane < first) => {
            forward(&hello, source, destination, state)
        }
        _ => copy(source, destination),
    }
}

/// Forwards frames until a cut is due. Half of the frame at which it happens arrives.
fn forward(hello: &Hello, mut from: UnixStream, mut to: UnixStream, shared: &Mutex<State>) {
    loop {
        let mut bytes = vec![0; FRAME_HEADER_BYTES];
        if from.read_exact(&mut bytes).is_err() {
            break;
        }
        let header = FrameHeader::parse(bytes[..].try_into().unwrap()).expect("frames");
        bytes.resize(bytes.len() + header.table_bytes() + header.payload_bytes as usize, 0);
        if from.read_exact(&mut bytes[FRAME_HEADER_BYTES..]).is_err() {
            break;
        }
        let mut state = shared.lock().unwrap();
        let due = state.cuts.iter().position(|cut| {
            let here = cut.channels.includes(hello) || cut.channels == Channels::Control;
            here && cut.round == header.round
        });
        if let Some(index) = due {
            let cut = state.cuts.remove(index);
            let half = bytes.len() / 2;
            let _ = to.write_all(&bytes[..half]);
            bytes.drain(..half);
            state.cut(&cut);
            if cut.channels == Channels::Control {
                // This round does not arrive before the control channel is reestablished.
                let before = state.resumed;
                drop(state);
                while shared.lock().unwrap().resumed == before {
                    std::thread::yield_now();
                }
            } else {
                break;
            }
        } else {
            drop(state);
        }
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
