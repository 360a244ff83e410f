//! Recorded connections of real libvirt: `recorded/README.md`.

use vmferry_libvirt_rpc::{
    Call, CallGate, CallWatch, FinishReply, HEADER_BYTES, MigrateFlags, PacketHeader, Passed,
    PrepareCall, PrepareReply, Reply, ReplyWatch, Watched, refusal,
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

/// The numbers of a connection's packets.
fn procedures(mut bytes: &[u8]) -> Vec<i32> {
    let mut procedures = Vec::new();
    while let Some(head) = bytes.first_chunk::<HEADER_BYTES>() {
        let header = PacketHeader::parse(head).unwrap();
        procedures.push(header.procedure);
        bytes = &bytes[header.bytes as usize..];
    }
    procedures
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
            assert!(out.bytes == calls && out.refused.is_empty() && gate.is_between_packets());
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
fn watches_report_recorded_migrations() {
    for Recorded { calls, replies, uuid } in RECORDED {
        let (mut watch, mut out) = (CallWatch::new(), Watched::default());
        watch.push(calls, &mut out).unwrap();
        assert!(out.bytes == calls && out.unread.is_empty());
        let [Call::Prepare(prepare), Call::Finish(_)] = &out.calls[..] else {
            panic!("{:?}", out.calls);
        };
        is_the_prepare(prepare, uuid);
        let (mut watch, mut reported) = (ReplyWatch::new(), Vec::new());
        for call in &out.calls {
            watch.expect(call).unwrap();
        }
        for piece in replies.chunks(5) {
            watch.push(piece, &mut reported).unwrap();
        }
        assert!(watch.is_between_packets());
        let prepared = Reply::Prepare(PrepareReply { serial: 9, result: Ok(()) });
        let finished = Reply::Finish(FinishReply { serial: 10, result: Ok(()) });
        assert_eq!(reported, [prepared, finished]);
    }
}
