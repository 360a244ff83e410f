//! Round trips, refusals by name, and arbitrary bytes, which cause no panic and no undetected
//! change.

use proptest::prelude::*;

use super::*;

const A: SectionKind = SectionKind::mandatory("a", 2);
const B: SectionKind = SectionKind::optional("b", 1);

fn sample() -> Vec<u8> {
    let mut writer = StateWriter::new();
    writer.abi(&A, 0, &[1u64, 2, 3]).unwrap();
    writer.section(&A, 1, &[]).unwrap();
    writer.section(&B, 0, b"something else").unwrap();
    writer.finish().to_vec()
}

#[test]
fn sections_round_trip() {
    let bytes = sample();
    let reader = StateReader::parse(&bytes).unwrap();
    reader.refuse_unknown(&[&[A, B]]).unwrap();
    assert_eq!(reader.section(&A, 0).unwrap().abi::<[u64; 3]>().unwrap(), [1, 2, 3]);
    assert_eq!(reader.section(&A, 0).unwrap().abi_list::<u64>(3).unwrap(), [1, 2, 3]);
    assert_eq!(reader.section(&B, 0).unwrap().payload(), b"something else");
    assert_eq!(reader.section(&A, 7).unwrap_err(), StateError::Missing { name: "a", instance: 7 });
    assert!(reader.optional(&B, 1).unwrap().is_none());
}

#[test]
fn abi_of_another_size_is_refused_with_section_and_offset() {
    let bytes = sample();
    let section = StateReader::parse(&bytes).unwrap().section(&A, 0).unwrap();
    let error = section.abi::<[u64; 4]>().unwrap_err();
    assert!(
        matches!(error, StateError::Invalid { ref what, offset: 64, .. } if what.contains("\"a\"")),
        "{error}"
    );
    assert!(section.abi_list::<[u64; 2]>(8).is_err());
    assert!(section.abi_list::<u64>(2).is_err());
}

#[test]
fn unknown_mandatory_and_newer_sections_are_refused_by_name() {
    let bytes = sample();
    let reader = StateReader::parse(&bytes).unwrap();
    assert_eq!(
        reader.refuse_unknown(&[&[B]]).unwrap_err(),
        StateError::Unknown { name: "a".into() }
    );
    reader.refuse_unknown(&[&[A]]).unwrap();
    let old = SectionKind::mandatory("a", 1);
    let newer = StateError::Version { name: "a".into(), found: 2, supported: 1 };
    assert_eq!(reader.refuse_unknown(&[&[old, B]]).unwrap_err(), newer);
    assert_eq!(reader.section(&old, 0).unwrap_err(), newer);
}

/// A section whose version 2 has a count before its words.
#[derive(Debug, PartialEq)]
struct Changed(Vec<u16>);

impl Changed {
    const KIND: SectionKind = SectionKind::mandatory("changed", 2).since(2);

    fn write(&self, out: &mut StateWriter) {
        let mut bytes = Vec::new();
        if out.version_of(&Self::KIND) >= 2 {
            bytes.extend_from_slice(&(self.0.len() as u16).to_le_bytes());
        }
        self.0.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        out.section(&Self::KIND, 0, &bytes).unwrap();
    }

    fn read(from: &StateReader<'_>) -> Self {
        let section = from.section(&Self::KIND, 0).unwrap();
        let words: Vec<u16> = section.abi_list(9).unwrap();
        Self(if section.version() == 1 { words } else { words[1..].to_vec() })
    }
}

#[test]
fn changed_section_moves_between_two_releases_both_ways() {
    let content = Changed(vec![7, 8]);
    for (protocol, version, bytes) in [(1, 1, 4), (2, 2, 6)] {
        let mut out = StateWriter::for_protocol(protocol);
        content.write(&mut out);
        let state = out.finish();
        let reader = StateReader::parse(&state).unwrap();
        let section = reader.sections()[0];
        assert_eq!((section.version(), section.payload().len()), (version, bytes));
        assert_eq!(Changed::read(&reader), content, "the newer release reads both");
        // The previous release knows version 1 only.
        let before = SectionKind::mandatory("changed", 1);
        assert_eq!(reader.refuse_unknown(&[&[before]]).is_ok(), protocol == 1);
    }
}

#[test]
fn unknown_optional_section_is_ignored() {
    let mut out = StateWriter::new();
    out.section(&A, 0, &[]).unwrap();
    out.section(&SectionKind::optional("later", 9), 0, b"what a newer release knows").unwrap();
    let state = out.finish();
    let reader = StateReader::parse(&state).unwrap();
    reader.refuse_unknown(&[&[A]]).unwrap();
    // The same section as a mandatory one is refused.
    let mut out = StateWriter::new();
    out.section(&SectionKind::mandatory("later", 9), 0, &[]).unwrap();
    let state = out.finish();
    let error = StateReader::parse(&state).unwrap().refuse_unknown(&[&[A]]).unwrap_err();
    assert_eq!(error, StateError::Unknown { name: "later".into() });
}

#[test]
fn newer_container_is_refused_by_its_format() {
    let mut bytes = sample();
    bytes[8] = 2;
    let sum = crc32c(&bytes[..16]);
    bytes[16..20].copy_from_slice(&sum.to_le_bytes());
    let error = StateReader::parse(&bytes).unwrap_err();
    assert_eq!(error, StateError::Format { found: 2, supported: 1 });
}

#[test]
fn duplicate_section_and_trailing_bytes_are_refused() {
    let mut writer = StateWriter::new();
    writer.section(&A, 0, &[]).unwrap();
    writer.section(&A, 0, &[]).unwrap();
    assert!(matches!(StateReader::parse(&writer.finish()), Err(StateError::Invalid { .. })));
    let mut bytes = sample();
    bytes.push(0);
    assert!(matches!(StateReader::parse(&bytes), Err(StateError::Invalid { .. })));
}

#[test]
fn parse_refuses_every_prefix() {
    let bytes = sample();
    for length in 0..bytes.len() {
        assert!(StateReader::parse(&bytes[..length]).is_err(), "{length} bytes were accepted");
    }
    let error = StateReader::parse(&bytes[..bytes.len() - 1]).unwrap_err();
    assert!(
        matches!(error, StateError::Truncated { ref what, .. } if what.contains("\"b\"")),
        "{error}"
    );
}

#[test]
fn parse_detects_every_flipped_bit() {
    let bytes = sample();
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(StateReader::parse(&flipped).is_err(), "flipped bit {bit} was not detected");
    }
}

#[test]
fn corrupt_payload_names_its_section() {
    let mut bytes = sample();
    bytes[70] ^= 0x40;
    let error = StateReader::parse(&bytes).unwrap_err();
    assert!(
        matches!(error, StateError::Corrupt { ref what, offset: 64, .. } if what.contains("\"a\"")),
        "{error}"
    );
}

/// Other releases read these bytes.
#[test]
fn container_matches_its_golden_bytes() {
    let mut writer = StateWriter::new();
    writer.section(&A, 5, &[0xaa, 0xbb]).unwrap();
    let bytes = writer.finish();
    assert_eq!(&bytes[..16], b"VMFSTATE\x01\0\0\0\x01\0\0\0");
    assert_eq!(&bytes[20..22], b"a\0");
    assert_eq!(&bytes[44..56], b"\x02\0\x01\0\x05\0\0\0\x02\0\0\0");
    assert_eq!(&bytes[64..], [0xaa, 0xbb]);
    assert_eq!(crc32c(b"123456789"), 0xe306_9283, "CRC32C's check value");
}

proptest! {
    #[test]
    fn parse_of_any_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = StateReader::parse(&bytes);
    }

    #[test]
    fn any_sections_round_trip_and_any_flipped_byte_is_detected(
        payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..100), 0..6),
        position in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        let mut writer = StateWriter::new();
        for (instance, payload) in (0..).zip(&payloads) {
            writer.section(&A, instance, payload).unwrap();
        }
        let mut bytes = writer.finish();
        let reader = StateReader::parse(&bytes).unwrap();
        for (instance, payload) in (0..).zip(&payloads) {
            prop_assert_eq!(reader.section(&A, instance).unwrap().payload(), &payload[..]);
        }
        let at = position.index(bytes.len());
        bytes[at] ^= flip;
        prop_assert!(StateReader::parse(&bytes).is_err());
    }

    /// Bytes with matching checksums cause no panic either.
    #[test]
    fn parse_of_any_section_header_never_panics(
        header in any::<[u8; 40]>(),
        payload in proptest::collection::vec(any::<u8>(), 0..50),
    ) {
        let mut bytes = StateWriter::new().finish();
        bytes[12] = 1;
        let sum = crc32c(&bytes[..16]);
        bytes[16..20].copy_from_slice(&sum.to_le_bytes());
        bytes.extend_from_slice(&header);
        bytes.extend_from_slice(&crc32c(&header).to_le_bytes());
        bytes.extend_from_slice(&payload);
        let _ = StateReader::parse(&bytes);
    }
}
