//! Any bytes, read as the RPC connection of a libvirt migration, in both directions.

use vmferry_libvirt_rpc::{
    Call, CallGate, HEADER_BYTES, Heard, KEEPALIVE_PROGRAM, MAX_MESSAGE_TEXT_BYTES, PacketHeader,
    PacketKind, PacketStatus, Passed, Reply, ReplyWatch, RpcError, SocketUri, finish_reply,
};

use super::input::Input;

/// A guest of this name is not admitted.
pub const REFUSED_GUEST: &str = "secret";

/// The input selects the size of the pieces, and contains everything that one side sends.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let size = usize::from(input.byte()) + 1;
    let bytes = input.0;
    let (passed, result) = gated(bytes, bytes.len().max(1));
    let (pieces, same) = gated(bytes, size);
    assert_eq!((&pieces, &same), (&passed, &result));
    assert!(passed.bytes.len() <= bytes.len());
    for refused in &passed.refused {
        is_a_reply(&refused.header, &refused.reply);
    }
    for call in &passed.calls {
        is_sound(call);
        finishes(call);
    }
    are_pongs(&passed.pongs);
    // What has passed passes again, unchanged.
    let (again, same) = gated(&passed.bytes, size);
    assert_eq!((&again.bytes, &again.calls), (&passed.bytes, &passed.calls));
    assert!(again.refused.is_empty() && again.pongs.is_empty() && same == Ok(()));
    replied(bytes, size, &passed);
    if let Ok(socket) = SocketUri::parse(&String::from_utf8_lossy(bytes)) {
        is_plain(&socket);
    }
}

/// The gate's decisions about bytes in pieces.
fn gated(bytes: &[u8], size: usize) -> (Passed, Result<(), RpcError>) {
    let mut gate = CallGate::new(Box::new(|call| match call.guest().name.as_str() {
        REFUSED_GUEST => Err("not admitted".to_owned()),
        _ => Ok(()),
    }));
    let mut out = Passed::default();
    let result = bytes.chunks(size).try_for_each(|piece| gate.push(piece, &mut out));
    (out, result)
}

/// The watch's results do not depend on the pieces, and what has passed passes again. Each awaited
/// reply is reported at most once, whatever libvirt sends.
fn replied(bytes: &[u8], size: usize, passed: &Passed) {
    let (heard, result) = heard(bytes, bytes.len().max(1), passed);
    let (pieces, same) = self::heard(bytes, size, passed);
    assert_eq!((&pieces, &same), (&heard, &result));
    assert!(heard.bytes.len() <= bytes.len() + refusals(passed).len());
    are_pongs(&heard.pongs);
    let (again, same) = self::heard(&heard.bytes, size, &Passed::default());
    assert_eq!((&again.bytes, same), (&heard.bytes, Ok(())));
    assert!(again.replies.is_empty() && again.pongs.is_empty());
    assert!(heard.replies.len() <= passed.calls.len());
    for reply in heard.replies {
        let serial = match reply {
            Reply::Prepare(reply) => reply.serial,
            Reply::Finish(reply) => reply.serial,
        };
        assert!(passed.calls.iter().any(|call| call.serial() == serial));
    }
}

/// What a watch reads that awaits the replies to calls: replies to other calls, then bytes in
/// pieces.
fn heard(bytes: &[u8], size: usize, passed: &Passed) -> (Heard, Result<(), RpcError>) {
    let (mut watch, mut out) = (ReplyWatch::new(), Heard::default());
    for call in &passed.calls {
        if watch.expect(call).is_err() {
            break;
        }
    }
    let refusals = refusals(passed);
    watch.push(&refusals, &mut out).expect("refusals are packets");
    assert!(watch.is_between_packets() && out.bytes == refusals);
    let result = bytes.chunks(size).try_for_each(|piece| watch.push(piece, &mut out));
    (out, result)
}

/// The replies to refused calls.
fn refusals(passed: &Passed) -> Vec<u8> {
    passed.refused.iter().flat_map(|refused| refused.reply.clone()).collect()
}

/// Whole pongs.
fn are_pongs(bytes: &[u8]) {
    let (packets, rest) = bytes.as_chunks::<HEADER_BYTES>();
    assert!(rest.is_empty());
    for packet in packets {
        let header = PacketHeader::parse(packet).unwrap();
        assert_eq!((header.bytes as usize, header.program), (HEADER_BYTES, KEEPALIVE_PROGRAM));
        assert_eq!((header.procedure, header.kind), (2, PacketKind::Message));
    }
}

/// A reply to a Finish is awaited, and says whether the guest runs.
fn finishes(call: &Call) {
    let Call::Finish(finish) = call else { return };
    for (result, runs) in [(Ok(()), !finish.cancelled), (Err("lost"), false)] {
        let (mut watch, mut out) = (ReplyWatch::new(), Heard::default());
        watch.expect(call).expect("the first");
        let packet = finish_reply(finish, result);
        watch.push(&packet, &mut out).expect("a reply is a packet");
        let [Reply::Finish(reply)] = &out.replies[..] else { panic!("{out:?}") };
        assert_eq!((reply.serial, reply.result.is_ok()), (finish.serial, runs));
        assert!(out.bytes == packet && watch.is_between_packets());
    }
}

/// A refusal is one packet, which replies to its call with an error.
fn is_a_reply(call: &PacketHeader, reply: &[u8]) {
    let header = PacketHeader::parse(reply.first_chunk().unwrap()).unwrap();
    assert_eq!(header.bytes as usize, reply.len());
    assert!(reply.len() <= HEADER_BYTES + MAX_MESSAGE_TEXT_BYTES + 64);
    assert_eq!((header.kind, header.status), (PacketKind::Reply, PacketStatus::Error));
    assert_eq!((header.serial, header.procedure), (call.serial, call.procedure));
    assert_eq!((header.program, header.version), (call.program, call.version));
}

/// The guest of a call that has passed is admitted, its name is a file name, and its sockets are
/// plain.
fn is_sound(call: &Call) {
    let name = &call.guest().name;
    assert!(name != REFUSED_GUEST && !name.is_empty() && !name.contains(['/', '\0', '\n']));
    let Call::Prepare(call) = call else { return };
    if let Ok(socket) = call.migrate_socket() {
        is_plain(&socket);
    }
    if let Ok(Some(socket)) = call.disks_socket() {
        is_plain(&socket);
    }
}

fn is_plain(socket: &SocketUri) {
    use std::path::Component::{Normal, RootDir};
    let mut parts = socket.path().components();
    assert_eq!(parts.next(), Some(RootDir));
    assert!(parts.all(|part| matches!(part, Normal(_))), "{socket:?}");
}
