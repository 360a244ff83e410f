use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::packets::{
    KEEPALIVE, REMOTE, UUID, Value, call, cookie, definition, finish, open, packet, ping, pong,
    prepare, prepare_args,
};
use crate::{ALLOWED_PROCEDURES, MAX_BUFFERED_BYTES, MAX_MESSAGE_BYTES, OPEN_URI};

/// A gate that admits every guest but `secret`.
fn gate() -> CallGate {
    CallGate::new(Box::new(|call| match call.guest().name.as_str() {
        "secret" => Err("the policy does not name secret".to_owned()),
        _ => Ok(()),
    }))
}

fn run<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> (Passed, Result<(), RpcError>, CallGate) {
    let (mut gate, mut out) = (gate(), Passed::default());
    let mut result = Ok(());
    for chunk in chunks {
        result = gate.push(chunk, &mut out);
        if result.is_err() {
            break;
        }
    }
    (out, result, gate)
}

fn messages(out: &Passed) -> Vec<&str> {
    out.refused.iter().map(|refused| refused.message.as_str()).collect()
}

/// A whole migration as libvirt makes it.
fn migration() -> Vec<Vec<u8>> {
    vec![
        call(66, 0, &[]),
        call(60, 1, &[0, 0, 0, 10]),
        call(1, 2, &open(Some(OPEN_URI))),
        call(360, 3, &[]),
        prepare(4, "web"),
        finish(5, "web", 0),
        call(361, 6, &[]),
        call(2, 7, &[]),
    ]
}

#[test]
fn gate_passes_a_migration_unchanged() {
    let bytes = migration().concat();
    let (out, result, gate) = run([&bytes[..]]);
    assert_eq!(result, Ok(()));
    assert_eq!(out.bytes, bytes);
    assert_eq!(messages(&out), [""; 0]);
    assert_eq!(out.calls.iter().map(Call::serial).collect::<Vec<_>>(), [4, 5]);
    assert!(out.calls.iter().all(|call| call.guest().name == "web"));
    assert!(out.pongs.is_empty() && gate.is_between_packets());
}

#[test]
fn gate_answers_pings_and_passes_no_keepalive_message() {
    let packets = [ping(), call(66, 0, &[]), pong(), prepare(4, "web"), ping(), ping()];
    let bytes = packets.concat();
    for size in [1, 5, bytes.len()] {
        let (out, result, gate) = run(bytes.chunks(size));
        assert_eq!((result, out.refused.len(), out.calls.len()), (Ok(()), 0, 1));
        assert_eq!(out.bytes, [&packets[1][..], &packets[3]].concat());
        assert_eq!(out.pongs, pong().repeat(3));
        assert!(gate.is_between_packets());
    }
}

/// libvirt's pings can be answered while a Prepare is read.
#[test]
fn gate_is_between_packets_while_a_call_is_collected_or_dropped() {
    for bytes in [prepare(4, "web"), call(11, 1, b"refused")] {
        let (out, result, gate) = run([&bytes[..bytes.len() - 1]]);
        assert_eq!((out, result), (Passed::default(), Ok(())));
        assert!(gate.is_between_packets());
    }
    let (out, _, gate) = run([&call(60, 1, &[0; 4])[..30]]);
    assert!(out.bytes.len() == 30 && !gate.is_between_packets());
}

#[test]
fn gate_refuses_every_procedure_that_is_not_in_the_table() {
    let allowed = ALLOWED_PROCEDURES.map(|row| row.procedure as u32);
    for number in (0..500).chain([u32::MAX, 1 << 31]).filter(|number| !allowed.contains(number)) {
        let (out, result, _) = run([&call(number, 7, &[1; 12])[..]]);
        assert_eq!(result, Ok(()));
        assert!(out.bytes.is_empty() && out.calls.is_empty());
        let [refused] = &out.refused[..] else { panic!("{out:?}") };
        assert_eq!(refused.reply, refusal(&refused.header, &refused.message));
        assert_eq!((refused.header.serial, refused.header.procedure), (7, number as i32));
    }
}

#[test]
fn gate_refuses_other_programs_and_versions() {
    for (program, version) in [(0x2000_8087, 1), (0x0690_0690, 1), (REMOTE, 2), (KEEPALIVE, 1)] {
        let (out, result, _) = run([&packet([program, version, 66, 0, 1, 0], &[])[..]]);
        assert_eq!((result, out.bytes.len(), out.refused.len()), (Ok(()), 0, 1));
        assert_eq!(out.refused[0].reply[4..8], program.to_be_bytes());
        assert_eq!(out.refused[0].reply[8..12], version.to_be_bytes());
    }
}

#[test]
fn gate_ends_on_packets_that_nobody_answers() {
    let headers = [
        [REMOTE, 1, 66, 1, 1, 0],
        [REMOTE, 1, 66, 2, 1, 0],
        [REMOTE, 1, 303, 3, 1, 2],
        [REMOTE, 1, 66, 4, 1, 0],
        [REMOTE, 1, 66, 5, 1, 0],
        [REMOTE, 1, 303, 6, 1, 0],
    ];
    for header in headers {
        let bytes = [call(66, 0, &[]), packet(header, &[]), call(66, 2, &[])].concat();
        let (out, result, mut gate) = run([&bytes[..]]);
        assert!(matches!(result, Err(RpcError::Unanswerable { .. })), "{result:?}");
        assert_eq!(out.bytes, call(66, 0, &[]));
        let mut later = Passed::default();
        assert_eq!(gate.push(&call(66, 3, &[]), &mut later), result);
        assert_eq!(later, Passed::default());
    }
    for (header, payload) in [
        ([KEEPALIVE, 2, 1, 2, 0, 0], &[][..]),
        ([KEEPALIVE, 1, 3, 2, 0, 0], &[]),
        ([KEEPALIVE, 1, 1, 2, 0, 1], &[]),
        ([KEEPALIVE, 1, 1, 2, 0, 0], &[0; 4]),
    ] {
        let (out, result, _) = run([&packet(header, payload)[..]]);
        assert!(matches!(result, Err(RpcError::BadKeepAlive { .. })), "{result:?}");
        assert_eq!(out, Passed::default());
    }
}

#[test]
fn gate_ends_on_bytes_of_another_protocol() {
    let mut kind = call(66, 0, &[]);
    kind[19] = 9;
    let mut status = call(66, 0, &[]);
    status[27] = 3;
    for bytes in [&b"GET / HTTP/1.1"[..], &[0; 28], &[0xff; 28], &kind, &status] {
        let (out, result, _) = run([bytes]);
        assert!(result.is_err() && out == Passed::default(), "{result:?}");
    }
}

#[test]
fn gate_refuses_large_arguments_and_stores_none_of_them() {
    let long = |procedure, bytes: u32| {
        let mut head = call(procedure, 1, &[]);
        head[..4].copy_from_slice(&(bytes + 28).to_be_bytes());
        head
    };
    for (procedure, bytes) in
        [(303, MAX_BUFFERED_BYTES + 1), (306, MAX_MESSAGE_BYTES - 24), (1, 5000), (66, 4), (60, 8)]
    {
        let (mut gate, mut out) = (gate(), Passed::default());
        gate.push(&long(procedure, bytes), &mut out).unwrap();
        let chunk = [1; 4096];
        let mut left = bytes as usize;
        while left > 0 {
            // The client waits for the reply only after it has sent its call.
            assert_eq!(out, Passed::default());
            let now = left.min(chunk.len());
            gate.push(&chunk[..now], &mut out).unwrap();
            left -= now;
        }
        assert!(out.bytes.is_empty());
        assert!(messages(&out)[0].contains("bytes of arguments"), "{:?}", messages(&out));
        // The connection continues.
        gate.push(&call(66, 2, &[]), &mut out).unwrap();
        assert_eq!(out.bytes, call(66, 2, &[]));
    }
}

#[test]
fn gate_streams_header_only_calls_after_their_header() {
    let (mut gate, mut out) = (gate(), Passed::default());
    let bytes = call(60, 1, &[0, 0, 0, 13]);
    gate.push(&bytes[..27], &mut out).unwrap();
    assert!(out.bytes.is_empty());
    gate.push(&bytes[27..30], &mut out).unwrap();
    assert_eq!(out.bytes, bytes[..30]);
}

#[test]
fn gate_refuses_what_the_caller_does_not_admit() {
    let bytes = [prepare(1, "secret"), finish(2, "secret", 0)].concat();
    let (out, result, _) = run([&bytes[..]]);
    assert_eq!(result, Ok(()));
    assert!(out.bytes.is_empty() && out.calls.is_empty());
    let [first, second] = messages(&out)[..] else { panic!("{out:?}") };
    assert_eq!(first, "the policy does not name secret");
    assert!(second.contains("no Prepare for the guest \"secret\""), "{second}");
}

#[test]
fn gate_asks_about_the_name_at_the_destination() {
    let xml = definition("web", UUID);
    let list =
        [("destination_xml", Value::Text(&xml)), ("destination_name", Value::Text("secret"))];
    let bytes = call(303, 1, &prepare_args(&list, &cookie("web", UUID), 3));
    let (out, ..) = run([&bytes[..]]);
    assert_eq!(messages(&out), ["the policy does not name secret"]);
}

#[test]
fn gate_refuses_bad_arguments_and_continues() {
    let open = call(1, 1, &open(Some("qemu+ext:///system?command=/bin/sh")));
    let status = packet([REMOTE, 1, 66, 0, 2, 1], &[]);
    let nothing = call(303, 3, &[]);
    let garbage = call(306, 4, &[0xff; 64]);
    let tunnelled = call(303, 5, &prepare_args(&[], b"", 7));
    let last = call(66, 6, &[]);
    let bytes = [open, status, nothing, garbage, tunnelled, last.clone()].concat();
    let (out, result, _) = run([&bytes[..]]);
    assert_eq!(result, Ok(()));
    assert_eq!(out.bytes, last);
    let expected = ["only to \"qemu:///system\"", "status", "ends inside", "limit", "tunnelled"];
    for (message, expected) in messages(&out).into_iter().zip(expected) {
        assert!(message.contains(expected), "{message}");
    }
    assert_eq!(out.refused.len(), 5);
}

#[test]
fn gate_bounds_the_prepared_guests() {
    let calls: Vec<u8> =
        (0..=MAX_PREPARED_GUESTS).flat_map(|n| prepare(1, &format!("web{n}"))).collect();
    let (out, ..) = run([&calls[..]]);
    assert_eq!((out.calls.len(), out.refused.len()), (MAX_PREPARED_GUESTS, 1));
}

/// Packets of all sorts, and how a simple reading judges each.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Verdict {
    Pass,
    Ping,
    Refuse,
    /// Passes if a Prepare has passed since the last Finish.
    IfPrepared,
    End,
}

fn any_packet() -> impl Strategy<Value = (Vec<u8>, Verdict)> {
    use Verdict::{End, IfPrepared, Pass, Ping, Refuse};
    let small = prop::collection::vec(any::<u8>(), 0..40);
    prop_oneof![
        any::<Index>().prop_map(|at| at.get(&migration()[..5]).clone()).prop_map(|it| (it, Pass)),
        Just((finish(8, "web", 1), IfPrepared)),
        Just((prepare(9, "secret"), Refuse)),
        (4_u32..59, small.clone())
            .prop_map(|(number, payload)| { (call(number, 1, &payload), Refuse) }),
        (prop::sample::select(vec![1, 303, 306]), small)
            .prop_map(|(number, payload)| { (call(number, 2, &payload), Refuse) }),
        prop_oneof![
            20 => Just((ping(), Ping)),
            1 => Just((packet([REMOTE, 1, 66, 4, 1, 0], b"x"), End)),
            1 => Just((vec![0, 0, 0, 27], End)),
        ],
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Any chunking gives what a simple reading of the packets gives.
    #[test]
    fn gate_in_any_chunks_agrees_with_a_simple_reading(
        packets in prop::collection::vec(any_packet(), 0..12),
        cuts in prop::collection::vec(any::<Index>(), 0..20),
    ) {
        let bytes: Vec<u8> = packets.iter().flat_map(|(packet, _)| packet.clone()).collect();
        let mut expected = Vec::new();
        let (mut refused, mut pings, mut ends, mut prepared) = (0, 0, false, false);
        for (packet, verdict) in &packets {
            let passes = match verdict {
                Verdict::Pass => true,
                Verdict::Ping => { pings += 1; continue }
                Verdict::Refuse => false,
                Verdict::IfPrepared => std::mem::take(&mut prepared),
                Verdict::End => { ends = true; break }
            };
            if passes {
                expected.extend_from_slice(packet);
                prepared |= *packet == prepare(4, "web");
            } else {
                refused += 1;
            }
        }
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let chunks = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]);
        let (out, result, _) = run(chunks);
        prop_assert_eq!(&out.bytes, &expected);
        prop_assert_eq!(out.refused.len(), refused);
        prop_assert_eq!(&out.pongs, &pong().repeat(pings));
        prop_assert_eq!(result.is_err(), ends);
        let (one, same, _) = run([&bytes[..]]);
        prop_assert_eq!((&one, &same), (&out, &result));
        let (single, same, _) = run(bytes.chunks(1));
        prop_assert_eq!((&single, &same), (&out, &result));
    }

    /// Damage never makes a panic, and the gate never passes more than it was given.
    #[test]
    fn gate_survives_damage(
        at in any::<Index>(),
        value in any::<u8>(),
        cut in any::<Index>(),
        garbage in prop::collection::vec(any::<u8>(), 40),
    ) {
        let mut bytes = migration().concat();
        *at.get_mut(&mut bytes) = value;
        bytes.truncate(cut.index(bytes.len() + 1));
        bytes.extend(garbage);
        let (out, ..) = run([&bytes[..]]);
        prop_assert!(out.bytes.len() <= bytes.len());
        for refused in &out.refused {
            prop_assert!(refused.reply.len() < 3000);
        }
    }
}
