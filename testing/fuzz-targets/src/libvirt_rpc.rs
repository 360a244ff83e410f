//! Any bytes, read as the RPC connection of a libvirt migration, in both directions.

use vmferry_libvirt_rpc::{
    Call, CallGate, CallWatch, HEADER_BYTES, MAX_MESSAGE_TEXT_BYTES, PacketHeader, PacketKind,
    PacketStatus, Passed, Reply, ReplyWatch, RpcError, SocketUri, Watched,
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
    }
    // What has passed passes again, unchanged.
    let (again, same) = gated(&passed.bytes, size);
    assert_eq!((&again.bytes, &again.calls), (&passed.bytes, &passed.calls));
    assert!(again.refused.is_empty() && same == Ok(()));
    watched(bytes, size, &passed, &result);
    replied(bytes, size, &passed);
    if let Ok(socket) = SocketUri::parse(&String::from_utf8_lossy(bytes)) {
        is_plain(&socket);
    }
}

/// The gate's decisions about bytes in pieces.
fn gated(bytes: &[u8], size: usize) -> (Passed, Result<(), RpcError>) {
    let mut gate = CallGate::new(Box::new(|call| match call.guest.name.as_str() {
        REFUSED_GUEST => Err("not admitted".to_owned()),
        _ => Ok(()),
    }));
    let mut out = Passed::default();
    let result = bytes.chunks(size).try_for_each(|piece| gate.push(piece, &mut out));
    (out, result)
}

/// A watch passes everything, and knows the calls that have passed the gate.
fn watched(bytes: &[u8], size: usize, passed: &Passed, gated: &Result<(), RpcError>) {
    let (mut watch, mut out) = (CallWatch::new(), Watched::default());
    let result = bytes.chunks(size).try_for_each(|piece| watch.push(piece, &mut out));
    assert!(bytes.starts_with(&out.bytes));
    if result.is_ok() && watch.is_between_packets() {
        assert_eq!(out.bytes, bytes);
    }
    if gated.is_ok() {
        assert_eq!(result, Ok(()));
        for call in &passed.calls {
            assert!(matches!(call, Call::Finish(_)) || out.calls.contains(call), "{call:?}");
        }
    }
}

/// Each awaited reply is reported at most once, whatever libvirt sends, and refusals are packets.
fn replied(bytes: &[u8], size: usize, passed: &Passed) {
    let (mut watch, mut replies) = (ReplyWatch::new(), Vec::new());
    for call in &passed.calls {
        if watch.expect(call).is_err() {
            break;
        }
    }
    for refused in &passed.refused {
        watch.push(&refused.reply, &mut replies).expect("a refusal is a packet");
        assert!(watch.is_between_packets());
    }
    let _ = bytes.chunks(size).try_for_each(|piece| watch.push(piece, &mut replies));
    assert!(replies.len() <= passed.calls.len());
    for reply in replies {
        let serial = match reply {
            Reply::Prepare(reply) => reply.serial,
            Reply::Finish(reply) => reply.serial,
        };
        assert!(passed.calls.iter().any(|call| call.serial() == serial));
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
