//! Frames that are corrupted in transit. The destination detects the corruption and places none of
//! the frame (except uncompressed pages, which are placed before they are checked), runs no guest
//! and reports the error. The error is sent to the source, whose guest runs on.

mod changes;

use std::sync::{Arc, Mutex};

use self::changes::{
    append_to_deltas, append_to_packed, beyond_slot, called_zero, claims_less_deltas, cut_delta,
    cut_packed, end_of_round, flip_header, flip_packed, flip_raw, flip_table, half, next_sequence,
    no_algorithm, of_unknown_page, one_page_less, one_page_more, other_algorithm, other_base,
    other_lane, other_slot, other_sum, replayed, too_long, unknown_algorithm,
};
use crate::support::content::{let_work_between_rounds, mixed_guest};
use crate::support::relay::{Relay, Wire};
use crate::support::{DestinationGuest, Scenario, kept, nothing, test_all};
use vmferry::ErrorClass;
use vmferry::chain;
use vmferry::config::compression::CompressionWay;
use vmferry::config::{ChannelCount, WorkerCount};
use vmferry_codec::apply_delta;
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun, page_hash};
use vmferry_wire::{Encoding, Run};

/// Modifies the first frame that it applies to; `None` if it does not apply to this frame.
type Change = fn(&[Wire], &Wire) -> Option<Vec<u8>>;

struct Case {
    way: &'static str,
    channels: u8,
    change: Change,
    /// Part of the error message on both sides.
    says: &'static str,
    class: ErrorClass,
}

/// The modification made.
#[derive(Clone)]
struct Done {
    lane: u8,
    frame: Wire,
}

#[test]
fn packed_pages() {
    for way in ["lz4", "zstd:1", "zlib:1"] {
        run(&case(way, flip_packed, "of slot "));
        run(&case(way, one_page_less, "can't be decompressed"));
        if way != "zstd:1" && !test_all() {
            continue;
        }
        run(&case(way, cut_packed, "can't be decompressed"));
        run(&case(way, append_to_packed, "can't be decompressed"));
        run(&case(way, one_page_more, "can't be decompressed"));
        run(&case(way, other_algorithm, "can't be decompressed"));
    }
    run(&case("zstd:1", unknown_algorithm, "unknown compression algorithm 77"));
    run(&case("zstd:1", no_algorithm, "packed pages without an algorithm"));
}

#[test]
fn raw_pages() {
    run(&case("none", flip_raw, "the source sent"));
    run(&case("none", called_zero, "the source sent"));
    run(&case("none", other_sum, "the source sent"));
    run(&case("none", one_page_less, "bytes of payload for runs that need"));
}

#[test]
fn deltas() {
    run(&case("delta", other_base, "that are not here"));
    run(&case("delta", replayed, "that are not here"));
    run(&case("delta", cut_delta, "are damaged"));
    run(&case("delta", append_to_deltas, "left over after all deltas"));
    run(&case("delta", of_unknown_page, "that are not here"));
    run(&case("delta", claims_less_deltas, "that are not compressed"));
}

#[test]
fn headers_and_tables() {
    run(&case("none", flip_header, "a frame header"));
    run(&case("none", flip_table, "a run table"));
    run(&case("none", too_long, "at most 524288 are allowed"));
    run(&case("auto", other_slot, "the guest has 2 slots"));
    run(&case("none", beyond_slot, "which has 2048"));
    run(&case("none", next_sequence, "came where"));
    let stray = case("none", other_lane, "does not belong on this lane");
    run(&Case { channels: 3, ..stray });
}

/// Every frame is well-formed; only the digest reveals the loss.
#[test]
fn pages_replaced_by_an_end_of_round_are_detected_by_the_digest() {
    let lost = case("none", end_of_round, "digests differ");
    run(&Case { class: ErrorClass::Corrupt, ..lost });
}

#[test]
fn channel_that_ends_within_a_frame_is_lost() {
    let cut = case("zstd:1", half, "the link was lost (lane 0");
    let cut = Case { class: ErrorClass::LinkLost, ..cut };
    let (source, destination, _) = attempt(&cut);
    assert!(destination.contains(cut.says), "{destination}");
    assert!(source.contains("the link was lost"), "{source}");
}

fn case(way: &'static str, change: Change, says: &'static str) -> Case {
    Case { way, channels: 1, change, says, class: ErrorClass::Protocol }
}

/// Runs a case. Both sides must report the error and its location.
fn run(case: &Case) {
    let (source, destination, done) = attempt(case);
    let name = format!("{}: {}", case.way, case.says);
    for said in [&source, &destination] {
        assert!(said.contains(case.says), "{name}: {said}");
        if case.class == ErrorClass::Protocol {
            assert!(said.contains(&format!("on lane {} at byte", done.lane)), "{name}: {said}");
        }
    }
    let of_pages = ["of slot", "the source sent", "not here", "decompressed", "are damaged"];
    if of_pages.iter().any(|words| case.says.contains(words)) {
        let slot = format!("of {}", done.frame.header.slot);
        assert!(destination.contains(&slot), "{name}: {destination}");
        let number = destination.split("page ").nth(1).and_then(|rest| rest.split(' ').next());
        let page: u64 = number.and_then(|number| number.parse().ok()).expect("it names a page");
        let mut ranges = done.frame.runs.iter().map(Run::range);
        let known = ranges.any(|range| range.contains(&page));
        assert!(known || case.says == "that are not here", "{name}: {destination}");
    }
}

/// The errors of source and destination, and the modification made.
fn attempt(case: &Case) -> (String, String, Done) {
    let mut scenario = Scenario::new();
    scenario.source.channels = ChannelCount::new(case.channels).unwrap();
    scenario.source.compression.way = case.way.parse().unwrap();
    // With more workers two versions of a page could be placed at once, and a replay would only be
    // detected by chance.
    scenario.destination.workers = Some(WorkerCount::new(1).unwrap());
    if case.class == ErrorClass::LinkLost {
        // A reestablished channel would send the frame again.
        scenario.source.timeouts.reconnect = std::time::Duration::ZERO;
    }
    let deltas = case.way == CompressionWay::Delta.to_string();
    if deltas {
        // Deltas are sent in the third round, for pages that were also dirty in the second.
        scenario.source.downtime_limit = std::time::Duration::ZERO;
    }
    let done = Arc::new(Mutex::new(None));
    let (noted, change) = (Arc::clone(&done), case.change);
    let mut earlier: Vec<Wire> = Vec::new();
    let damage = move |lane: u8, frame: &Wire| {
        let mut noted = noted.lock().unwrap();
        if noted.is_some() {
            return None;
        }
        let own: Vec<Wire> =
            earlier.iter().filter(|frame| frame.header.round > 1).cloned().collect();
        let bytes = change(&own, frame);
        if bytes.is_some() {
            *noted = Some(Done { lane, frame: frame.clone() });
        } else {
            earlier.push(frame.clone());
        }
        bytes
    };
    let path = scenario.directory.path().join("relay.sock");
    let relay = Relay::start(path, &scenario.listen_at, Box::new(damage));
    scenario.dial = Some(relay.address());
    let vm = mixed_guest(400);
    let guest = vm.guest.clone();
    let destination = DestinationGuest::default();
    let prepared = Arc::clone(&destination.prepared);
    let (outcome, received) = scenario.run(vm, destination, |report| {
        // Cases that need later rounds: all hot pages must be in these.
        if deltas || case.class == ErrorClass::Corrupt {
            let_work_between_rounds(&guest, report);
        }
    });
    let name = format!("{} ({})", case.says, case.way);
    let done = done.lock().unwrap().clone().unwrap_or_else(|| panic!("nothing fits {name}"));
    let (vm, error) = kept(outcome);
    vm.guest.wait_for_work();
    vm.guest.pause();
    let refused = nothing(received);
    assert_eq!((error.class(), refused.class()), (case.class, case.class), "{name}: {error}");
    let memory = prepared.lock().unwrap().take().unwrap();
    let in_place = done.frame.header.packed_bytes == 0 && case.says == "the source sent";
    if case.class == ErrorClass::Protocol && !in_place {
        check_untouched(&memory, &done.frame);
    }
    (chain(&error), chain(&refused), done)
}

/// Checks that nothing of the frame was placed in the destination's memory.
fn check_untouched(memory: &GuestMemory, frame: &Wire) {
    let slot = frame.header.slot;
    let read = |first| {
        let mut content = vec![0; PAGE_SIZE];
        memory.copy_out(PageRun { slot, first, pages: 1 }, &mut content).unwrap();
        content
    };
    if frame.header.round == 1 {
        for page in frame.runs.iter().flat_map(Run::range) {
            assert!(read(page) == [0; PAGE_SIZE], "page {page} was placed");
        }
    } else if frame.header.algorithm.is_none() {
        // A delta identifies the previous content of the page.
        let mut records = frame.packed();
        for run in frame.runs.iter().filter(|run| run.encoding == Encoding::Delta) {
            let (base, rest) = records.split_first_chunk::<8>().unwrap();
            records = rest;
            let sum = run.range().map(|page| {
                apply_delta(&mut records, &mut [0; PAGE_SIZE]).unwrap();
                page_hash(&read(page), slot, page)
            });
            let sum = sum.fold(0_u64, u64::wrapping_add);
            assert_eq!(sum, u64::from_le_bytes(*base), "pages from {} have changed", run.first);
        }
    }
}
