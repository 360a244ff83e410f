//! The output for a small recording is pinned. The recording is in the tree, so the output does not
//! depend on the compressors' releases, and a change of either format is noticed.

use std::path::PathBuf;

use crate::support::Recorded;
use vmferry_inspect::{HEAD_BYTES, Inspector, turn_of};

const FILES: [&str; 4] = [
    "0000-to-destination.vmftrace",
    "0000-to-source.vmftrace",
    "0001-to-destination.vmftrace",
    "0001-to-source.vmftrace",
];

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/sessions/golden").join(name)
}

/// The output as the command prints it.
fn printed(runs: bool) -> String {
    let (mut inspector, mut text) = (Inspector::new(1 << 20, runs), String::new());
    let mut files = FILES.map(|name| (std::fs::read(golden(name)).unwrap(), name));
    files.sort_by_key(|(file, name)| (turn_of(&file[..file.len().min(HEAD_BYTES)]), *name));
    for (file, name) in files {
        text += &format!("{name}:\n");
        let outcome = inspector.file(name, &file[..], &mut |record| {
            text += &format!("{record}\n");
            Ok(())
        });
        text += &format!("{name}: {}\n", outcome.unwrap());
    }
    inspector.disagreements().iter().for_each(|line| text += &format!("{line}\n"));
    text
}

#[test]
fn output_is_unchanged() {
    for (name, runs) in [("inspect.txt", false), ("inspect-pages.txt", true)] {
        let expected = std::fs::read_to_string(golden(name)).unwrap();
        assert_eq!(printed(runs), expected, "{name}");
    }
}

#[test]
fn example_in_the_manual_is_current() {
    let manual = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/inspect.md");
    let manual = std::fs::read_to_string(manual).unwrap();
    let block: String = manual
        .lines()
        .skip_while(|line| !line.starts_with("    0000-to-destination.vmftrace:"))
        .take_while(|line| line.starts_with("    "))
        .map(|line| format!("{}\n", &line[4..]))
        .collect();
    assert_eq!(block, std::fs::read_to_string(golden("inspect.txt")).unwrap());
}

/// Run `cargo test -p vmferry-inspect --test sessions -- --ignored` after an intended change.
#[test]
#[ignore = "writes the recording and the text"]
fn write_golden_files() {
    let Recorded { control, control_back, data, data_back, .. } = Recorded::new(2, 1);
    for (name, file) in FILES.iter().zip([control, control_back, data, data_back]) {
        std::fs::write(golden(name), file).unwrap();
    }
    std::fs::write(golden("inspect.txt"), printed(false)).unwrap();
    std::fs::write(golden("inspect-pages.txt"), printed(true)).unwrap();
}
