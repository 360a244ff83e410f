//! Recorded connections of real libvirt: `recorded/README.md`.

use vmferry_libvirt_rpc::{
    Call, CallGate, FinishReply, HEADER_BYTES, Heard, MigrateFlags, PacketHeader, PacketKind,
    PacketStatus, Passed, PrepareCall, PrepareReply, Reply, ReplyWatch, finish_reply, refusal,
};

struct Recorded {
    calls: &'static [u8],
    replies: &'static [u8],
    uuid: &'static str,
}

const RECORDED: [Recorded; 2] = [
    Recorded {
        calls: include_bytes!("recorded/9.0-calls.bin"),
        replies: include_bytes!("recorded/9.0-replies.bin"),
        uuid: "ec6cfb5b-f640-44d1-a7e7-e29e616706f5",
    },
    Recorded {
        calls: include_bytes!("recorded/11.3-calls.bin"),
        replies: include_bytes!("recorded/11.3-replies.bin"),
        uuid: "c68c3d2e-c137-47dc-a8b4-1791b6d534ee",
    },
];

fn gate(admits: bool) -> CallGate {
    CallGate::new(Box::new(move |_| if admits { Ok(()) } else { Err("not admitted".to_owned()) }))
}

/// The calls of interest of a connection.
fn passed(calls: &[u8]) -> Vec<Call> {
    let mut out = Passed::default();
    gate(true).push(calls, &mut out).unwrap();
    out.calls
}

/// A connection's packets.
fn packets(mut bytes: &[u8]) -> impl Iterator<Item = (PacketHeader, &[u8])> {
    std::iter::from_fn(move || {
        let header = PacketHeader::parse(bytes.first_chunk()?).unwrap();
        Some((header, bytes.split_off(..header.bytes as usize).unwrap()))
    })
}

/// The numbers of a connection's packets.
fn procedures(bytes: &[u8]) -> Vec<i32> {
    packets(bytes).map(|(header, _)| header.procedure).collect()
}

fn is_the_prepare(call: &PrepareCall, uuid: &str) {
    assert_eq!((call.serial, call.guest.name.as_str()), (9, "bare"));
    assert_eq!((call.guest.uuid.to_string().as_str(), &call.new_name), (uuid, &None));
    assert_eq!(call.migrate_socket().unwrap().path().to_str(), Some("/tmp/lv/shared/m"));
    assert_eq!(call.disks_socket(), Ok(None));
    assert!(call.flags.contains(MigrateFlags::PEER2PEER));
    assert!(call.xml.starts_with("<domain type='kvm'>\n"));
}

#[test]
fn gate_passes_recorded_migrations_unchanged() {
    for Recorded { calls, uuid, .. } in RECORDED {
        for size in [1, 7, 4096, calls.len()] {
            let (mut gate, mut out) = (gate(true), Passed::default());
            for piece in calls.chunks(size) {
                gate.push(piece, &mut out).unwrap();
            }
            assert!(
                out.bytes == calls
                    && out.refused.is_empty()
                    && out.pongs.is_empty()
                    && gate.is_between_packets()
            );
            let [Call::Prepare(prepare), Call::Finish(finish)] = &out.calls[..] else {
                panic!("{:?}", out.calls);
            };
            is_the_prepare(prepare, uuid);
            assert_eq!((finish.serial, finish.cancelled), (10, false));
            assert_eq!((&finish.guest, finish.flags), (&prepare.guest, prepare.flags));
        }
    }
}

#[test]
fn recorded_migrations_need_only_these_procedures() {
    for Recorded { calls, replies, .. } in RECORDED {
        let expected = [66, 60, 1, 60, 60, 360, 60, 60, 60, 303, 306, 361, 2];
        assert_eq!(procedures(calls), expected);
        assert_eq!(procedures(replies), expected);
    }
}

#[test]
fn gate_refuses_a_recorded_guest_that_is_not_admitted() {
    for Recorded { calls, .. } in RECORDED {
        let (mut gate, mut out) = (gate(false), Passed::default());
        gate.push(calls, &mut out).unwrap();
        assert_eq!(procedures(&out.bytes), [66, 60, 1, 60, 60, 360, 60, 60, 60, 361, 2]);
        let [prepare, finish] = &out.refused[..] else { panic!("{:?}", out.refused) };
        assert_eq!(prepare.reply, refusal(&prepare.header, "not admitted"));
        assert_eq!((prepare.header.serial, finish.header.serial), (9, 10));
    }
}

#[test]
fn reply_watch_reports_recorded_migrations() {
    for Recorded { calls, replies, .. } in RECORDED {
        let (mut watch, mut heard) = (ReplyWatch::new(), Heard::default());
        for call in &passed(calls) {
            watch.expect(call).unwrap();
        }
        for piece in replies.chunks(5) {
            watch.push(piece, &mut heard).unwrap();
        }
        assert!(watch.is_between_packets());
        assert!(heard.bytes == replies && heard.pongs.is_empty());
        let prepared = Reply::Prepare(PrepareReply { serial: 9, result: Ok(()) });
        let finished = Reply::Finish(FinishReply { serial: 10, result: Ok(()) });
        assert_eq!(heard.replies, [prepared, finished]);
    }
}

/// The fields of a `remote_domain_migrate_finish3_params_ret`.
#[derive(Debug, PartialEq)]
struct FinishFields {
    name: String,
    uuid: String,
    id: i32,
    cookie: Vec<u8>,
}

impl FinishFields {
    /// Reads a whole reply packet. It shares no code with the encoder.
    fn read(packet: &[u8]) -> Self {
        let header = PacketHeader::parse(packet.first_chunk().unwrap()).unwrap();
        assert_eq!((header.kind, header.status), (PacketKind::Reply, PacketStatus::Ok));
        let mut left = &packet[HEADER_BYTES..header.bytes as usize];
        let mut take = |bytes: usize| left.split_off(..bytes).unwrap();
        let length = u32::from_be_bytes(take(4).try_into().unwrap()) as usize;
        let name = take(length.next_multiple_of(4))[..length].to_vec();
        let uuid = take(16).iter().map(|byte| format!("{byte:02x}")).collect();
        let id = i32::from_be_bytes(take(4).try_into().unwrap());
        let length = u32::from_be_bytes(take(4).try_into().unwrap()) as usize;
        let cookie = take(length.next_multiple_of(4))[..length].to_vec();
        assert!(left.is_empty(), "{left:?}");
        Self { name: String::from_utf8(name).unwrap(), uuid, id, cookie }
    }
}

#[test]
fn finish_reply_has_the_layout_of_a_recorded_one() {
    for Recorded { calls, replies, uuid } in RECORDED {
        let passed = passed(calls);
        let [_, Call::Finish(call)] = &passed[..] else { panic!("{passed:?}") };
        let real = packets(replies).find(|(header, _)| header.procedure == 306).unwrap();
        let ours = finish_reply(call, Ok(()));
        let header = PacketHeader::parse(ours.first_chunk().unwrap()).unwrap();
        assert_eq!(header.bytes as usize, ours.len());
        assert_eq!(header, PacketHeader { bytes: header.bytes, ..real.0 });
        let real = FinishFields::read(real.1);
        let uuid = uuid.replace('-', "");
        assert_eq!((&real.name[..], &real.uuid), ("bare", &uuid));
        assert!(real.id > 0 && real.cookie.starts_with(b"<qemu-migration>"));
        assert_eq!(FinishFields::read(&ours), FinishFields { id: -1, cookie: Vec::new(), ..real });
    }
}
