//! A session with post-copy: requests on fetch lanes, their answers, and channels that replace
//! others.

use std::sync::Arc;

use crate::support::{PAGES, SESSION, TOKEN, begin, hello, reply, state};
use vmferry_codec::{
    Batch, Choice, Compressors, DeltaUse, EncodedFrame, Encoder, HotPages, PageHashes,
};
use vmferry_inspect::{Break, End, HEAD_BYTES, Inspector, turn_of};
use vmferry_memory::{GuestMemory, MemoryKind, PageRun, SlotId, SlotLayout};
use vmferry_transport::Direction;
use vmferry_wire::{
    ControlMessage, FetchLanes, GuestIdentity, Hello, LaneOffer, LaneToken,
    PROTOCOL_VERSION_MAX as VERSION, PageRequest, Role, SessionKind, SessionWord, Token,
};

const LANES: FetchLanes = FetchLanes { faults: 1, background: 1 };
const NEXT_TOKEN: Token = Token([3; 16]);
const LAYOUT: [SlotLayout; 1] = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];

/// The files of a session whose only data lane is 0, as the source records them.
struct Recorded {
    files: Vec<Vec<u8>>,
    /// The offset of FINAL, and the bytes of its fields.
    last: (usize, usize),
}

/// Two channels of lane 1, the second with the token of an offer, and one of lane 2. The page that
/// is requested on the first channel is requested again on each other one.
fn recorded() -> Recorded {
    let begins = ControlMessage::Begin {
        session: SESSION,
        guest: GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "web".into() },
        vmm: "vmferry-microvm".into(),
        config: b"{}".to_vec(),
        layout: LAYOUT.to_vec(),
        lanes: 1,
        verify: false,
        reconnect_ms: 30_000,
        release: None,
        streams: false,
        used_bytes: Vec::new(),
        fetch_lanes: Some(LANES),
        witness: None,
    };
    let lacking = ControlMessage::Lacking { slot: SlotId(0), first: 8, bits: vec![7] };
    let last = |paused, kind| ControlMessage::Final {
        lane_sequences: vec![0],
        digest: 7,
        state: state(),
        paused,
        kind,
        storage_sample: Vec::new(),
    };
    let mut control =
        [begin(Direction::ToDestination, 0), hello(VERSION, Role::Control, Token([0; 16]))]
            .concat();
    begins.encode(VERSION, &mut control);
    lacking.encode(VERSION, &mut control);
    let last_at = control.len();
    last(true, SessionKind::PostCopy).encode(VERSION, &mut control);
    let mut plain = Vec::new();
    last(false, SessionKind::PreCopy).encode(VERSION, &mut plain);
    let fields = control.len() - last_at - plain.len();
    let mut back = [begin(Direction::ToSource, 0), reply(VERSION)].concat();
    let accept = ControlMessage::Accept {
        token: TOKEN,
        release: None,
        algorithms: None,
        verifies_placed: false,
        post_copy: Some(Ok(())),
        compares_storage: false,
    };
    accept.encode(VERSION, &mut back);
    let offer = Some(LaneOffer { first: 1, lanes: LANES, streams: None });
    let mut query =
        [begin(Direction::ToDestination, 3), hello(VERSION, Role::Query, Token([0; 16]))].concat();
    ControlMessage::Query { session: SESSION, offer }.encode(VERSION, &mut query);
    let mut answer = [begin(Direction::ToSource, 3), reply(VERSION)].concat();
    let (word, token) =
        (SessionWord::Fetching, Some(LaneToken { token: NEXT_TOKEN, streams: None }));
    ControlMessage::Answer { session: SESSION, word, token }.encode(VERSION, &mut answer);
    let mut files = vec![control, back, query, answer];
    for (connection, lane, token, pages) in
        [(1, 1, TOKEN, &[8, 9][..]), (2, 2, TOKEN, &[8, 10]), (4, 1, NEXT_TOKEN, &[8, 9, 10])]
    {
        files.extend(fetch_lane(connection, lane, token, pages));
    }
    Recorded { files, last: (last_at, fields) }
}

/// Both directions of a fetch lane's channel, on which these pages are requested one by one.
fn fetch_lane(connection: u32, lane: u8, token: Token, pages: &[u64]) -> [Vec<u8>; 2] {
    let memory = GuestMemory::allocate(&LAYOUT, MemoryKind::Private).unwrap();
    let hashes = PageHashes::for_memory(&memory);
    let mut encoder = Encoder::new(Compressors::default(), Arc::new(HotPages::new(1 << 20)));
    let (version_min, version_max, role, attempt) = (1, VERSION, Role::Data, 0);
    let hello = Hello { version_min, version_max, role, lane, token, attempt };
    let mut answers =
        [begin(Direction::ToDestination, connection), hello.encode().to_vec()].concat();
    let mut requests = [begin(Direction::ToSource, connection), reply(VERSION)].concat();
    for (sequence, page) in (1..).zip(pages) {
        let run = PageRun { slot: SlotId(0), first: *page, pages: 1 };
        requests.extend(PageRequest::new(run).unwrap().encode());
        let mut frame = EncodedFrame::new();
        frame.pages_mut(1).fill(*page as u8);
        let batch = Batch { round: 2, slot: SlotId(0), pages: &[*page] };
        let choice = Choice { pack: None, delta: DeltaUse::Off };
        encoder.encode(&mut frame, batch, &hashes, choice).unwrap();
        frame.set_sequence(sequence);
        frame.write_to(&mut answers).unwrap();
    }
    [answers, requests]
}

/// Reads files in the order of the command. Returns the output, the breaks and the contradictions.
fn inspect(files: &[Vec<u8>]) -> (String, Vec<Break>, Vec<String>) {
    let mut files: Vec<&Vec<u8>> = files.iter().collect();
    files.sort_by_key(|file| turn_of(&file[..file.len().min(HEAD_BYTES)]));
    let (mut inspector, mut told, mut breaks) =
        (Inspector::new(1 << 20, true), String::new(), vec![]);
    for file in files {
        let outcome = inspector.file("file", &file[..], &mut |record| {
            told += &format!("{record}\n");
            Ok(())
        });
        match outcome.unwrap().end {
            End::Broken(found) => breaks.push(found),
            end => assert_eq!(end, End::Whole, "{told}"),
        }
    }
    (told, breaks, inspector.disagreements())
}

#[test]
fn requests_and_answers_of_all_channels_are_read() {
    let (told, breaks, disagreements) = inspect(&recorded().files);
    assert_eq!((breaks, disagreements), (vec![], vec![]), "{told}");
    let count = |wanted: &str| told.matches(wanted).count();
    assert_eq!(count(" request   slot="), 7, "{told}");
    assert_eq!(count(" frame     sequence="), 7, "{told}");
    for wanted in [
        r#" fetch_lanes={"faults":1,"background":1}"#,
        " state_sections=2 post_copy=true",
        r#" offer={"first":1,"faults":1,"background":1}"#,
        " word=fetching token=(secret)",
    ] {
        assert_eq!(count(wanted), 1, "{wanted} is not in:\n{told}");
    }
    assert!(!told.contains("0303"), "no token is printed:\n{told}");
}

/// The state of FINAL is not at the end of the message if it has fields.
#[test]
fn sections_of_the_state_before_fields_have_their_offset() {
    let Recorded { files, last: (at, fields) } = recorded();
    assert!(fields > 0);
    let (told, ..) = inspect(&files);
    let section = told.lines().find(|line| line.contains("name=serial")).unwrap();
    let offset: usize = section.split_whitespace().next().unwrap().parse().unwrap();
    assert!(offset > at);
    assert_eq!(files[0][offset..offset + 9], [2; 9], "{section}");
}

#[test]
fn answer_without_a_request_is_a_contradiction() {
    let mut files = recorded().files;
    let requests = files.last_mut().unwrap();
    requests.truncate(requests.len() - 16);
    let (told, breaks, disagreements) = inspect(&files);
    assert_eq!(breaks, [], "{told}");
    let [found] = &disagreements[..] else { panic!("{disagreements:?}") };
    assert!(found.ends_with("lane 1 has 3 answers to 2 requests"), "{found}");
}

#[test]
fn damage_of_a_request_is_located() {
    let good = recorded().files;
    let at = good[5].len() - 16;
    for (byte, with, problem) in [
        (2, 0, "it asks for 0 pages from page 9 on"),
        (5, 1, "its reserved bytes are not 0"),
        (9, 8, "page 2057+1 of slot 0 does not exist: it has 2048"),
        (0, 1, "page 9+1 of slot 1 does not exist: it has 0"),
    ] {
        let mut files = good.clone();
        files[5][at + byte] = with;
        let (told, breaks, _) = inspect(&files);
        let [found] = &breaks[..] else { panic!("{breaks:?}:\n{told}") };
        assert_eq!(found.offset, at as u64);
        assert!(found.problem.contains(problem), "{found:?}");
    }
}
