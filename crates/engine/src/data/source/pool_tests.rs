//! Frames for which no compressor is free.

use std::sync::Condvar;

use vmferry_codec::{Compress, CompressError, Compressors, HotPages, Method, PageHashes};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageSet, SlotId, SlotLayout};

use super::*;
use crate::config::compression::{CompressionConfig, CompressionWay, WhenBusy};
use crate::data::source::chooser::Why;
use crate::data::source::outgoing::Next;

/// Two lanes' stripes.
const PAGES: u64 = 1024;

/// Blocks compressors until it is opened.
#[derive(Default)]
struct Gate {
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut state = lock(&self.state);
        state.0 += 1;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |(_, open)| !*open).unwrap());
    }

    fn open(&self) {
        lock(&self.state).1 = true;
        self.changed.notify_all();
    }

    fn await_held(&self, compressors: usize) {
        let state = lock(&self.state);
        drop(self.changed.wait_while(state, |(held, _)| *held < compressors).unwrap());
    }

    fn compressors(self: &Arc<Self>) -> Compressors {
        struct Gated(Arc<Gate>, Box<dyn Compress>);
        impl Compress for Gated {
            fn compress(
                &mut self,
                from: &[u8],
                to: &mut [u8],
            ) -> Result<Option<usize>, CompressError> {
                self.0.pass();
                self.1.compress(from, to)
            }
        }
        let gate = Arc::clone(self);
        Compressors::new(move |method| {
            Ok(Box::new(Gated(Arc::clone(&gate), Compressors::default().make(method)?)))
        })
    }
}

/// A pool of two workers and two lanes, with a known link and a method known to be slow.
fn pool(when_busy: WhenBusy, gate: &Arc<Gate>) -> (Pool, Vec<Arc<PoolLane>>, PageSet) {
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Private).unwrap();
    memory.write_at(0, &b"some text, ".repeat(PAGES as usize * PAGE_SIZE / 11)).unwrap();
    let config = CompressionConfig {
        way: CompressionWay::Fixed(Method::lz4()),
        when_busy,
        workers: Some(2),
        ..CompressionConfig::default()
    };
    let chooser = Arc::new(Chooser::new(&config, 2, Some(1 << 30)));
    let counts = FrameCounts { packed_pages: 64, packed_bytes: 4096, ..FrameCounts::default() };
    chooser.encoded(chooser.choose(false, 1), counts, Duration::from_secs(1));

    let signal = Arc::new(Signal::default());
    let lane = |lane| {
        let window = Arc::new(Window::new(64, Arc::clone(&signal)));
        let plan = LanePlan::new(lane, 2, Arc::new(()));
        Arc::new(PoolLane::new(plan, window, 4, Arc::clone(&signal)))
    };
    let lanes: Vec<_> = (0..2).map(lane).collect();
    let hashes = Arc::new(PageHashes::for_memory(&memory));
    let encoder = |_| {
        let (memory, hashes) = (memory.clone(), Arc::clone(&hashes));
        PageEncoder::new(memory, hashes, gate.compressors(), Arc::new(HotPages::new(0)))
    };
    let mut pages = PageSet::for_memory(&memory);
    pages.bitmap_mut(SlotId(0)).set_run(0, PAGES);
    let (results, _) = crossbeam_channel::unbounded();
    let encoders = (0..2).map(encoder).collect();
    let pool = Pool::start(lanes.clone(), signal, chooser, encoders, results, CpuMeter::default());
    (pool.unwrap(), lanes, pages)
}

/// Sends a round in which lane 1's channel already waits for the first frame. Returns that frame
/// and all others. At least `held` compressors are blocked. With `frame_first` they continue only
/// after that frame has arrived.
fn round(when_busy: WhenBusy, held: usize, frame_first: bool) -> (FrameInfo, Vec<FrameInfo>) {
    let gate = Arc::new(Gate::default());
    let (pool, lanes, pages) = pool(when_busy, &gate);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| match lanes[1].outgoing.take() {
            Next::Frame(finished) => finished.what,
            _ => panic!("no frame"),
        });
        while !lanes[1].outgoing.is_hungry() {
            std::thread::yield_now();
        }
        let pages = Arc::new(pages);
        pool.send_round(&Job {
            round: 1,
            rearm: false,
            pages,
            last: None,
            zero: None,
            hinted: None,
        });
        gate.await_held(held);
        if !frame_first {
            gate.open();
        }
        let first = waiting.join().unwrap();
        gate.open();
        // The rest of the round, lane by lane: each has 8 frames and its end.
        let mut others = Vec::new();
        for lane in &lanes {
            while let Next::Frame(finished) = lane.outgoing.take() {
                others.push(finished.what);
                if matches!(finished.what, FrameInfo::EndOfRound { .. }) {
                    break;
                }
            }
        }
        (first, others)
    })
}

#[test]
fn a_channel_that_waits_gets_pages_as_they_are_while_compressors_are_held() {
    let (first, others) = round(WhenBusy::Raw, 1, true);
    let FrameInfo::Pages(counts, decision) = first else { panic!("the first frame has pages") };
    assert_eq!((decision.why, counts.raw_pages, counts.packed_pages), (Why::Waiting, 64, 0));
    assert_eq!(others.len(), 17);
    let packed =
        |info: &FrameInfo| matches!(info, FrameInfo::Pages(counts, _) if counts.packed_pages == 64);
    assert!(others.iter().any(packed), "what was held goes compressed when it goes");
}

#[test]
fn a_channel_that_waits_waits_for_the_compressors_if_it_is_to() {
    // Both workers are blocked: neither made a frame for the channel.
    let (first, others) = round(WhenBusy::Wait, 2, false);
    assert_eq!(others.len(), 17);
    for info in others.into_iter().chain([first]) {
        if let FrameInfo::Pages(counts, decision) = info {
            assert_eq!((decision.why, counts.raw_pages, counts.packed_pages), (Why::Fixed, 0, 64));
        }
    }
}
