//! Any bytes, read as a policy, the names of a source, and an offered guest.

use std::str::FromStr;

use vmferry::config::policy::{Admission, Rules};
use vmferry_transport::PeerIdentity;
use vmferry_wire::GuestIdentity;

use super::input::Input;

/// Reads `POLICY 00 KIND NAMES 00 GUEST`, with one name of the source per line. The policy must
/// allow exactly what an exhaustive matcher allows.
pub fn run(data: &[u8]) {
    let mut parts = data.splitn(2, |byte| *byte == 0);
    let text = String::from_utf8_lossy(parts.next().unwrap_or_default());
    let rules = Rules::from_str(&text);
    let Ok(rules) = rules.inspect_err(|error| assert!(error.starts_with("wrong at line "))) else {
        return;
    };
    let mut input = Input(parts.next().unwrap_or_default());
    let kind = input.byte();
    let (names, guest) = match input.0.iter().position(|byte| *byte == 0) {
        Some(at) => (&input.0[..at], &input.0[at + 1..]),
        None => (input.0, &[][..]),
    };
    let names = String::from_utf8_lossy(names).lines().map(str::to_owned).collect();
    let mut source = PeerIdentity::authenticated("peer".into(), names, None);
    if kind % 2 == 1 {
        source.tls = false;
    }
    if kind % 4 >= 2 {
        source.uid = Some(u32::from(kind));
    }
    let guest = GuestIdentity {
        uuid: uuid::Uuid::from_u128(7),
        name: String::from_utf8_lossy(guest).into_owned(),
    };
    let table: toml::Table = text.parse().expect("rules are TOML");
    let none = Vec::new();
    let all = table.get("allow").map_or(&none, |rules| rules.as_array().expect("a list of rules"));
    let own = || all.iter().filter(|rule| is_for(rule, &source));
    assert_eq!(rules.check_source(&source).is_ok(), own().next().is_some(), "{text} {source:?}");
    let allowed = own().any(|rule| names_it(rule, &guest));
    assert_eq!(rules.check_guest(&source, &guest).is_ok(), allowed, "{text} {source:?} {guest:?}");
}

fn is_for(rule: &toml::Value, source: &PeerIdentity) -> bool {
    if let Some(uid) = rule.get("uid") {
        return source.uid.map(i64::from) == uid.as_integer();
    }
    let pattern = rule["source"].as_str().expect("a source");
    source.tls && source.names.iter().any(|name| is_meant(pattern, name))
}

/// A `*` matches a part of a segment, or of a label.
fn is_meant(pattern: &str, name: &str) -> bool {
    let (is_uri, other) = (pattern.contains("://"), name.contains("://"));
    let lower = |text: &str| text.to_ascii_lowercase();
    is_uri == other
        && if is_uri {
            matches(pattern, name, Some(b'/'))
        } else {
            matches(&lower(pattern), &lower(name), Some(b'.'))
        }
}

fn names_it(rule: &toml::Value, guest: &GuestIdentity) -> bool {
    let texts = |key: &str| -> Vec<String> {
        let list = rule.get(key).and_then(toml::Value::as_array);
        list.into_iter().flatten().filter_map(|one| one.as_str().map(str::to_owned)).collect()
    };
    texts("uuids").iter().any(|uuid| uuid.parse() == Ok(guest.uuid))
        || texts("guests").iter().any(|pattern| matches(pattern, &guest.name, None))
}

/// Whether a pattern matches. This naive matcher keeps the set of positions that are reachable
/// after each byte of the pattern.
fn matches(pattern: &str, text: &str, border: Option<u8>) -> bool {
    let text = text.as_bytes();
    let mut reached = vec![false; text.len() + 1];
    reached[0] = true;
    for byte in pattern.bytes() {
        let mut next = vec![false; text.len() + 1];
        for at in 0..=text.len() {
            if byte == b'*' {
                let from_before = at > 0 && next[at - 1] && Some(text[at - 1]) != border;
                next[at] = reached[at] || from_before;
            } else {
                next[at] = at > 0 && reached[at - 1] && text[at - 1] == byte;
            }
        }
        reached = next;
    }
    reached[text.len()]
}
