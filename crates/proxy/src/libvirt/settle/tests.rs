use vmferry_handover::SourceFinish;
use vmferry_libvirt_rpc::{Guest, MigrateFlags};

use super::*;

fn packet(program: u32, procedure: u32, kind: u32, payload: u32) -> Vec<u8> {
    let words = [28 + payload, program, 1, procedure, kind, 5, 0];
    let mut bytes: Vec<u8> = words.into_iter().flat_map(u32::to_be_bytes).collect();
    bytes.resize(bytes.len() + payload as usize, 0);
    bytes
}

#[test]
fn pings_and_last_calls_are_answered_in_any_pieces() {
    let sent = [
        packet(KEEPALIVE_PROGRAM, 1, 2, 0),
        packet(0x2000_8086, 361, 0, 8),
        packet(KEEPALIVE_PROGRAM, 2, 2, 0),
        packet(0x2000_8086, 2, 0, 0),
    ]
    .concat();
    let expected = [
        packet(KEEPALIVE_PROGRAM, 2, 2, 0),
        packet(0x2000_8086, 361, 1, 0),
        packet(0x2000_8086, 2, 1, 0),
    ]
    .concat();
    for size in [1, 7, 28, sent.len()] {
        let mut heard = Heard::default();
        let answers: Vec<u8> =
            sent.chunks(size).flat_map(|piece| heard.answer(piece).unwrap()).collect();
        assert_eq!(answers, expected);
    }
    assert_eq!(Heard::default().answer(b"GET / HTTP/1.1\r\nHost: of a program\r\n"), None);
}

/// Such as the lookup of the other host's name behind a network that is cut.
#[test]
fn libvirt_is_answered_while_the_other_host_is_asked() {
    let (mut libvirt, ours) = UnixStream::pair().unwrap();
    let (done, is_done) = channel();
    let answered = std::thread::spawn(move || {
        let mut heard = Heard::default();
        let (mut socket, mut is_open) = (Some(ours), true);
        attend_during(&mut socket, &mut is_open, &mut heard, move || is_done.recv().ok())
    });
    for _ in 0..3 {
        libvirt.write_all(&packet(KEEPALIVE_PROGRAM, 1, 2, 0)).unwrap();
        let mut pong = [0; 28];
        libvirt.read_exact(&mut pong).unwrap();
        assert_eq!(pong[..], packet(KEEPALIVE_PROGRAM, 2, 2, 0));
    }
    done.send(7).unwrap();
    assert_eq!(answered.join().unwrap(), Some(7));
}

/// The other thread can't write while the ledger is locked, as on a disk that hangs.
#[test]
fn libvirt_is_answered_while_a_record_is_written() {
    let place = tempfile::tempdir().unwrap();
    let guest = Guest { name: "web".into(), uuid: uuid::Uuid::nil() };
    let session = SessionId([2; 16]);
    let mut ledger = SourceLedger::begin(place.path(), session, &guest, "host-b").unwrap();
    ledger.send().unwrap();
    let ledger = Arc::new(Mutex::new(ledger));
    let (mut libvirt, ours) = UnixStream::pair().unwrap();
    libvirt.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let call = FinishCall { serial: 1, guest, cancelled: false, flags: MigrateFlags(0) };
    let (peer, socket, heard) = ("host-b".into(), Some(ours), Heard::default());
    let of_thread = Arc::clone(&ledger);
    let mut unanswered = Unanswered { session, ledger: of_thread, call, peer, socket, heard };
    let hangs = ledger.lock();
    let settled = std::thread::spawn(move || {
        let mut is_open = true;
        unanswered.step(&mut is_open, Heeded::Peer(FinishAnswer::Word(FinishWord::Runs)))
    });
    for _ in 0..3 {
        libvirt.write_all(&packet(KEEPALIVE_PROGRAM, 1, 2, 0)).unwrap();
        let mut pong = [0; 28];
        libvirt.read_exact(&mut pong).unwrap();
        assert_eq!(pong[..], packet(KEEPALIVE_PROGRAM, 2, 2, 0));
    }
    assert!(!settled.is_finished(), "nothing is said before the record is on disk");
    drop(hangs);
    let said = settled.join().unwrap().unwrap();
    assert_eq!(said, SourceAction::Reply(FinishWord::Runs));
    assert_eq!(ledger.lock().state(), SourceFinish::Answered(FinishWord::Runs));
}
