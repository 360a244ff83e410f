use super::*;
use crate::MAX_LACKING_BYTES;

/// Frozen: a release that does not know a field of FINAL must refuse it.
#[test]
fn golden_bytes_of_the_fields_of_final() {
    for (paused, kind, fields) in [
        (true, SessionKind::PreCopy, "018000000000"),
        (false, SessionKind::PostCopy, "028000000000"),
        (true, SessionKind::PostCopy, "018000000000028000000000"),
    ] {
        let (lane_sequences, state) = (vec![7], [0xee].into());
        let last = ControlMessage::Final { lane_sequences, digest: 1, state, paused, kind };
        let bytes = encoded(2, &last);
        assert_eq!(hex(&bytes[CONTROL_HEADER_BYTES..]), format!("01070101ee{fields}"));
        assert_eq!(message(2, &bytes), Ok(last));
    }
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
