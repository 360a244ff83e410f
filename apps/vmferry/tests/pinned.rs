//! What the command prints, word for word: every `--help`, errors, and `--json`. A change of words
//! is seen in review; `TRYCMD=overwrite` writes the new ones.

#[test]
fn output_is_pinned() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = directory.path().join("runtime").to_str().unwrap().to_owned();
    trycmd::TestCases::new()
        .env("VMFERRY_RUNTIME_DIR", &runtime)
        .env("COLUMNS", "100")
        .insert_var("[RUNTIME]", runtime)
        .unwrap()
        .case("tests/pinned/*.trycmd");
}

/// Each subcommand that people see has its help among them.
#[test]
fn help_of_every_command_is_pinned() {
    let pinned = std::fs::read_to_string("tests/pinned/help.trycmd").unwrap();
    let help =
        std::process::Command::new(env!("CARGO_BIN_EXE_vmferry")).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let (commands, _) = commands.split_once("\n\n").unwrap();
    let names = commands.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let names: Vec<_> = names.filter(|name| !name.is_empty() && *name != "help").collect();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        assert!(pinned.contains(&format!("$ vmferry {name} --help\n")), "{name}");
    }
}
