//! The hooks of docs/ha.md are shell scripts.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// The indented blocks of a document.
fn blocks(text: &str) -> Vec<String> {
    let mut blocks = vec![String::new()];
    for line in text.lines() {
        match (line.strip_prefix("    "), blocks.last_mut()) {
            (Some(line), Some(block)) => *block += &format!("{line}\n"),
            // An empty line within a block is none of the recipes'.
            _ => blocks.push(String::new()),
        }
    }
    blocks.retain(|block| !block.is_empty());
    blocks
}

#[test]
fn recipes_of_hooks_are_shell_scripts() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/ha.md");
    let text = std::fs::read_to_string(path).unwrap();
    let recipes: Vec<_> =
        blocks(&text).into_iter().filter(|block| block.contains("VMFERRY_SIDE")).collect();
    assert_eq!(recipes.len(), 3, "{recipes:?}");
    for recipe in recipes {
        let sh = Command::new("sh").arg("-n").stdin(Stdio::piped()).spawn();
        let mut sh = sh.unwrap();
        sh.stdin.take().unwrap().write_all(recipe.as_bytes()).unwrap();
        assert!(sh.wait().unwrap().success(), "{recipe}");
        for case in ["before-source-)", "after-source-kept)"] {
            assert!(recipe.contains(case), "no {case} in {recipe}");
        }
    }
}
