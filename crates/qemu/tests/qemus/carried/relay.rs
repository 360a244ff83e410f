//! Carries a guest without an engine: the bytes of one QEMU's sockets are written into the other's.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use vmferry::vmm::streamed::{Marks, OutgoingStream, StreamEvent, StreamedVm};
use vmferry::{DestinationVm, Landing, PrepareError, VmError};
use vmferry_qemu::{CarriedSource, Expected, QemuDestination};
use vmferry_qemu_lab::Qemu;

/// How long any step may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes that a slow link carries at a time.
const SLOW_PIECE: usize = 64 << 10;

/// Whether the streams flow, and how fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Free,
    /// With a pause after each piece.
    Slow(Duration),
    Stopped,
}

/// A gate that all streams go through.
#[derive(Clone)]
struct Gate(Arc<(Mutex<Flow>, Condvar)>);

impl Gate {
    fn new(flow: Flow) -> Self {
        Self(Arc::new((Mutex::new(flow), Condvar::new())))
    }

    fn set(&self, flow: Flow) {
        *self.0.0.lock().unwrap() = flow;
        self.0.1.notify_all();
    }

    fn pass(&self) -> Flow {
        let flow = self.0.0.lock().unwrap();
        *self.0.1.wait_while(flow, |flow| *flow == Flow::Stopped).unwrap()
    }
}

/// Blocks the thread that reports an event, so that no thread reads QEMU's events meanwhile.
#[derive(Clone, Default)]
struct News(Arc<(Mutex<Told>, Condvar)>);

#[derive(Default)]
struct Told {
    held: bool,
    waits: bool,
}

impl News {
    fn pass(&self) {
        let mut told = self.0.0.lock().unwrap();
        while told.held {
            told.waits = true;
            self.0.1.notify_all();
            told = self.0.1.wait(told).unwrap();
        }
        told.waits = false;
    }

    fn hold(&self) {
        let mut told = self.0.0.lock().unwrap();
        told.held = true;
        let waited = self.0.1.wait_timeout_while(told, PATIENCE, |told| !told.waits).unwrap();
        assert!(!waited.1.timed_out(), "no event is reported");
    }

    fn go_on(&self) {
        self.0.0.lock().unwrap().held = false;
        self.0.1.notify_all();
    }
}

/// A migration that is under way.
pub struct Carried<D = QemuDestination> {
    pub source: CarriedSource,
    pub destination: D,
    pub events: Receiver<StreamEvent>,
    /// The passes that the source reported: number and pages.
    pub passes: Vec<(u32, u64)>,
    gate: Gate,
    news: News,
    pumps: Vec<JoinHandle<u64>>,
    /// This process's ends, to cut the streams.
    ends: Vec<UnixStream>,
}

/// Starts to carry a guest.
pub fn begin(
    source: CarriedSource,
    to: &Qemu,
    flow: Flow,
    downtime: Duration,
) -> Result<Carried, PrepareError> {
    let destination = QemuDestination::attach(&to.qmp, Expected::default()).unwrap();
    begin_into(source, destination, flow, downtime)
}

/// The same, to any destination.
pub fn begin_into<D: DestinationVm>(
    mut source: CarriedSource,
    mut destination: D,
    flow: Flow,
    downtime: Duration,
) -> Result<Carried<D>, PrepareError> {
    let Landing::Streams(landing) = destination.prepare(&source.describe())? else {
        panic!("a carried guest lands in streams");
    };
    let (sender, events) = channel();
    let news = News::default();
    let held = news.clone();
    let tell = move |event| {
        // An error means that the test has seen enough.
        let _ = sender.send(event);
        held.pass();
    };
    let streams = source.begin(downtime, Box::new(tell)).unwrap();
    assert_eq!(streams.len(), usize::from(source.streams()));
    assert_eq!(streams.len(), landing.len());
    let gate = Gate::new(flow);
    let mut ends = Vec::new();
    let mut pumps = Vec::new();
    for (from, to) in streams.into_iter().zip(landing) {
        ends.push(from.socket.try_clone().unwrap());
        ends.push(to.try_clone().unwrap());
        let gate = gate.clone();
        pumps.push(std::thread::spawn(move || pump(from, to, &gate)));
    }
    Ok(Carried { source, destination, events, passes: Vec::new(), gate, news, pumps, ends })
}

/// Carries one stream to its end, and returns its length.
fn pump(from: OutgoingStream, mut to: UnixStream, gate: &Gate) -> u64 {
    let OutgoingStream { socket: mut from, mut recogniser } = from;
    let mut bytes = vec![0; 256 << 10];
    let (mut carried, mut marks, mut unseen) = (0, Marks::default(), Vec::new());
    loop {
        let flow = gate.pass();
        let most = if flow == Flow::Free { bytes.len() } else { SLOW_PIECE };
        let read = from.read(&mut bytes[..most]).unwrap_or(0);
        if read == 0 || to.write_all(&bytes[..read]).is_err() {
            return carried;
        }
        carried += read as u64;
        unseen.extend_from_slice(&bytes[..read]);
        let seen = recogniser.look(&unseen, &mut marks);
        unseen.drain(..seen);
        marks.clear();
        if let Flow::Slow(pause) = flow {
            // This delay simulates the slow link.
            std::thread::sleep(pause);
        }
    }
}

impl<D: DestinationVm> Carried<D> {
    pub fn flow(&self, flow: Flow) {
        self.gate.set(flow);
    }

    /// Blocks the thread that listens to QEMU at its next event. Returns once it is blocked.
    pub fn hold_news(&self) {
        self.news.hold();
    }

    pub fn let_news_go_on(&self) {
        self.news.go_on();
    }

    /// The next event that is not a pass.
    pub fn event(&mut self) -> StreamEvent {
        loop {
            match self.events.recv_timeout(PATIENCE).unwrap() {
                StreamEvent::Pass { number, pages, .. } => self.passes.push((number, pages)),
                event => return event,
            }
        }
    }

    pub fn wait_for_pass(&mut self) {
        match self.events.recv_timeout(PATIENCE).unwrap() {
            StreamEvent::Pass { number, pages, .. } => self.passes.push((number, pages)),
            event => panic!("no pass, but {event:?}"),
        }
    }

    pub fn wait_stopped(&mut self) {
        match self.event() {
            StreamEvent::Stopped { stood_still, .. } => assert!(stood_still < PATIENCE),
            event => panic!("not stopped, but {event:?}"),
        }
    }

    pub fn wait_completed(&mut self) {
        let event = self.event();
        assert!(matches!(event, StreamEvent::Completed), "not completed, but {event:?}");
    }

    /// Why QEMU has given its migration up.
    pub fn wait_failed(&mut self) -> VmError {
        match self.event() {
            StreamEvent::Failed(error) => error,
            event => panic!("not failed, but {event:?}"),
        }
    }

    /// Carries until the destination has loaded everything and is paused.
    pub fn carry_all(&mut self) -> Result<(), VmError> {
        self.wait_stopped();
        self.source.finish().unwrap();
        self.wait_completed();
        self.destination.load(&[])
    }

    /// Cuts all streams, as the death of a process would.
    pub fn cut(&mut self) {
        for end in self.ends.drain(..) {
            // A stream that is closed already can't be shut down.
            let _ = end.shutdown(Shutdown::Both);
        }
        self.gate.set(Flow::Free);
    }

    /// Gives the migration up: the source resumes, the destination is discarded.
    pub fn give_up(mut self) -> CarriedSource {
        vmferry::Resume::resume(&mut self.source).unwrap();
        assert!(self.source.is_running());
        self.destination.discard();
        self.cut();
        self.join();
        self.source
    }

    /// Waits for all pumps, and returns the bytes that they carried.
    pub fn join(&mut self) -> u64 {
        self.pumps.drain(..).map(|pump| pump.join().unwrap()).sum()
    }
}

/// Carries a guest completely and quits the QEMU that it has left.
pub fn hop(from: &mut Qemu, to: &Qemu, channels: u8) -> Vec<(u32, u64)> {
    let source = CarriedSource::attach(&from.qmp, channels).unwrap();
    hop_of(source, from, to)
}

/// The same, with a source that is attached already.
pub fn hop_of(source: CarriedSource, from: &mut Qemu, to: &Qemu) -> Vec<(u32, u64)> {
    let mut carried = begin(source, to, Flow::Free, Duration::from_millis(300)).unwrap();
    let loaded = carried.carry_all();
    assert!(loaded.is_ok(), "{loaded:?}");
    assert!(carried.join() > 0);
    carried.destination.run().unwrap();
    carried.source.quit().unwrap();
    from.child.wait().unwrap();
    carried.passes
}
