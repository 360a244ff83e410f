//! The hooks in docs/ha.md are valid shell scripts.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// The indented blocks of a document.
fn blocks(text: &str) -> Vec<String> {
    let mut blocks = vec![String::new()];
    for line in text.lines() {
        match (line.strip_prefix("    "), blocks.last_mut()) {
            (Some(line), Some(block)) => *block += &format!("{line}\n"),
            // An empty line inside a block belongs to no recipe.
            _ => blocks.push(String::new()),
        }
    }
    blocks.retain(|block| !block.is_empty());
    blocks
}

#[test]
fn hook_recipes_are_shell_scripts() {
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
