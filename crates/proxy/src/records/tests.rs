//! Bytes of records.

use vmferry_wire::ReasonCode;

use super::*;

const SESSION: SessionId = SessionId([7; 16]);

fn directory() -> String {
    "host-b".into()
}

#[test]
fn openings_have_these_bytes() {
    let golden = [
        (
            Target::Libvirt { directory: directory(), session: SESSION },
            "01 01 07.00.00.00.00.00.00.00 06.00 host-b 24.00 07070707-0707-0707-0707-070707070707",
        ),
        (
            Target::Socket { directory: directory(), file: "web".into() },
            "02 01 07.00.00.00.00.00.00.00 06.00 host-b 03.00 web",
        ),
        (Target::Forward { name: "ssh".into() }, "03 01 07.00.00.00.00.00.00.00 03.00 ssh 00.00"),
        (
            Target::Word { session: SESSION },
            "04 01 07.00.00.00.00.00.00.00 24.00 07070707-0707-0707-0707-070707070707 00.00",
        ),
        (
            Target::Receive(ReceiveRequest {
                template: "small".into(),
                guest: GuestIdentity { uuid: uuid::Uuid::nil(), name: "my web".into() },
                session: SESSION,
            }),
            "05 01 07.00.00.00.00.00.00.00 05.00 small 50.00 07070707-0707-0707-0707-070707070707 \
             20 00000000-0000-0000-0000-000000000000 20 my 20 web",
        ),
        (
            Target::Judge(GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() }),
            "06 01 07.00.00.00.00.00.00.00 24.00 00000000-0000-0000-0000-000000000000 03.00 web",
        ),
    ];
    for (target, golden) in golden {
        let (opening, mut bytes) = (Opening { target, is_known: true, received: 7 }, Vec::new());
        opening.write(&mut bytes).unwrap();
        let mut expected = Vec::new();
        for word in golden.split(' ') {
            let number = |text: &str| u8::from_str_radix(text, 16).ok().filter(|_| text.len() == 2);
            match word.split('.').map(number).collect::<Option<Vec<u8>>>() {
                Some(numbers) => expected.extend(numbers),
                None => expected.extend(word.as_bytes()),
            }
        }
        assert_eq!(bytes, expected, "{golden}");
        assert_eq!(Opening::read(&mut &bytes[..]).unwrap(), opening);
        assert!(Opening::read(&mut &bytes[..bytes.len() - 1]).is_err());
    }
}

#[test]
fn answers_are_read_as_written() {
    for answer in [
        Answer::Opened { received: u64::MAX },
        Answer::Refused { reason: "no rule names this host".into() },
        Answer::Word(FinishAnswer::AskAgain),
        Answer::Receiving,
        Answer::NotReceiving(Reason::new(ReasonCode::Busy, "too many")),
    ] {
        let mut bytes = Vec::new();
        answer.write(&mut bytes).unwrap();
        assert_eq!(Answer::read(&mut &bytes[..]).unwrap(), answer);
    }
    assert!(matches!(
        Answer::read(&mut &[9_u8][..]),
        Err(RecordError::Unknown { what: "answer", value: 9 })
    ));
}

#[test]
fn long_texts_are_cut_when_written_and_refused_when_read() {
    let reason = "é".repeat(MAX_REASON_BYTES);
    let mut bytes = Vec::new();
    Answer::Refused { reason }.write(&mut bytes).unwrap();
    assert_eq!(bytes.len(), 3 + MAX_REASON_BYTES);
    assert!(Answer::read(&mut &bytes[..]).is_ok());
    bytes[1..3].copy_from_slice(&u16::MAX.to_le_bytes());
    assert!(matches!(
        Answer::read(&mut &bytes[..]),
        Err(RecordError::BadText { bytes: 65535, .. })
    ));
}

#[test]
fn record_kinds_are_read_as_written() {
    for number in 0..=255 {
        match RecordKind::from_number(number) {
            Ok(kind) => assert_eq!(kind.number(), number),
            Err(error) => assert!(!(2..=5).contains(&number), "{error}"),
        }
    }
}
