//! The command's own documents, checked by the programs that read them: shells and the manual's
//! formatter.

mod completions;
mod man;
mod operations;
mod recipes;

use std::process::{Command, Output};

/// Runs the command, which must succeed.
fn vmferry(arguments: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}
