//! Frames for which no compressor is free.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use vmferry_codec::{
    Compress, CompressError, Compressors, FrameCounts, HotPages, Method, PageHashes,
};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageSet, SlotId, SlotLayout};

use super::*;
use crate::config::WorkerCount;
use crate::config::compression::{CompressionConfig, CompressionWay, WhenBusy};
use crate::data::source::chooser::Why;
use crate::data::source::lane::{FrameSummary, LaneSizes};

/// Two lanes' stripes.
const PAGES: u64 = 1024;

/// Blocks compressors until it is opened.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    blocked: usize,
    is_open: bool,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock();
        state.blocked += 1;
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |state| !state.is_open);
    }

    fn open(&self) {
        self.state.lock().is_open = true;
        self.changed.notify_all();
    }

    fn await_blocked(&self, compressors: usize) {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |state| state.blocked < compressors);
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

/// Two workers and two lanes, with a known link and a method known to be slow.
fn workers(when_busy: WhenBusy, gate: &Arc<Gate>) -> (Workers, Vec<Arc<SourceLane>>, PageSet) {
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Private).unwrap();
    memory.write_at(0, &b"some text, ".repeat(PAGES as usize * PAGE_SIZE / 11)).unwrap();
    let config = CompressionConfig {
        way: CompressionWay::Fixed(Method::lz4()),
        when_busy,
        workers: Some(WorkerCount::new(2).unwrap()),
        ..CompressionConfig::default()
    };
    let chooser = Arc::new(Chooser::new(&config, 2, Some(1 << 30)));
    let counts = FrameCounts { packed_pages: 64, packed_bytes: 4096, ..FrameCounts::default() };
    chooser.encoded(chooser.choose(false, 1), counts, Duration::from_secs(1));

    let signal = Arc::new(Signal::default());
    let sizes = LaneSizes { lanes: 2, workers: 2, window: 64 };
    let lane = |number| {
        let (chooser, signal) = (Arc::clone(&chooser), Arc::clone(&signal));
        Arc::new(SourceLane::new(number, &sizes, chooser, signal))
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
    let cpu = CpuMeter::default();
    let context = WorkerContext { lanes: lanes.clone(), signal, chooser, results, cpu };
    (Workers::start(context, encoders).unwrap(), lanes, pages)
}

/// Sends a round in which lane 1's channel already waits for the first frame. Returns that frame
/// and all others. At least `blocked` compressors are blocked. With `frame_first` they continue
/// only after that frame has arrived.
fn round(
    when_busy: WhenBusy,
    blocked: usize,
    frame_first: bool,
) -> (FrameSummary, Vec<FrameSummary>) {
    let gate = Arc::new(Gate::default());
    let (workers, lanes, pages) = workers(when_busy, &gate);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| lanes[1].await_frame().summary);
        while !lanes[1].is_channel_idle() {
            std::thread::yield_now();
        }
        let pages = Arc::new(pages);
        workers.send_round(&RoundOrder {
            round: 1,
            log: Arc::new(()),
            rearm_first: false,
            pages,
            deferred: None,
            zero: None,
            hinted: None,
        });
        gate.await_blocked(blocked);
        if !frame_first {
            gate.open();
        }
        let first = waiting.join().unwrap();
        gate.open();
        // The rest of the round, lane by lane: each has 8 frames and its end.
        let mut others = Vec::new();
        for lane in &lanes {
            loop {
                let summary = lane.await_frame().summary;
                others.push(summary);
                if matches!(summary, FrameSummary::EndOfRound { .. }) {
                    break;
                }
            }
        }
        (first, others)
    })
}

#[test]
fn idle_channel_gets_raw_pages_while_compressors_are_busy() {
    let (first, others) = round(WhenBusy::Raw, 1, true);
    let FrameSummary::Pages { counts, decision } = first else {
        panic!("the first frame has pages")
    };
    assert_eq!((decision.why, counts.raw_pages, counts.packed_pages), (Why::Waiting, 64, 0));
    assert_eq!(others.len(), 17);
    let is_packed = |summary: &FrameSummary| match summary {
        FrameSummary::Pages { counts, .. } => counts.packed_pages == 64,
        FrameSummary::EndOfRound { .. } => false,
    };
    assert!(others.iter().any(is_packed), "blocked frames are sent compressed later");
}

#[test]
fn idle_channel_waits_for_compressors_when_configured() {
    // Both workers are blocked: neither made a frame for the channel.
    let (first, others) = round(WhenBusy::Wait, 2, false);
    assert_eq!(others.len(), 17);
    for summary in others.into_iter().chain([first]) {
        if let FrameSummary::Pages { counts, decision } = summary {
            assert_eq!((decision.why, counts.raw_pages, counts.packed_pages), (Why::Fixed, 0, 64));
        }
    }
}
