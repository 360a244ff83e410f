//! Every record as it stands on disk. What a release has written is read by all that follow.

use super::*;

/// Whether this release writes a line like that, or one before it did.
#[derive(Clone, Copy, PartialEq)]
enum By {
    This,
    /// For a line whose record has got a member more: it stays in the table, beside its successor.
    ABefore,
}

/// The kind of a record, and its JSON. A record that gets a member more gets a line more, and the line before is
/// no longer [`By::This`].
const LINES: [(&str, By, &str); 11] = [
    (
        "open",
        By::This,
        r#"9745582e {"record":"open","guest":{"uuid":"01010101-0101-0101-0101-010101010101","name":"web"},"peer":"tls:b:7001","peer_names":["spiffe://vmferry/host/b"],"at":1760000000,"order":7,"process":"0b6f6d2e-6a5c-4d0e-9a7e-2f6f4f1f9f00/812/104733"}"#,
    ),
    (
        "open",
        By::This,
        r#"0b4c62e9 {"record":"open","guest":{"uuid":"01010101-0101-0101-0101-010101010101","name":"web"},"peer":"tls:b:7001","peer_names":["spiffe://vmferry/host/b"],"at":1760000000,"order":7}"#,
    ),
    (
        "open",
        By::ABefore,
        r#"f12adb91 {"record":"open","guest":{"uuid":"01010101-0101-0101-0101-010101010101","name":"web"},"peer":"tls:b:7001","peer_names":["spiffe://vmferry/host/b"],"at":1760000000}"#,
    ),
    (
        "open",
        By::ABefore,
        r#"3db5cece {"record":"open","guest":{"uuid":"00000000-0000-0000-0000-000000000000","name":""},"peer":"","peer_names":[],"at":0}"#,
    ),
    ("commit", By::This, r#"552f19b3 {"record":"commit"}"#),
    ("given", By::This, r#"f54e283d {"record":"given","by_operator":false}"#),
    ("given", By::This, r#"3fea0f45 {"record":"given","by_operator":true}"#),
    ("kept", By::This, r#"6ff25576 {"record":"kept","by_operator":false}"#),
    ("kept", By::This, r#"0408e45d {"record":"kept","by_operator":true}"#),
    ("run-intent", By::This, r#"d3f84dc1 {"record":"run-intent"}"#),
    ("aborted", By::This, r#"541ec486 {"record":"aborted","reason":"the link was lost"}"#),
];

/// The side that writes such a record; both write the first.
fn side_of(kind: &str) -> Side {
    if matches!(kind, "run-intent" | "aborted") { Side::Destination } else { Side::Source }
}

fn sealed(json: &str) -> String {
    format!("{:08x} {json}\n", checksum(json.as_bytes()))
}

#[test]
fn every_line_is_read_and_written_as_it_stands() {
    for (kind, by, line) in LINES {
        let (records, whole) = decode(format!("{line}\n").as_bytes(), side_of(kind)).expect(line);
        assert_eq!((records.len(), whole), (1, line.len() + 1));
        assert_eq!(records[0].name(), kind);
        let written = String::from_utf8(records[0].encode()).unwrap();
        assert!(by != By::This || written == format!("{line}\n"), "{written}");
    }
    for kind in KINDS {
        assert!(LINES.iter().any(|(of, by, _)| *of == kind && *by == By::This), "{kind}");
    }
}

#[test]
fn members_of_a_newer_release_are_left_alone() {
    for (kind, _, line) in LINES {
        let (_, json) = line.split_once(' ').unwrap();
        let longer = json.replacen('}', r#","later":{"a":[1]}}"#, 1);
        // Of records that hold another object the member stands in that one.
        let newer =
            if json.contains("uuid") { longer } else { json.replacen('{', r#"{"later":1,"#, 1) };
        let (records, whole) = decode(sealed(&newer).as_bytes(), side_of(kind)).expect(&newer);
        let (before, _) = decode(format!("{line}\n").as_bytes(), side_of(kind)).unwrap();
        assert_eq!((&records, whole), (&before, sealed(&newer).len()), "{kind}");
    }
}

#[test]
fn a_record_of_a_newer_release_is_refused_by_name_unless_it_is_optional() {
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
    assert_eq!(whole, bytes.len(), "its line is not cut off");
    // A promise is one, whatever it calls itself.
    let bytes = sealed(r#"{"record":"commit","optional":true}"#);
    assert_eq!(decode(bytes.as_bytes(), Side::Source).unwrap().0, [Record::Commit]);
}
