//! Runs the seeds of the fuzz target of greetings and control messages.

use vmferry_fuzz_targets::control;

use uuid::Uuid;
use vmferry_handover::WitnessId;
use vmferry_memory::{SlotId, SlotLayout};
use vmferry_wire::{
    AlgorithmSet, CONTROL_HEADER_BYTES, Compared, ControlMessage, FetchLanes, GuestIdentity, Hello,
    HelloReply, HelloStatus, LaneOffer, LaneToken, LateStreamsId, PROTOCOL_VERSION_MAX,
    PROTOCOL_VERSION_MIN, ProbeMessage, Reason, ReasonCode, Release, Role, SessionId, SessionWord,
    Token,
};

seed_tests!(control, places: 200, differs: |_| false);

/// The seeds take the fuzzer past the headers.
#[test]
fn seeds_are_valid_messages() {
    for (number, message) in probes() {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        let body = bytes.split_off(CONTROL_HEADER_BYTES);
        assert_eq!(control::decode_probe(number.into(), &body), Ok(message));
    }
    for message in messages() {
        let body = body(&message);
        assert_eq!(control::decode(PROTOCOL_VERSION_MAX, message.number(), &body), Ok(message));
    }
}

fn body(message: &ControlMessage) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(PROTOCOL_VERSION_MAX, &mut bytes);
    bytes.split_off(CONTROL_HEADER_BYTES)
}

/// Each message as a seed of both kinds, in the newest protocol version, and both greetings
/// followed by messages of each version.
fn seeds() -> Vec<(String, Vec<u8>)> {
    let mut seeds = Vec::new();
    let mut all_sealed = vec![1];
    for message in messages() {
        let name = message.name().to_lowercase();
        let body = body(&message);
        let mut sealed = vec![1, message.number() as u8];
        sealed.extend_from_slice(&(body.len() as u16).to_le_bytes());
        sealed.extend_from_slice(&body);
        all_sealed.extend_from_slice(&sealed[1..]);
        seeds.push((format!("{name}-sealed"), sealed));
    }
    let mut all_plain = vec![0];
    for (number, message) in probes() {
        let name = format!("probe-{}-sealed", message.name().to_lowercase());
        let mut plain = Vec::new();
        message.encode(&mut plain);
        let body = &plain[CONTROL_HEADER_BYTES..];
        let mut sealed = vec![1, number];
        sealed.extend_from_slice(&(body.len() as u16).to_le_bytes());
        sealed.extend_from_slice(body);
        seeds.push((name, sealed));
        all_plain.extend(plain);
    }
    seeds.push(("probe-all".to_owned(), all_plain));
    seeds.push(("all-sealed".to_owned(), all_sealed));
    for version in PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION_MAX {
        let mut all = Vec::new();
        messages().iter().for_each(|message| message.encode(version, &mut all));
        let (version_min, version_max) = (PROTOCOL_VERSION_MIN, version);
        let (role, token) = (Role::Control, Token([0; 16]));
        let hello = Hello { version_min, version_max, role, lane: 0, token, attempt: 0 };
        let status = HelloStatus::Ok;
        let reply = HelloReply { status, version_min, version_max, version, placed: 9 };
        let seed = |greeting: &[u8]| [&[0], greeting, &all].concat();
        seeds.push((format!("hello-and-all-{version}"), seed(&hello.encode())));
        seeds.push((format!("reply-and-all-{version}"), seed(&reply.encode())));
    }
    seeds
}

/// The messages of a probe, with their numbers.
fn probes() -> [(u8, ProbeMessage); 7] {
    let guest = Some(GuestIdentity { uuid: Uuid::from_u128(2), name: "web".into() });
    let facts = br#"{"kernel":"6.12"}"#.to_vec();
    let layout = vec![SlotLayout { slot: SlotId(0), gpa: 0, pages: 32_768 }];
    [
        (32, ProbeMessage::Ask { guest }),
        (33, ProbeMessage::Tell { refusal: Some("no".into()), facts }),
        (34, ProbeMessage::Echo { nonce: 300 }),
        (35, ProbeMessage::Echoed { nonce: 300, clock_us: 1 << 50 }),
        (36, ProbeMessage::Load { filler: vec![7; 40] }),
        (37, ProbeMessage::Compare { vmm: "qemu".into(), config: b"{}".to_vec(), layout }),
        (38, ProbeMessage::Compared(Compared::Differs("no".into()))),
    ]
}

fn messages() -> Vec<ControlMessage> {
    let session = SessionId([1; 16]);
    let reason = Reason::new(ReasonCode::Busy, "another guest comes");
    let release = Release { vmferry: "0.1.0".into(), vmm: "microvm 0.1.0".into() };
    vec![
        ControlMessage::Begin {
            session,
            guest: GuestIdentity { uuid: Uuid::from_u128(2), name: "web".into() },
            vmm: "vmferry-microvm/1".into(),
            config: b"{}".to_vec(),
            layout: vec![
                SlotLayout { slot: SlotId(0), gpa: 0, pages: 300 },
                SlotLayout { slot: SlotId(1), gpa: 1 << 32, pages: 70_000 },
            ],
            lanes: 2,
            verify: true,
            reconnect_ms: 30_000,
            release: Some(release.clone()),
            streams: true,
            used_bytes: Vec::new(),
            fetch_lanes: None,
            witness: WitnessId::new("etcd 7/f").ok(),
        },
        ControlMessage::Accept {
            token: Token([3; 16]),
            release: Some(release.clone()),
            algorithms: Some(AlgorithmSet::VERSION_1),
            verifies_placed: false,
            post_copy: None,
            compares_storage: false,
        },
        ControlMessage::Refuse { reason: reason.clone(), release: Some(release) },
        ControlMessage::Placed { lane: 1, sequence: 300 },
        ControlMessage::Final {
            lane_sequences: vec![7, 9],
            digest: u64::MAX,
            state: [1; 40].into(),
            paused: true,
            kind: vmferry_wire::SessionKind::PostCopy,
            storage_sample: Vec::new(),
        },
        ControlMessage::Ready { digest: 5, load_us: 600 },
        ControlMessage::Verify {},
        ControlMessage::Verified { hash: 1 << 60, pages: 2, elapsed_us: 3 },
        ControlMessage::Commit { session },
        ControlMessage::Running { session, start_us: 400 },
        ControlMessage::Aborted { session, reason: reason.clone() },
        ControlMessage::Abort { reason },
        ControlMessage::Ping { nonce: 1 },
        ControlMessage::Pong { nonce: 1 },
        ControlMessage::Query {
            session,
            offer: Some(LaneOffer {
                first: 4,
                lanes: FetchLanes { faults: 2, background: 4 },
                streams: Some(LateStreamsId(1 << 40)),
            }),
        },
        ControlMessage::Answer {
            session,
            word: SessionWord::Fetching,
            token: Some(LaneToken { token: Token([7; 16]), streams: Some(LateStreamsId(9)) }),
        },
        ControlMessage::Withdraw {},
        ControlMessage::Free { slot: SlotId(1), runs: vec![(2, 300), (512, 1)] },
        ControlMessage::Lacking { slot: SlotId(1), first: 64, bits: vec![0x81, 0, 7] },
    ]
}
