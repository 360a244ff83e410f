//! The exact form of every record on disk. Every release must read the records of all earlier ones.

use super::*;

/// Which release writes a line.
#[derive(Clone, Copy, PartialEq)]
enum Writer {
    ThisRelease,
    /// An earlier release. When a record gets a new member, its old line stays in the table.
    Earlier,
}

/// The kind of a record, who writes it, and its line. When a record gets a new member, add its new
/// line and change the old line from `Writer::ThisRelease` to [`Writer::Earlier`].
const LINES: [(&str, Writer, &str); 17] = [
    (
        "open",
        Writer::ThisRelease,
        r#"15db22af {"record":"open","guest":{"uuid":"01010101-0101-0101-0101-010101010101","name":"web"},"peer":"tls:b:7001","peer_names":["spiffe://vmferry/host/b"],"at":1760000000,"order":7,"witness":"etcd 5f0c1e2d/vmferry"}"#,
    ),
    (
        "open",
        Writer::ThisRelease,
        r#"9745582e {"record":"open","guest":{"uuid":"01010101-0101-0101-0101-010101010101","name":"web"},"peer":"tls:b:7001","peer_names":["spiffe://vmferry/host/b"],"at":1760000000,"order":7,"process":"0b6f6d2e-6a5c-4d0e-9a7e-2f6f4f1f9f00/812/104733"}"#,
    ),
    (
        "open",
        Writer::ThisRelease,
        r#"0b4c62e9 {"record":"open","guest":{"uuid":"01010101-0101-0101-0101-010101010101","name":"web"},"peer":"tls:b:7001","peer_names":["spiffe://vmferry/host/b"],"at":1760000000,"order":7}"#,
    ),
    (
        "open",
        Writer::Earlier,
        r#"f12adb91 {"record":"open","guest":{"uuid":"01010101-0101-0101-0101-010101010101","name":"web"},"peer":"tls:b:7001","peer_names":["spiffe://vmferry/host/b"],"at":1760000000}"#,
    ),
    (
        "open",
        Writer::Earlier,
        r#"3db5cece {"record":"open","guest":{"uuid":"00000000-0000-0000-0000-000000000000","name":""},"peer":"","peer_names":[],"at":0}"#,
    ),
    ("commit", Writer::ThisRelease, r#"552f19b3 {"record":"commit"}"#),
    ("commit-post-copy", Writer::ThisRelease, r#"f3a20e8f {"record":"commit-post-copy"}"#),
    ("serving", Writer::ThisRelease, r#"b8a6a6f8 {"record":"serving"}"#),
    ("given", Writer::ThisRelease, r#"f54e283d {"record":"given","by_operator":false}"#),
    ("given", Writer::ThisRelease, r#"3fea0f45 {"record":"given","by_operator":true}"#),
    ("kept", Writer::ThisRelease, r#"6ff25576 {"record":"kept","by_operator":false}"#),
    ("kept", Writer::ThisRelease, r#"0408e45d {"record":"kept","by_operator":true}"#),
    ("run-intent", Writer::ThisRelease, r#"d3f84dc1 {"record":"run-intent"}"#),
    ("run-intent-post-copy", Writer::ThisRelease, r#"647f9d41 {"record":"run-intent-post-copy"}"#),
    ("fetched", Writer::ThisRelease, r#"492a944d {"record":"fetched"}"#),
    ("ended", Writer::ThisRelease, r#"7fcedac8 {"record":"ended"}"#),
    (
        "aborted",
        Writer::ThisRelease,
        r#"541ec486 {"record":"aborted","reason":"the link was lost"}"#,
    ),
];

/// The side that writes a record of this kind. Both sides write `open`.
fn side_of(kind: &str) -> Side {
    match kind {
        "run-intent" | "run-intent-post-copy" | "fetched" | "ended" | "aborted" => {
            Side::Destination
        }
        _ => Side::Source,
    }
}

fn sealed(json: &str) -> String {
    format!("{:08x} {json}\n", checksum(json.as_bytes()))
}

#[test]
fn every_line_round_trips() {
    for (kind, writer, line) in LINES {
        let (records, whole) = decode(format!("{line}\n").as_bytes(), side_of(kind)).expect(line);
        assert_eq!((records.len(), whole), (1, line.len() + 1));
        assert_eq!(records[0].name(), kind);
        let written = String::from_utf8(records[0].encode()).unwrap();
        assert!(writer != Writer::ThisRelease || written == format!("{line}\n"), "{written}");
    }
    for kind in Record::VARIANTS {
        assert!(
            LINES.iter().any(|(of, writer, _)| of == kind && *writer == Writer::ThisRelease),
            "{kind}"
        );
    }
}

#[test]
fn unknown_members_are_ignored() {
    for (kind, _, line) in LINES {
        let (_, json) = line.split_once(' ').unwrap();
        let longer = json.replacen('}', r#","later":{"a":[1]}}"#, 1);
        // In records with a nested object, the new member is in that object.
        let newer =
            if json.contains("uuid") { longer } else { json.replacen('{', r#"{"later":1,"#, 1) };
        let (records, whole) = decode(sealed(&newer).as_bytes(), side_of(kind)).expect(&newer);
        let (before, _) = decode(format!("{line}\n").as_bytes(), side_of(kind)).unwrap();
        assert_eq!((&records, whole), (&before, sealed(&newer).len()), "{kind}");
    }
}

#[test]
fn unknown_record_is_refused_by_name_unless_optional() {
    let open = LINES[0].2;
    let newer = r#"{"record":"lent","until":9}"#;
    let bytes = format!("{open}\n{}", sealed(newer));
    let error = decode(bytes.as_bytes(), Side::Source).unwrap_err();
    assert_eq!(error, BadLine { line: 2, reason: BadRecord::Unknown("lent".into()) });
    assert!(error.reason.to_string().contains("newer vmferry has written a record `lent`"));

    let optional = r#"{"record":"lent","until":9,"optional":true}"#;
    let commit = r#"{"record":"commit"}"#;
    let bytes = format!("{open}\n{}{}", sealed(optional), sealed(commit));
    let (records, whole) = decode(bytes.as_bytes(), Side::Source).unwrap();
    assert_eq!(records.iter().map(Record::name).collect::<Vec<_>>(), ["open", "commit"]);
    assert_eq!(whole, bytes.len(), "the line of the optional record counts");
    // A known kind is a promise even if it is marked optional.
    let bytes = sealed(r#"{"record":"commit","optional":true}"#);
    assert_eq!(decode(bytes.as_bytes(), Side::Source).unwrap().0, [Record::Commit]);
}
