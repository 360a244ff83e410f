use super::*;
use crate::{MAX_LACKING_BYTES, MAX_STORAGE_SAMPLE_BYTES};

/// Frozen: a release that does not know a field of FINAL must refuse it.
#[test]
fn golden_bytes_of_the_fields_of_final() {
    for (paused, kind, sample, fields) in [
        (true, SessionKind::PreCopy, &b""[..], "018000000000"),
        (false, SessionKind::PostCopy, b"", "028000000000"),
        (true, SessionKind::PostCopy, b"", "018000000000028000000000"),
        (true, SessionKind::PreCopy, b"\xaa\xbb", "018000000000030002000000aabb"),
    ] {
        let (lane_sequences, state) = (vec![7], [0xee].into());
        let last = ControlMessage::Final {
            lane_sequences,
            digest: 1,
            state,
            paused,
            kind,
            storage_sample: sample.into(),
        };
        let bytes = encoded(2, &last);
        assert_eq!(hex(&bytes[CONTROL_HEADER_BYTES..]), format!("01070101ee{fields}"));
        assert_eq!(message(2, &bytes), Ok(last));
    }
}

/// Frozen: a release that does not know ENDED must read OWNS.
#[test]
fn ended_is_owns_with_a_field() {
    let ended = ControlMessage::Answer {
        session: SessionId([1; 16]),
        word: SessionWord::Ended,
        token: None,
    };
    let bytes = encoded(2, &ended);
    let session = "01".repeat(16);
    assert_eq!(hex(&bytes[CONTROL_HEADER_BYTES..]), format!("{session}03020000000000"));
    assert_eq!(message(2, &bytes), Ok(ended));
    let refused = |word: u8, field: &[u8], why: &str| {
        let body = [&[1; 16][..], &[word], field].concat();
        let error = message(2, &sealed(16, &body)).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(5, &[], "is a field, and not a word");
    refused(4, &[2, 0, 0, 0, 0, 0], "it contradicts the word");
    refused(3, &[2, 0, 1, 0, 0, 0, 9], "it has no content");
}

#[test]
fn lacking_is_bounded() {
    let lacking = |bytes| ControlMessage::Lacking { slot: SlotId(0), first: 0, bits: bytes };
    let most = lacking(vec![0xff; MAX_LACKING_BYTES]);
    assert_eq!(message(2, &encoded(2, &most)), Ok(most));
    let more = encoded(2, &lacking(vec![0xff; MAX_LACKING_BYTES + 1]));
    let error = message(2, &more).unwrap_err().to_string();
    assert_eq!(error, "bad LACKING: it has too many bits");
}

#[test]
fn sample_of_the_storage_is_bounded() {
    let last = |bytes: usize| ControlMessage::Final {
        lane_sequences: vec![7],
        digest: 1,
        state: [0xee].into(),
        paused: false,
        kind: SessionKind::PreCopy,
        storage_sample: vec![9; bytes],
    };
    let most = last(MAX_STORAGE_SAMPLE_BYTES);
    assert_eq!(message(2, &encoded(2, &most)), Ok(most));
    let error = message(2, &encoded(2, &last(MAX_STORAGE_SAMPLE_BYTES + 1))).unwrap_err();
    assert_eq!(error.to_string(), "bad FINAL: its sample of the storage is too long");
    let empty = sealed(5, &[1, 7, 1, 1, 0xee, 3, 0, 0, 0, 0, 0]);
    assert!(message(2, &empty).unwrap_err().to_string().contains("it is empty"));
}
