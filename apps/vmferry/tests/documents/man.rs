//! The manual, as its formatter reads it.

use std::process::Command;

use crate::vmferry;

/// A page as a terminal of 80 columns shows it, and what the formatter complains of.
fn formatted(page: &std::path::Path) -> (String, String) {
    let mut groff = Command::new("groff");
    // As `man --warnings` calls it. -P: no escapes for bold and the like.
    groff.args(["-man", "-Tutf8", "-ww", "-rLL=80n", "-P", "-cbou"]).arg(page);
    let output = groff.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn the_formatter_has_nothing_to_complain_of() {
    let directory = tempfile::tempdir().unwrap();
    let pages = directory.path().join("man1");
    vmferry(&["man", "--dir", pages.to_str().unwrap()]);
    let mut seen = 0;
    for page in std::fs::read_dir(&pages).unwrap() {
        let page = page.unwrap().path();
        let (text, complaints) = formatted(&page);
        assert!(complaints.is_empty(), "{}: {complaints}", page.display());
        assert!(text.contains("SYNOPSIS") && text.contains("SEE ALSO"), "{}", page.display());
        seen += 1;
    }
    assert!(seen > 15, "{seen} pages");
    // The formatter does complain where something is wrong.
    let wrong = directory.path().join("wrong.1");
    std::fs::write(&wrong, ".TH wrong 1\n.SH \"NAME\n.nosuchrequest\n").unwrap();
    assert!(!formatted(&wrong).1.is_empty());
}

/// Examples stand line by line as in `--help`, and what is filled is filled.
#[test]
fn examples_look_as_they_are_typed() {
    let directory = tempfile::tempdir().unwrap();
    vmferry(&["man", "--dir", directory.path().to_str().unwrap()]);
    let page = |name: &str| formatted(&directory.path().join(name)).0;
    let help = String::from_utf8(vmferry(&["run", "--help"]).stdout).unwrap();
    let (_, examples) = help.split_once("Examples:\n").unwrap();
    let run = page("vmferry-run.1");
    let (notes, shown) = run.split_once("EXAMPLES\n").unwrap();
    assert!(notes.contains("\nNOTES\n"), "{run}");
    let shown: Vec<_> = shown.lines().map(str::trim).collect();
    for example in examples.lines() {
        // The page's quotation marks and hyphens are those that a shell takes.
        assert!(shown.contains(&example.trim()), "{example}: {shown:#?}");
    }
    let whole = page("vmferry.1");
    assert!(whole.contains("\nEXIT STATUS\n"), "{whole}");
    assert!(page("vmferry-receive.1").contains("-m 2G \u{2026}'"), "what is not ASCII");
}

#[test]
fn standard_output_has_the_first_page() {
    let directory = tempfile::tempdir().unwrap();
    vmferry(&["man", "--dir", directory.path().to_str().unwrap()]);
    let page = std::fs::read(directory.path().join("vmferry.1")).unwrap();
    assert_eq!(vmferry(&["man"]).stdout, page);
    assert!(page.is_ascii());
}
