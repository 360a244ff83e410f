mod post_copy;

use proptest::prelude::*;
use uuid::Uuid;
use vmferry_handover::WitnessId;
use vmferry_memory::{SlotId, SlotLayout};

use super::*;
use crate::fields::{put_mandatory, put_optional};
use crate::{
    AlgorithmSet, GuestIdentity, PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN, Reason, ReasonCode,
    Release, SessionId, SessionKind, SessionWord, Token,
};
use crate::{FetchLanes, LaneOffer, LaneToken, LateStreamsId};

/// Every version that this release speaks.
const VERSIONS: std::ops::RangeInclusive<u16> = PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION_MAX;

fn encoded(version: u16, message: &ControlMessage) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(version, &mut bytes);
    bytes
}

fn decoded(version: u16, bytes: &[u8]) -> Result<Decoded, WireError> {
    let (header, body) = bytes.split_at(CONTROL_HEADER_BYTES);
    ControlHeader::parse(header.try_into().unwrap())?.decode(version, body)
}

fn message(version: u16, bytes: &[u8]) -> Result<ControlMessage, WireError> {
    decoded(version, bytes).map(|decoded| decoded.message)
}

/// A message with an arbitrary body and a valid checksum.
fn sealed(number: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&number.to_le_bytes());
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(&crc32c(body).to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Golden {
    message: ControlMessage,
    /// The body in version 1.
    tuple: &'static str,
    /// The fields that follow it in version 2.
    fields: &'static str,
}

impl Golden {
    /// The message as a reader of version 1 decodes it.
    fn as_version_1(&self) -> ControlMessage {
        let mut message = self.message.clone();
        match &mut message {
            ControlMessage::Begin {
                release, streams, used_bytes, fetch_lanes, witness, ..
            } => {
                (*release, *streams, *used_bytes) = (None, false, Vec::new());
                (*fetch_lanes, *witness) = (None, None);
            }
            ControlMessage::Accept {
                release,
                algorithms,
                verifies_placed,
                post_copy,
                compares_storage,
                ..
            } => {
                (*release, *algorithms) = (None, None);
                (*verifies_placed, *post_copy, *compares_storage) = (false, None, false);
            }
            ControlMessage::Refuse { release, .. } => *release = None,
            ControlMessage::Query { offer, .. } => *offer = None,
            ControlMessage::Answer { token, .. } => *token = None,
            _ => {}
        }
        message
    }

    fn as_version(&self, version: u16) -> ControlMessage {
        if version == 1 { self.as_version_1() } else { self.message.clone() }
    }
}

/// An example of every message, in the order of their numbers.
fn goldens() -> Vec<Golden> {
    let session = SessionId([1; 16]);
    let reason = Reason::new(ReasonCode::Busy, "no");
    let guest = GuestIdentity { uuid: Uuid::from_bytes([2; 16]), name: "web".into() };
    let layout = vec![SlotLayout { slot: SlotId(0), gpa: 0, pages: 300 }];
    let release = Some(Release { vmferry: "0.1.0".into(), vmm: "Q".into() });
    let plain = |message, tuple| Golden { message, tuple, fields: "" };
    vec![
        Golden {
            message: ControlMessage::Begin {
                session,
                guest,
                vmm: "x/y".into(),
                config: vec![9, 9],
                layout,
                lanes: 2,
                verify: true,
                reconnect_ms: 300,
                release: release.clone(),
                streams: true,
                used_bytes: vec![Some(4096), None],
                fetch_lanes: Some(FetchLanes { faults: 2, background: 3 }),
                witness: WitnessId::new("etcd 7/f").ok(),
            },
            tuple: "01010101010101010101010101010101020202020202020202020202020202020377656203782f7902\
                    090901\
                    0000ac020201ac02",
            fields: "010005000000302e312e30\
                     02000100000051\
                     038000000000\
                     0400100000000010000000000000ffffffffffffffff\
                     0500020000000203\
                     0680080000006574636420372f66",
        },
        Golden {
            message: ControlMessage::Accept {
                token: Token([3; 16]),
                release: release.clone(),
                algorithms: Some(AlgorithmSet::ALL),
                verifies_placed: true,
                post_copy: Some(Ok(())),
                compares_storage: true,
            },
            tuple: "03030303030303030303030303030303",
            fields: "010005000000302e312e30\
                     02000100000051\
                     0300040000000e000000\
                     040000000000\
                     050000000000\
                     070000000000",
        },
        Golden {
            message: ControlMessage::Refuse { reason: reason.clone(), release },
            tuple: "05026e6f",
            fields: "010005000000302e312e30\
                     02000100000051",
        },
        plain(ControlMessage::Placed { lane: 1, sequence: 300 }, "01ac02"),
        plain(
            ControlMessage::Final {
                lane_sequences: vec![7],
                digest: 1,
                state: [0xee].into(),
                paused: false,
                kind: SessionKind::PreCopy,
                storage_sample: Vec::new(),
            },
            "01070101ee",
        ),
        plain(ControlMessage::Ready { digest: 5, load_us: 6 }, "0506"),
        plain(ControlMessage::Verify {}, ""),
        plain(ControlMessage::Verified { hash: 1, pages: 2, elapsed_us: 3 }, "010203"),
        plain(ControlMessage::Commit { session }, "01010101010101010101010101010101"),
        plain(
            ControlMessage::Running { session, start_us: 4 },
            "0101010101010101010101010101010104",
        ),
        plain(
            ControlMessage::Aborted { session, reason: reason.clone() },
            "0101010101010101010101010101010105026e6f",
        ),
        plain(ControlMessage::Abort { reason }, "05026e6f"),
        plain(ControlMessage::Ping { nonce: 1 }, "01"),
        plain(ControlMessage::Pong { nonce: 1 }, "01"),
        Golden {
            message: ControlMessage::Query {
                session,
                offer: Some(LaneOffer {
                    first: 4,
                    lanes: FetchLanes { faults: 2, background: 3 },
                    streams: Some(LateStreamsId(0x0807)),
                }),
            },
            tuple: "01010101010101010101010101010101",
            fields: "0100030000000402030300080000000708000000000000",
        },
        Golden {
            message: ControlMessage::Answer {
                session,
                word: SessionWord::Fetching,
                token: Some(LaneToken { token: Token([6; 16]), streams: Some(LateStreamsId(7)) }),
            },
            tuple: "0101010101010101010101010101010104",
            fields: concat!(
                "010010000000",
                "06060606060606060606060606060606",
                "0300080000000700000000000000"
            ),
        },
        plain(ControlMessage::Withdraw {}, ""),
        plain(
            ControlMessage::Free { slot: SlotId(1), runs: vec![(2, 300), (512, 1)] },
            "010202ac02800401",
        ),
        plain(
            ControlMessage::Lacking { slot: SlotId(1), first: 300, bits: vec![0x05, 0xff] },
            "01ac020205ff",
        ),
    ]
}

fn check_golden(version: u16, body_of: impl Fn(&Golden) -> String) {
    for (index, golden) in goldens().into_iter().enumerate() {
        let number = golden.message.number();
        assert_eq!(usize::from(number), index + 1);
        let bytes = encoded(version, &golden.message);
        let (header, body) = bytes.split_at(CONTROL_HEADER_BYTES);
        assert_eq!(hex(body), body_of(&golden), "{}", golden.message.name());
        assert_eq!(header[4..8], [index as u8 + 1, 0, 0, 0]);
        let expected = Decoded { message: golden.as_version(version), ignored: vec![] };
        assert_eq!(decoded(version, &bytes), Ok(expected));
    }
}

/// Frozen: the previous release speaks it. If this test fails, the code is wrong.
#[test]
fn golden_bytes_of_version_1() {
    check_golden(1, |golden| golden.tuple.to_owned());
}

/// If this test fails, the protocol needs a new version.
#[test]
fn golden_bytes_of_version_2() {
    check_golden(2, |golden| format!("{}{}", golden.tuple, golden.fields));
    assert_eq!(*VERSIONS.end(), 2, "a newer version needs golden bytes of its own");
}

/// Includes the header and its checksum.
#[test]
fn golden_bytes_of_a_whole_message() {
    let ping = encoded(1, &ControlMessage::Ping { nonce: 1 });
    assert_eq!(hex(&ping), "010000000d00000052d016a001");
    assert_eq!(ping, encoded(2, &ControlMessage::Ping { nonce: 1 }));
}

#[test]
fn version_1_has_no_fields() {
    for golden in goldens().iter().filter(|golden| !golden.fields.is_empty()) {
        let name = golden.message.name();
        let bytes = encoded(2, &golden.message);
        assert!(matches!(message(1, &bytes), Err(WireError::BadBody { .. })), "{name}");
        // In version 2, every field may be missing.
        let bytes = encoded(1, &golden.message);
        assert_eq!(message(2, &bytes), Ok(golden.as_version_1()), "{name}");
    }
}

#[test]
fn decode_detects_every_damaged_byte() {
    for (version, golden) in
        VERSIONS.flat_map(|version| goldens().into_iter().map(move |g| (version, g)))
    {
        let good = encoded(version, &golden.message);
        let meant = message(version, &good);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            assert_ne!(message(version, &bad), meant, "{} byte {at}", golden.message.name());
        }
    }
}

#[test]
fn lengths_are_refused_before_the_body_is_read() {
    let header = |bytes: u32, number: u16| {
        let mut header = [0; CONTROL_HEADER_BYTES];
        header[0..4].copy_from_slice(&bytes.to_le_bytes());
        header[4..6].copy_from_slice(&number.to_le_bytes());
        ControlHeader::parse(&header)
    };
    assert!(header(MAX_BODY_BYTES, 1).is_ok());
    assert!(matches!(header(MAX_BODY_BYTES + 1, 1), Err(WireError::TooLong { .. })));
    assert!(header(MAX_FINAL_BYTES, FINAL).is_ok());
    assert!(matches!(header(u32::MAX, FINAL), Err(WireError::TooLong { .. })));
    assert_eq!(header(0, 99), Err(WireError::UnknownMessage(99)));
}

#[test]
fn decode_refuses_leftover_bytes() {
    for version in VERSIONS {
        let error = message(version, &sealed(13, b"\x01\x00")).unwrap_err();
        assert_eq!(error.to_string(), "bad PING: 1 bytes are left over");
    }
}

#[test]
fn begin_outside_its_limits_is_refused() {
    let begin = goldens().swap_remove(0).message;
    let mut no_lanes = begin.clone();
    let mut no_slots = begin;
    if let ControlMessage::Begin { lanes, .. } = &mut no_lanes {
        *lanes = 0;
    }
    if let ControlMessage::Begin { layout, .. } = &mut no_slots {
        layout.clear();
    }
    for (version, bad) in VERSIONS.flat_map(|version| [(version, &no_lanes), (version, &no_slots)])
    {
        assert!(matches!(message(version, &encoded(version, bad)), Err(WireError::BadBody { .. })));
    }
}

/// Numbers take up to eight times their wire size in memory, so reading 64 MiB of them must stop
/// early.
#[test]
fn final_stops_reading_at_the_lane_limit() {
    let lanes = MAX_FINAL_BYTES as usize - 8;
    let mut body = Vec::new();
    let mut length = lanes;
    while length >= 0x80 {
        body.push(length as u8 | 0x80);
        length >>= 7;
    }
    body.push(length as u8);
    // The 17th number is the last valid one. A reader that goes on reports a different error.
    body.extend_from_slice(&[1; 17]);
    body.extend_from_slice(&[0xff; 16]);
    let error = ControlMessage::decode_body(FINAL, PROTOCOL_VERSION_MIN, &body).unwrap_err();
    let WireError::BadBody { message: "FINAL", detail } = error else { panic!("{error}") };
    let of_the_seventeenth = postcard::from_bytes::<Vec<u64>>(&body).unwrap_err().to_string();
    assert_ne!(detail, of_the_seventeenth, "it was read on");
}

#[test]
fn field_with_invalid_content_is_refused() {
    let golden = goldens();
    for (index, field, content) in [
        (0, 1, &b"\x1b[2J"[..]),
        (0, 2, &[0xff]),
        (0, 3, b"?"),
        (1, 3, &[0; 3]),
        (1, 3, &[0; 5]),
        (1, 4, b"?"),
        (0, 5, b"2"),
        (1, 5, b"?"),
        (2, 1, &[b'9'; 65]),
    ] {
        let mut body = encoded(1, &golden[index].message).split_off(CONTROL_HEADER_BYTES);
        put_optional(&mut body, field, content);
        let error = message(2, &sealed(index as u16 + 1, &body)).unwrap_err().to_string();
        let name = golden[index].message.name();
        assert!(error.starts_with(&format!("bad {name}: field {field}: ")), "{error}");
    }
}

/// Fields in ascending order, with numbers that no message of this release uses.
fn unknown_fields() -> impl Strategy<Value = Vec<(u16, Vec<u8>)>> {
    let content = prop::collection::vec(any::<u8>(), 0..40);
    prop::collection::btree_map(6_u16..0x8000, content, 1..6)
        .prop_map(|fields| fields.into_iter().collect())
}

proptest! {
    #[test]
    fn unknown_optional_fields_are_ignored(
        golden in prop::sample::select((0..goldens().len()).collect::<Vec<_>>()),
        fields in unknown_fields(),
    ) {
        let golden = goldens().swap_remove(golden);
        let mut body = encoded(2, &golden.message).split_off(CONTROL_HEADER_BYTES);
        fields.iter().for_each(|(number, content)| put_optional(&mut body, *number, content));
        let decoded = decoded(2, &sealed(golden.message.number(), &body));
        let ignored = fields.iter().map(|(number, _)| *number).collect();
        prop_assert_eq!(decoded, Ok(Decoded { message: golden.message, ignored }));
    }

    #[test]
    fn unknown_mandatory_field_is_refused_by_number(
        golden in prop::sample::select((0..goldens().len()).collect::<Vec<_>>()),
        fields in unknown_fields(),
        which in any::<prop::sample::Index>(),
    ) {
        let golden = goldens().swap_remove(golden);
        let mut body = encoded(2, &golden.message).split_off(CONTROL_HEADER_BYTES);
        let mandatory = which.index(fields.len());
        for (index, (number, content)) in fields.iter().enumerate() {
            let put = if index == mandatory { put_mandatory } else { put_optional };
            put(&mut body, *number, content);
        }
        let error = message(2, &sealed(golden.message.number(), &body)).unwrap_err();
        let (name, field) = (golden.message.name(), fields[mandatory].0);
        prop_assert_eq!(&error, &WireError::UnknownField { message: name, field });
        let text = error.to_string();
        let start = format!("{name} has the mandatory field {field}, ");
        prop_assert!(text.starts_with(&start), "{}", text);
    }

    #[test]
    fn fields_out_of_order_or_truncated_are_refused(
        golden in prop::sample::select((0..goldens().len()).collect::<Vec<_>>()),
        fields in unknown_fields(),
        again in any::<prop::sample::Index>(),
        cut in 1_usize..6,
    ) {
        let golden = goldens().swap_remove(golden);
        let number = golden.message.number();
        let mut body = encoded(2, &golden.message).split_off(CONTROL_HEADER_BYTES);
        for (number, content) in &fields {
            put_optional(&mut body, *number, content);
        }
        let is_bad = |body: &[u8]| {
            matches!(message(2, &sealed(number, body)), Err(WireError::BadBody { .. }))
        };
        // The last field's head or content is truncated.
        let last = fields[fields.len() - 1].1.len();
        prop_assert!(is_bad(&body[..body.len() - last.min(cut)]) || last == 0);
        prop_assert!(is_bad(&body[..body.len() - last - cut.min(5)]));
        let (again, content) = &fields[again.index(fields.len())];
        put_optional(&mut body, *again, content);
        prop_assert!(is_bad(&body));
    }

    #[test]
    fn any_bytes_never_panic(
        version in VERSIONS,
        number in 0_u16..21,
        body in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        // Every decoded message must survive another encoding.
        if let Ok(read) = message(version, &sealed(number, &body)) {
            prop_assert_eq!(message(version, &encoded(version, &read)), Ok(read));
        }
    }
}
