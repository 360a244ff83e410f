//! With all buffers allocated, pages move from one side's memory to the other's without further
//! allocations.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

#[path = "../../codec/tests/counting/mod.rs"]
mod counting;
#[path = "engine/support/mod.rs"]
mod support;

use std::io::Cursor;
use std::sync::Arc;
use std::time::Duration;

use counting::{allocations, of_all_threads};
use parking_lot::Mutex;
use support::content::{content, let_work_between_rounds, mixed_guest};
use support::{DestinationGuest, Guest, PAGES, Scenario, address, owned, test_all};
use vmferry::config::RoundLimit;
use vmferry::data::destination::place::{FrameReader, PlacedCounters, Placer, is_placed_at_once};
use vmferry::data::source::page_encoder::PageEncoder;
use vmferry::data::source::plan::{LanePlan, Planned, RoundOrder};
use vmferry::source::{Report, SourceOutcome};
use vmferry_codec::{
    Choice, Compressors, Decompressors, DeltaUse, EncodedFrame, Frame, HotPages, Method, PageHashes,
};
use vmferry_memory::{GuestMemory, MemoryKind, PageSet, SlotId};

/// Locked by each test, because allocations of all threads are counted.
static ALONE: Mutex<()> = Mutex::new(());

/// One lane with the stages of the threads called in sequence.
struct Path {
    source: GuestMemory,
    sequence: u64,
    log: Arc<()>,
    plan: LanePlan,
    encoder: PageEncoder,
    encoded: EncodedFrame,
    reader: FrameReader<Cursor<Vec<u8>>>,
    frame: Frame,
    placer: Placer,
    hashes: [Arc<PageHashes>; 2],
    pages: Arc<PageSet>,
}

impl Path {
    fn new() -> Self {
        let memory = || GuestMemory::allocate(&Guest::layout(), MemoryKind::Private).unwrap();
        let (source, destination) = (memory(), memory());
        let hashes = [&source, &destination].map(|memory| Arc::new(PageHashes::for_memory(memory)));
        let mut pages = PageSet::for_memory(&source);
        for page in 0..600 {
            if let Some(content) = content(page) {
                source.write_at(address(page), &content).unwrap();
                pages.bitmap_mut(SlotId(0)).set(page);
            }
        }
        let hot = Arc::new(HotPages::new(PAGES << 12));
        Self {
            sequence: 0,
            log: Arc::new(()),
            plan: LanePlan::new(0, 1),
            encoder: PageEncoder::new(
                source.clone(),
                Arc::clone(&hashes[0]),
                Compressors::default(),
                hot,
            ),
            encoded: EncodedFrame::new(),
            reader: FrameReader::new(0, Cursor::new(Vec::with_capacity(1 << 20))),
            frame: Frame::new(),
            placer: Placer::new(
                1,
                destination,
                Arc::clone(&hashes[1]),
                Arc::new(PlacedCounters::default()),
                Decompressors::default(),
            ),
            source,
            hashes,
            pages: Arc::new(pages),
        }
    }

    /// Sends all pages once. Returns the number of frames.
    fn round(&mut self, round: u32, choice: Choice) -> u64 {
        let pages = Arc::clone(&self.pages);
        self.plan.begin(RoundOrder {
            round,
            log: self.log.clone(),
            rearm_first: true,
            pages,
            deferred: None,
            zero: None,
            hinted: None,
        });
        let mut frames = 0;
        while let Some(planned) = self.plan.next(64, 1000).unwrap() {
            match planned {
                Planned::Pages(batch) => {
                    self.encoder.encode(0, &batch, &mut self.encoded, choice).unwrap();
                }
                Planned::EndOfRound { round, .. } => self.encoded.end_of_round(round),
                Planned::Wait => unreachable!("there are no hints"),
            }
            self.sequence += 1;
            self.encoded.set_sequence(self.sequence);
            let link = self.reader.get_mut();
            link.get_mut().clear();
            link.set_position(0);
            self.encoded.write_to(link.get_mut()).unwrap();
            let offset = self.reader.offset();
            let header = self.reader.receive_head(&mut self.frame).unwrap();
            if is_placed_at_once(&header) {
                self.placer.receive(&mut self.reader, &self.frame, offset).unwrap();
            } else {
                self.reader.receive_payload(&mut self.frame).unwrap();
                self.placer.place(0, &self.frame, offset).unwrap();
            }
            frames += 1;
        }
        assert_eq!(self.hashes[0].sum(), self.hashes[1].sum());
        frames
    }
}

#[test]
fn frames_need_no_allocations() {
    let _alone = ALONE.lock();
    let methods = [
        None,
        Some(Method::lz4()),
        Some(Method::zstd(1)),
        Some(Method::zstd(3)),
        Some(Method::zlib(1)),
    ];
    for pack in methods {
        for delta in [DeltaUse::Off, DeltaUse::Make] {
            let mut path = Path::new();
            let mut made = [0; 8];
            for (round, made) in (1..).zip(&mut made) {
                // A few bytes of every third page have changed.
                for page in (0..600).step_by(3).filter(|page| content(*page).is_some()) {
                    path.source.write_at(address(page) + 8, &[round as u8; 3]).unwrap();
                }
                let choice = Choice { pack, delta: if round > 1 { delta } else { DeltaUse::Off } };
                let mut frames = 0;
                *made = allocations(|| frames = path.round(round, choice));
                assert!(frames > 6);
            }
            // The first deltas are made in the third round, where their buffers grow.
            assert_eq!(made[3..], [0; 5], "{pack:?} {delta:?}: {made:?}");
            assert!(made[0] > 0, "the count sees it: {made:?}");
        }
    }
}

/// All threads of both sides. Messages allocate, and so does the first use of a buffer, but there
/// is no allocation for each page or frame.
#[test]
fn engine_allocates_almost_nothing_per_page() {
    let _alone = ALONE.lock();
    let ways = ["delta", "zlib:1", "auto", "none", "lz4", "zstd:1"];
    for way in &ways[..if test_all() { ways.len() } else { 3 }] {
        let mut seen = Vec::with_capacity(100);
        // A slow link, as may be measured on a busy machine, ends the rounds early.
        while seen.len() < 3 {
            seen.clear();
            let mut scenario = Scenario::new();
            scenario.source.compression.way = way.parse().unwrap();
            scenario.source.downtime_limit = Duration::from_millis(5);
            scenario.source.max_rounds = RoundLimit::new(9).unwrap();
            let vm = mixed_guest(PAGES);
            let guest = vm.guest.clone();
            let (outcome, received) = scenario.run(vm, DestinationGuest::default(), |report| {
                let_work_between_rounds(&guest, report);
                if let Report::RoundDone(round) = report
                    && round.round >= 5
                    && !round.paused
                {
                    seen.push((round.pages, of_all_threads()));
                }
            });
            assert!(matches!(outcome, SourceOutcome::Given { .. }));
            owned(received).vm.guest.unwrap().pause();
        }
        let pages: u64 = seen[1..].iter().map(|(pages, _)| pages).sum();
        let made = seen[seen.len() - 1].1 - seen[0].1;
        let per_page = made as f64 / pages as f64;
        println!("{way}: {made} allocations for {pages} pages in {} rounds", seen.len() - 1);
        assert!(per_page < 0.01, "{way}: {made} allocations for {pages} pages: {seen:?}");
    }
}
