//! Guests that run while their pages are fetched: real faults, over a real socket.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vmferry_codec::{Choice, Compressors, EncodedFrame, HotPages, PageHashes};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageSet, SlotLayout};
use vmferry_transport::{Address, Channel, Dialer, Listener};

use super::*;
use crate::data::source::page_encoder::PageEncoder;
use crate::data::source::page_server::{FaultLaneContext, PageServer};
use crate::data::source::plan::PageBatch;

/// Pages of the slot. Every third is missing, every third was placed before, and every third was
/// never populated at the source.
const PAGES: u64 = 3 * 512;
const SLOT: SlotId = SlotId(0);
/// The number of the fault lane.
const LANE: u8 = 1;
const PAGE: u64 = PAGE_SIZE as u64;

fn is_missing(page: u64) -> bool {
    page.is_multiple_of(3)
}

/// Both sides after the switchover.
struct Scene {
    source: GuestMemory,
    missing: Arc<MissingPages>,
    context: FaultContext,
    results: crossbeam_channel::Receiver<Input>,
}

fn memory(kind: MemoryKind) -> GuestMemory {
    let layout = [SlotLayout { slot: SLOT, gpa: 0, pages: PAGES }];
    GuestMemory::allocate(&layout, kind).unwrap()
}

/// A page's content at the source.
fn content(page: u64) -> [u8; PAGE_SIZE] {
    let mut content = [0; PAGE_SIZE];
    if page % 3 != 2 {
        fastrand::Rng::with_seed(page).fill(&mut content);
    }
    content
}

impl Scene {
    fn new(kind: MemoryKind) -> Self {
        let (source, destination) = (memory(MemoryKind::Memfd), memory(kind));
        let mut missing = PageSet::for_memory(&destination);
        for page in (0..PAGES).filter(|page| page % 3 != 2) {
            source.write_at(page * PAGE, &content(page)).unwrap();
            if is_missing(page) {
                missing.bitmap_mut(SLOT).set(page);
                // An outdated version, which must never be seen again.
                destination.write_at(page * PAGE, &[0xbd; PAGE_SIZE]).unwrap();
            } else {
                destination.write_at(page * PAGE, &content(page)).unwrap();
            }
        }
        let hashes = Arc::new(PageHashes::for_memory(&destination));
        let missing = MissingPages::register(destination, hashes, missing, 2).unwrap();
        let (sender, results) = crossbeam_channel::unbounded();
        let missing = Arc::new(missing);
        let cpu = CpuMeter::default();
        let context = FaultContext { missing: Arc::clone(&missing), results: sender, cpu };
        Self { source, missing, context, results }
    }

    fn encoder(&self) -> PageEncoder {
        let hashes = Arc::new(PageHashes::for_memory(&self.source));
        let hot = Arc::new(HotPages::new(0));
        PageEncoder::new(self.source.clone(), hashes, Compressors::default(), hot)
    }

    /// Serves one connection, and returns both of its ends.
    fn connect(&self, attempt: u64) -> (PageServer, FaultLane) {
        let (from, to) = connected();
        let (results, _) = crossbeam_channel::unbounded();
        let context = FaultLaneContext {
            lane: LANE,
            attempt,
            round: 9,
            results,
            cpu: CpuMeter::default(),
            sent: Arc::default(),
        };
        let server = PageServer::start(from, self.encoder(), context).unwrap();
        let lane = FaultLane::start(LANE, attempt, to, self.context.clone()).unwrap();
        (server, lane)
    }

    /// Places all missing pages in the background, in frames of several pages.
    fn send_background(&self) {
        let (mut encoder, mut frame) = (self.encoder(), EncodedFrame::new());
        let (mut received, mut bytes) = (Frame::new(), Vec::new());
        let mut decoder = Decoder::default();
        for (sequence, first) in (1..).zip((0..PAGES).step_by(48)) {
            let run = PageRun { slot: SLOT, first, pages: 48.min(PAGES - first) };
            encoder.encode(0, &PageBatch::of_run(9, run), &mut frame, Choice::default()).unwrap();
            frame.set_sequence(sequence);
            bytes.clear();
            frame.write_to(&mut bytes).unwrap();
            received.read_from(&mut bytes.as_slice()).unwrap();
            let fetched = place(&self.missing, &mut decoder, &received, (0, 0)).unwrap();
            if fetched.is_some_and(|fetched| fetched.is_complete) {
                self.context.results.send(Input::Fetched).unwrap();
            }
        }
    }

    /// A vCPU: reads pages in random order, compares each with the source's, and writes it. Returns
    /// whether all were right.
    fn run_guest(&self, seed: u64) -> bool {
        let mut pages: Vec<u64> = (0..PAGES).filter(|page| page % 2 == seed % 2).collect();
        fastrand::Rng::with_seed(seed).shuffle(&mut pages);
        let (mut found, mut right) = ([0; PAGE_SIZE], true);
        for page in &pages {
            self.missing.memory().read_at(page * PAGE, &mut found).unwrap();
            right &= found == content(*page);
            self.missing.memory().write_at(page * PAGE, &page.to_le_bytes()).unwrap();
        }
        // No late copy has overwritten what the guest has written.
        for page in &pages {
            self.missing.memory().read_at(page * PAGE, &mut found).unwrap();
            let mut written = content(*page);
            written[..8].copy_from_slice(&page.to_le_bytes());
            right &= found == written;
        }
        right
    }

    /// Waits for the last page.
    fn await_all(&self) {
        loop {
            match self.results.recv_timeout(Duration::from_secs(60)).expect("a page is missing") {
                Input::Fetched => return,
                Input::LaneLost { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

fn connected() -> (DataChannel, DataChannel) {
    let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let listener = Listener::bind(&address, None).unwrap();
    let dialer = Dialer::new(listener.local_address().clone(), None);
    let dialed = std::thread::spawn(move || dialer.connect().unwrap());
    let pending = listener.accept().unwrap().unwrap();
    let accepted = pending.handshake(Duration::from_secs(10)).unwrap();
    let data = |channel: Channel| {
        let closer = channel.closer();
        let (reader, writer) = channel.split();
        DataChannel { reader, writer, closer }
    };
    (data(dialed.join().unwrap()), data(accepted))
}

/// Two vCPUs run while pages arrive by fault, and with `background` in the background too.
fn fetched(kind: MemoryKind, background: bool) {
    let scene = Scene::new(kind);
    let (_server, lane) = scene.connect(0);
    let lane = Arc::new(lane);
    let asking = Arc::clone(&lane);
    let handlers = FaultHandlers::start(&scene.context, move |_, pages| {
        asking.request(pages.iter().copied());
    })
    .unwrap();
    std::thread::scope(|scope| {
        let vcpus = [0, 1].map(|seed| {
            let scene = &scene;
            scope.spawn(move || scene.run_guest(seed))
        });
        if background {
            scene.send_background();
        }
        for vcpu in vcpus {
            assert!(vcpu.join().unwrap(), "the guest has seen a wrong page");
        }
    });
    scene.await_all();
    assert_eq!(scene.missing.left(), 0);
    let counters = scene.missing.counters();
    let zero = counters.zero_faults.load(Ordering::Relaxed);
    // Every page is touched, and nothing is known of those that were never populated.
    assert_eq!(zero, PAGES / 3);
    assert!(background || counters.faults.load(Ordering::Relaxed) >= zero + PAGES / 3);
    drop(handlers);
    scene.missing.finish().unwrap();
}

#[test]
fn guest_runs_on_pages_that_it_fetches_from_shared_memory() {
    fetched(MemoryKind::Memfd, false);
}

#[test]
fn guest_runs_on_pages_that_it_fetches_from_private_memory() {
    fetched(MemoryKind::Private, false);
}

#[test]
fn faults_and_background_pages_may_race() {
    for _ in 0..10 {
        fetched(MemoryKind::Memfd, true);
    }
}

/// The control for the tests above: one wrong byte in one page at the source is seen.
#[test]
fn wrong_page_is_seen_by_the_guest() {
    let scene = Scene::new(MemoryKind::Memfd);
    scene.source.write_at(300 * PAGE + 4000, &[content(300)[4000] ^ 1]).unwrap();
    let (_server, lane) = scene.connect(0);
    let lane = Arc::new(lane);
    let _handlers = FaultHandlers::start(&scene.context, move |_, pages| {
        lane.request(pages.iter().copied());
    })
    .unwrap();
    assert!(!scene.run_guest(0));
    assert!(scene.run_guest(1));
}

/// The link breaks under a waiting guest: it waits, and runs on when the requests are repeated on
/// another channel.
#[test]
fn lost_channel_delays_the_guest_only() {
    let scene = Scene::new(MemoryKind::Memfd);
    let lanes: Arc<Mutex<Option<FaultLane>>> = Arc::default();
    let asking = Arc::clone(&lanes);
    let asked = Arc::new(AtomicBool::new(false));
    let was_asked = Arc::clone(&asked);
    let _handlers = FaultHandlers::start(&scene.context, move |_, pages| {
        was_asked.store(true, Ordering::Release);
        if let Some(lane) = &*asking.lock() {
            lane.request(pages.iter().copied());
        }
    })
    .unwrap();
    std::thread::scope(|scope| {
        let vcpus = [0, 1].map(|seed| {
            let scene = &scene;
            scope.spawn(move || scene.run_guest(seed))
        });
        // There is no channel yet: the first requests are lost.
        while !asked.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let connect = |attempt| {
            let (server, lane) = scene.connect(attempt);
            // Pages that are requested from now on are requested here, and those before again.
            let mut present = lanes.lock();
            scene.missing.outstanding(|slot, page| lane.request([(slot, page)]));
            *present = Some(lane);
            server
        };
        for attempt in 0..7 {
            let before = scene.missing.left();
            let server = connect(attempt);
            while scene.missing.left() > before.saturating_sub(32) {
                std::thread::yield_now();
            }
            drop(server);
            drop(lanes.lock().take());
        }
        let _server = connect(7);
        for vcpu in vcpus {
            assert!(vcpu.join().unwrap(), "the guest has seen a wrong page");
        }
    });
    scene.await_all();
}

#[test]
fn request_for_pages_that_do_not_exist_ends_the_lane_with_an_error() {
    let scene = Scene::new(MemoryKind::Memfd);
    let (from, to) = connected();
    let (results, failed) = crossbeam_channel::unbounded();
    let context = FaultLaneContext {
        lane: LANE,
        attempt: 0,
        round: 9,
        results,
        cpu: CpuMeter::default(),
        sent: Arc::default(),
    };
    let _server = PageServer::start(from, scene.encoder(), context).unwrap();
    let lane = FaultLane::start(LANE, 0, to, scene.context.clone()).unwrap();
    lane.request([(SLOT, PAGES)]);
    let error = match failed.recv_timeout(Duration::from_secs(10)).unwrap() {
        crate::machine::source::io::Input::Failed(error) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(error.contains("lane 1") && error.contains("pages that do not exist"), "{error}");
}
