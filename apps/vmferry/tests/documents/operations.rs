//! The operations guide lists every message that an operator can meet.

use std::collections::BTreeSet;
use std::fs::{read_dir, read_to_string};
use std::path::{Path, PathBuf};

/// Crates whose errors reach people.
const CRATES: [&str; 19] = [
    "apps/inspect",
    "apps/report",
    "apps/sandbox",
    "apps/vmferry",
    "crates/balloon",
    "crates/codec",
    "crates/control",
    "crates/dirty",
    "crates/engine",
    "crates/faults",
    "crates/fleet",
    "crates/handover",
    "crates/libvirt-rpc",
    "crates/memory",
    "crates/microvm",
    "crates/proxy",
    "crates/qemu",
    "crates/transport",
    "crates/wire",
];

/// Sources that build a failure's text in place, as `let text = …`.
const FAILURES: [&str; 2] = ["apps/vmferry/src/commands", "crates/microvm/src/service.rs"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All Rust sources below a path, except tests.
fn sources(path: &Path, into: &mut Vec<PathBuf>) {
    if path.is_dir() {
        for entry in read_dir(path).unwrap() {
            sources(&entry.unwrap().path(), into);
        }
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        let name = path.file_stem().unwrap().to_str().unwrap();
        if !name.ends_with("tests") && !path.components().any(|part| part.as_os_str() == "tests") {
            into.push(path.to_owned());
        }
    }
}

/// The string literal at the beginning of a source text, with its escapes resolved.
fn literal(source: &str) -> Option<String> {
    let mut text = String::new();
    let mut rest = source.strip_prefix('"')?.chars().peekable();
    loop {
        match rest.next()? {
            '"' => return Some(text),
            '\\' => match rest.next()? {
                'n' => text.push('\n'),
                '\n' => while rest.next_if(|next| next.is_whitespace()).is_some() {},
                other => text.push(other),
            },
            other => text.push(other),
        }
    }
}

/// Literals that follow `marker`, with only `between` before them.
fn literals(source: &str, marker: &str, between: &[&str]) -> Vec<String> {
    let starts = source.match_indices(marker).map(|(at, _)| &source[at + marker.len()..]);
    starts
        .filter_map(|rest| {
            let rest = rest.trim_start();
            let found = between.iter().find_map(|word| rest.strip_prefix(word));
            literal(found.unwrap_or(rest).trim_start())
        })
        .collect()
}

/// A message on one line, with `…` for each variable part.
fn normal(text: &str) -> String {
    let mut plain = String::new();
    let mut depth = 0;
    for c in text.chars() {
        match c {
            '{' => {
                if depth == 0 {
                    plain.push('…');
                }
                depth += 1;
            }
            '}' => depth -= 1,
            c if depth == 0 => plain.push(c),
            _ => {}
        }
    }
    plain.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Every message, with its file.
fn messages() -> BTreeSet<(String, String)> {
    let root = root();
    let mut found = BTreeSet::new();
    let mut collect = |below: &Path, marker: &str, between: &[&str]| {
        let mut files = Vec::new();
        sources(below, &mut files);
        for file in files {
            let source = read_to_string(&file).unwrap();
            let name = file.strip_prefix(&root).unwrap().display().to_string();
            let messages = literals(&source, marker, between);
            // A transparent variant has its cause's message.
            let messages = messages.iter().map(|text| normal(text)).filter(|text| text != "…");
            found.extend(messages.map(|text| (text, name.clone())));
        }
    };
    for name in CRATES {
        collect(&root.join(name).join("src"), "#[error(", &[]);
    }
    for path in FAILURES {
        collect(&root.join(path), "let text =", &["format!("]);
    }
    found
}

#[test]
fn guide_lists_every_message() {
    let guide = normal(&read_to_string(root().join("docs/operations.md")).unwrap());
    let messages = messages();
    let missing: Vec<_> = messages
        .iter()
        .filter(|(text, _)| !guide.contains(&format!("| {text} |")))
        .map(|(text, file)| format!("{file}: {text}"))
        .collect();
    assert!(missing.is_empty(), "docs/operations.md lacks:\n{}", missing.join("\n"));
    // The search finds these messages at all.
    let known = [
        ("the dirty log failed", "crates/engine/src/error.rs"),
        (
            "can't … the journal …: check that the disk is there, writable and not full, \
             then try again",
            "crates/handover/src/journal/mod.rs",
        ),
        (
            "nothing was decided. … Add --yes when that is done",
            "apps/vmferry/src/commands/resolve.rs",
        ),
    ];
    for (text, file) in known {
        assert!(messages.contains(&(text.to_owned(), file.to_owned())), "{text}");
    }
}

/// The guide lists no message that the sources no longer have.
#[test]
fn guide_lists_no_outdated_message() {
    let guide = read_to_string(root().join("docs/operations.md")).unwrap();
    let (_, guide) = guide.split_once("\n## Messages\n").unwrap();
    let root = root();
    let mut files = Vec::new();
    for name in CRATES {
        sources(&root.join(name).join("src"), &mut files);
    }
    let mut literals = BTreeSet::new();
    for file in files {
        let source = read_to_string(&file).unwrap();
        let starts = source.match_indices('"').filter_map(|(at, _)| literal(&source[at..]));
        literals.extend(starts.map(|text| normal(&text)));
    }
    let rows = guide.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
    let messages: Vec<_> = rows
        .map(|(message, _)| message)
        .filter(|first| !["message", "---"].contains(first))
        .collect();
    assert!(messages.len() > 200, "{}", messages.len());
    for message in messages {
        // The guide quotes a refusal together with the side that refuses.
        let own = message.strip_prefix("the destination refused: ").unwrap_or(message);
        assert!(literals.contains(own) || own == "…", "no source has this message: {message}");
    }
}

/// The guide has a section for every exit status.
#[test]
fn guide_lists_every_exit_status() {
    let guide = read_to_string(root().join("docs/operations.md")).unwrap();
    for status in 1..=16 {
        assert!(guide.contains(&format!("\n### {status}: ")), "{status}");
    }
    assert!(!guide.contains("\n### 17: "));
}
