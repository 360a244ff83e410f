//! The manual pages, as their formatter reads them.

use std::process::Command;

use crate::vmferry;

/// A page as a terminal of 80 columns shows it, and the formatter's warnings.
fn formatted(page: &std::path::Path) -> (String, String) {
    let mut groff = Command::new("groff");
    // Invoked as by `man --warnings`. -P: no escapes for bold and the like.
    groff.args(["-man", "-Tutf8", "-ww", "-rLL=80n", "-P", "-cbou"]).arg(page);
    let output = groff.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn man_pages_have_no_formatter_warnings() {
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
    // The formatter does warn about mistakes.
    let wrong = directory.path().join("wrong.1");
    std::fs::write(&wrong, ".TH wrong 1\n.SH \"NAME\n.nosuchrequest\n").unwrap();
    assert!(!formatted(&wrong).1.is_empty());
}

/// Examples keep their lines as in `--help`, and text is filled.
#[test]
fn man_page_examples_look_as_typed() {
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
        // The page's quotation marks and hyphens are the ones that a shell accepts.
        assert!(shown.contains(&example.trim()), "{example}: {shown:#?}");
    }
    let whole = page("vmferry.1");
    assert!(whole.contains("\nEXIT STATUS\n"), "{whole}");
    assert!(page("vmferry-receive.1").contains("-m 2G \u{2026}'"), "non-ASCII characters");
}

#[test]
fn man_prints_the_first_page_to_standard_output() {
    let directory = tempfile::tempdir().unwrap();
    vmferry(&["man", "--dir", directory.path().to_str().unwrap()]);
    let page = std::fs::read(directory.path().join("vmferry.1")).unwrap();
    assert_eq!(vmferry(&["man"]).stdout, page);
    assert!(page.is_ascii());
}
