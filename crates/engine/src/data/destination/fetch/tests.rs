//! Guests that run while their pages are fetched: real faults, over real sockets.

mod huge;

use std::io::{Read, Write};
use std::sync::OnceLock;
use std::time::Duration;

use vmferry_codec::{Choice, Compressors, EncodedFrame, HotPages, PageHashes};
use vmferry_faults::{FaultRange, FaultRanges};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageRun, PageSet, SlotId, SlotLayout};
use vmferry_transport::{Address, Channel, Dialer, Listener, RateLimiter};
use vmferry_wire::FetchLanes as Announced;

use super::counts::FetchCounts;
use super::lanes::FetchLanes;
use super::*;
use crate::config::compression::CompressionConfig;
use crate::data::source::chooser::Chooser;
use crate::data::source::page_encoder::PageEncoder;
use crate::data::source::page_server::{BackgroundWay, FetchLaneContext, PageServer, Served};
use crate::data::source::plan::PageBatch;
use crate::link::DataChannel;
use crate::machine::source::io::Input as SourceInput;

/// Pages of the slot. Every third is missing, every third was placed before, and every third was
/// never populated at the source.
const PAGES: u64 = 3 * 512;
const SLOT: SlotId = SlotId(0);
/// The fetch lane for faults.
const FAULTS: u8 = 1;
/// The fetch lane in the background.
const BACKGROUND: u8 = 2;
const PAGE: u64 = PAGE_SIZE as u64;
const PATIENCE: Duration = Duration::from_secs(60);

fn is_missing(page: u64) -> bool {
    page.is_multiple_of(3)
}

/// Both sides after the switchover.
struct Scene {
    source: GuestMemory,
    memory: GuestMemory,
    lanes: FetchLanes,
    results: crossbeam_channel::Receiver<Input>,
    served: Arc<OnceLock<Served>>,
}

fn page_run(first: u64) -> PageRun {
    PageRun { slot: SLOT, first, pages: 1 }
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
    /// After the destination has loaded the state.
    fn new(kind: MemoryKind) -> Self {
        let scene = Self::loading(kind);
        assert!(scene.missing().end_load());
        scene
    }

    /// While the destination loads the state.
    fn loading(kind: MemoryKind) -> Self {
        let (source, destination) = (memory(MemoryKind::Memfd), memory(kind));
        let mut missing = PageSet::for_memory(&destination);
        for page in (0..PAGES).filter(|page| page % 3 != 2) {
            source.write_at(page * PAGE, &content(page)).unwrap();
            if is_missing(page) {
                missing.bitmap_mut(SLOT).set(page);
                // An outdated version, which must never be seen again.
                destination.write_at(page * PAGE, &[0xbd; PAGE_SIZE]).unwrap();
                destination.discard(page_run(page)).unwrap();
            } else {
                destination.write_at(page * PAGE, &content(page)).unwrap();
            }
        }
        let hashes = Arc::new(PageHashes::for_memory(&destination));
        let missing = MissingPages::register(destination.clone(), hashes, missing, |all| {
            // As khugepaged does with the holes of a huge page until the memory is registered.
            let mut pages = (0..PAGES).filter(|page| page % 3 != 2 && is_missing(*page));
            all.write_at(pages.next().unwrap() * PAGE, &[0; PAGE_SIZE]).unwrap();
            // And as a thread does that reads one.
            all.read_at(pages.next().unwrap() * PAGE, &mut [0]).unwrap();
            Ok(FaultRanges::register(all, 2)?)
        });
        let (sender, results) = crossbeam_channel::unbounded();
        let mut lanes = FetchLanes::new(FAULTS, Announced { faults: 1, background: 1 });
        lanes.start(missing.unwrap(), sender, CpuMeter::default()).unwrap();
        let unsent = PageSet::for_memory(&source).into();
        let served = Arc::new(OnceLock::from(Served { round: 9, zero: None, unsent }));
        Self { source, memory: destination, lanes, results, served }
    }

    fn missing(&self) -> &MissingPages {
        self.lanes.missing().unwrap()
    }

    /// Serves a lane on a new connection. Also returns what its server reports.
    fn serve(
        &self,
        lane: u8,
        attempt: u64,
    ) -> (PageServer, crossbeam_channel::Receiver<SourceInput>) {
        let (from, to) = connected();
        let (results, reported) = crossbeam_channel::unbounded();
        let chooser = || Arc::new(Chooser::new(&CompressionConfig::default(), 1, None));
        let way = || BackgroundWay { limiter: RateLimiter::new(None), chooser: chooser() };
        let context = FetchLaneContext {
            lane,
            attempt,
            served: Arc::clone(&self.served),
            background: (lane == BACKGROUND).then(way),
            results,
            cpu: CpuMeter::default(),
            sent: Arc::default(),
        };
        let server = PageServer::start(from, self.encoder(), context).unwrap();
        assert!(self.lanes.expect(lane, attempt));
        self.lanes.join(lane, to).unwrap();
        (server, reported)
    }

    /// Makes frames of the source's pages.
    fn encoder(&self) -> PageEncoder {
        let hashes = Arc::new(PageHashes::for_memory(&self.source));
        let hot = Arc::new(HotPages::new(0));
        PageEncoder::new(self.source.clone(), hashes, Compressors::default(), hot)
    }

    /// A vCPU: reads pages in random order, compares each with the source's, and writes it. Returns
    /// whether all were right.
    fn run_guest(&self, seed: u64) -> bool {
        let mut pages: Vec<u64> = (0..PAGES).filter(|page| page % 2 == seed % 2).collect();
        fastrand::Rng::with_seed(seed).shuffle(&mut pages);
        let (mut found, mut right) = ([0; PAGE_SIZE], true);
        for page in &pages {
            self.memory.read_at(page * PAGE, &mut found).unwrap();
            right &= found == content(*page);
            self.memory.write_at(page * PAGE, &page.to_le_bytes()).unwrap();
        }
        // No late copy has overwritten what the guest has written.
        for page in &pages {
            self.memory.read_at(page * PAGE, &mut found).unwrap();
            let mut written = content(*page);
            written[..8].copy_from_slice(&page.to_le_bytes());
            right &= found == written;
        }
        right
    }

    /// Runs two vCPUs, and `meanwhile` beside them. Returns whether both have seen right pages.
    fn run_vcpus(&self, meanwhile: impl FnOnce()) -> bool {
        std::thread::scope(|scope| {
            let vcpus = [0, 1].map(|seed| scope.spawn(move || self.run_guest(seed)));
            meanwhile();
            vcpus.map(|vcpu| vcpu.join().unwrap()) == [true, true]
        })
    }

    /// Waits for the last page.
    fn await_all(&self) {
        loop {
            match self.results.recv_timeout(PATIENCE).expect("a page is missing") {
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

/// Two vCPUs run while pages arrive by fault, and with `background` in the background too. Returns
/// what has happened.
fn fetched(kind: MemoryKind, background: bool) -> FetchCounts {
    let scene = Scene::new(kind);
    let servers = [scene.serve(FAULTS, 0), scene.serve(BACKGROUND, 0)];
    let right = scene.run_vcpus(|| {
        if background {
            scene.lanes.begin_background();
        }
    });
    assert!(right, "the guest has seen a wrong page");
    scene.await_all();
    let missing = Arc::clone(scene.lanes.missing().unwrap());
    // A fault is counted after its thread was woken. No thread of the lanes is left after this.
    drop((servers, scene));
    assert_eq!(missing.left(), 0);
    let (counts, waited) = missing.counts();
    // Every page is touched, and nothing is known of those that were never populated. Each huge
    // page has others.
    let unknown = if kind == MemoryKind::Hugetlb { 0 } else { PAGES / 3 };
    assert_eq!(counts.zero_faults, unknown);
    assert_eq!(counts.fault_pages + counts.background_pages, PAGES / 3);
    assert_eq!(counts.fault_pages > 0, waited.max_us() > 0, "{counts:?}, {waited:?}");
    counts
}

#[test]
fn guest_runs_on_pages_that_it_fetches_from_shared_memory() {
    assert_eq!(fetched(MemoryKind::Memfd, false).fault_pages, PAGES / 3);
}

#[test]
fn guest_runs_on_pages_that_it_fetches_from_private_memory() {
    assert_eq!(fetched(MemoryKind::Private, false).fault_pages, PAGES / 3);
}

#[test]
fn faults_and_background_pages_may_race() {
    let all = [(); 10].map(|()| fetched(MemoryKind::Memfd, true));
    // Either may be first with every page, but not each time.
    assert!(all.iter().any(|counts| counts.fault_pages > 0), "{all:?}");
    assert!(all.iter().any(|counts| counts.background_pages > 0), "{all:?}");
}

#[test]
fn background_alone_fetches_everything() {
    background_fetches_all(MemoryKind::Memfd);
}

fn background_fetches_all(kind: MemoryKind) {
    let scene = Scene::new(kind);
    let _server = scene.serve(BACKGROUND, 0);
    scene.lanes.begin_background();
    scene.await_all();
    let (counts, _) = scene.missing().counts();
    assert_eq!((counts.background_pages, counts.again_pages), (PAGES / 3, 0));
    assert!(scene.run_vcpus(|| {}), "the guest has seen a wrong page");
}

/// The control for the tests above: one wrong byte in one page at the source is seen.
#[test]
fn wrong_page_is_seen_by_the_guest() {
    wrong_page_is_seen(MemoryKind::Memfd);
}

fn wrong_page_is_seen(kind: MemoryKind) {
    let scene = Scene::new(kind);
    scene.source.write_at(300 * PAGE + 4000, &[content(300)[4000] ^ 1]).unwrap();
    let _server = scene.serve(FAULTS, 0);
    assert!(!scene.run_guest(0));
    assert!(scene.run_guest(1));
}

/// The links break under a waiting guest: it waits, and runs on when the requests are repeated on
/// other channels.
#[test]
fn lost_channels_delay_the_guest_only() {
    lost_channels_delay(MemoryKind::Memfd);
}

fn lost_channels_delay(kind: MemoryKind) {
    let scene = Scene::new(kind);
    scene.lanes.begin_background();
    let right = scene.run_vcpus(|| {
        // There is no channel yet, and requests wait for one.
        while scene.missing().awaited().is_empty() {
            std::thread::yield_now();
        }
        for attempt in 0..7 {
            let before = scene.missing().left();
            let servers = [scene.serve(FAULTS, attempt), scene.serve(BACKGROUND, attempt)];
            while scene.missing().left() > before.saturating_sub(32) {
                std::thread::yield_now();
            }
            drop(servers);
            scene.lanes.lost();
        }
        let servers = [scene.serve(FAULTS, 7), scene.serve(BACKGROUND, 7)];
        scene.await_all();
        drop(servers);
    });
    assert!(right, "the guest has seen a wrong page");
}

/// A VMM that waits for a page while it loads the state must not wait forever if the source is
/// lost. Its guest never runs.
#[test]
fn lost_channel_ends_a_load_that_waits() {
    let scene = Scene::loading(MemoryKind::Memfd);
    drop(scene.serve(FAULTS, 0));
    let mut found = [0xbd; PAGE_SIZE];
    scene.memory.read_at(0, &mut found).unwrap();
    assert_eq!(found, [0; PAGE_SIZE], "the load goes on");
    assert!(!scene.missing().end_load(), "and does not count");
}

#[test]
fn lost_channel_after_the_load_gives_nothing_up() {
    let scene = Scene::new(MemoryKind::Memfd);
    drop(scene.serve(FAULTS, 0));
    assert!(matches!(scene.results.recv_timeout(PATIENCE), Ok(Input::LaneLost { .. })));
    let right = scene.run_vcpus(|| {
        let servers = [scene.serve(FAULTS, 1), scene.serve(BACKGROUND, 1)];
        scene.lanes.begin_background();
        scene.await_all();
        drop(servers);
    });
    assert!(right, "the guest has seen a wrong page");
}

/// A source that answers another request, as if this one had been damaged on its way. The page
/// would never be requested again on this channel.
#[test]
fn answer_without_the_requested_page_ends_the_channel() {
    let answered = |page| {
        let scene = Scene::new(MemoryKind::Memfd);
        let (mut source, channel) = connected();
        assert!(scene.lanes.expect(FAULTS, 0));
        scene.lanes.join(FAULTS, channel).unwrap();
        scene.lanes.request(0, &[page_run(0)]);
        source.reader.read_exact(&mut [0; vmferry_wire::PAGE_REQUEST_BYTES]).unwrap();
        let batch = PageBatch::of_run(9, page_run(page));
        let mut frame = EncodedFrame::new();
        scene.encoder().encode(FAULTS, &batch, &mut frame, Choice::default()).unwrap();
        frame.set_sequence(1);
        frame.write_to(&mut source.writer).unwrap();
        source.writer.flush().unwrap();
        while scene.missing().has_any(page_run(page)) {
            std::thread::yield_now();
        }
        drop(source);
        scene.results.recv_timeout(PATIENCE).unwrap()
    };
    assert!(matches!(answered(0), Input::LaneLost { .. }), "this is the page");
    let Input::Failed(error) = answered(3) else { panic!("page 0 is missing") };
    assert!(error.to_string().contains("the answer to a request for a page lacks it"), "{error}");
}

#[test]
fn request_for_pages_that_do_not_exist_ends_the_lane_with_an_error() {
    let scene = Scene::new(MemoryKind::Memfd);
    let error = error_of_request(&scene, PAGES);
    assert!(error.contains("lane 1") && error.contains("pages that do not exist"), "{error}");
}

#[test]
fn request_before_final_ends_the_lane_with_an_error() {
    let mut scene = Scene::new(MemoryKind::Memfd);
    scene.served = Arc::default();
    let error = error_of_request(&scene, 0);
    assert!(error.contains("lane 1") && error.contains("before FINAL"), "{error}");
}

fn error_of_request(scene: &Scene, page: u64) -> String {
    let (_server, reported) = scene.serve(FAULTS, 0);
    scene.lanes.request(0, &[page_run(page)]);
    match reported.recv_timeout(PATIENCE).unwrap() {
        SourceInput::Failed(error) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// The descriptors of a VMM in a process of its own, which outlives this one's.
fn kept_by_the_vmm(missing: &MissingPages) -> FaultRanges {
    let ranges = missing.ranges().ranges().iter().map(|range| FaultRange {
        slot: range.slot,
        first_page: range.first_page,
        addresses: range.addresses.clone(),
        share: range.share,
        descriptor: range.descriptor.try_clone().unwrap(),
    });
    FaultRanges::of(ranges.collect()).unwrap()
}

/// The first byte of a missing page, as a thread reads it while a page of sevens is placed if the
/// thread waits.
fn read_after_drop(scene: Scene) -> u8 {
    let (kept, memory) = (kept_by_the_vmm(scene.missing()), scene.memory.clone());
    drop(scene);
    let reader = std::thread::spawn(move || {
        let mut byte = [0xff];
        memory.read_at(0, &mut byte).unwrap();
        byte[0]
    });
    let mut faults = Vec::new();
    while faults.is_empty() && !reader.is_finished() {
        kept.ranges()[0].descriptor.read_faults(&mut faults).unwrap();
        // Its descriptor does not block, and the reader may end without a fault.
        std::thread::sleep(Duration::from_millis(1));
    }
    // Fails where no registration is left.
    let _ = kept.place(page_run(0), &[7; PAGE_SIZE], vmferry_faults::Wake::Now);
    reader.join().unwrap()
}

/// As when the promise to run the guest may be on disk, and the next process has to find out.
#[test]
fn pages_of_a_guest_that_may_run_never_read_as_zeros() {
    assert_eq!(read_after_drop(Scene::new(MemoryKind::Memfd)), 7);
}

#[test]
fn guest_whose_state_was_not_loaded_waits_for_nothing() {
    assert_eq!(read_after_drop(Scene::loading(MemoryKind::Memfd)), 0);
}

#[test]
fn discarded_guest_waits_for_nothing() {
    let scene = Scene::new(MemoryKind::Memfd);
    scene.lanes.discard();
    assert_eq!(read_after_drop(scene), 0);
}
