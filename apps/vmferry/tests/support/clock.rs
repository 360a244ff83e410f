//! A host's clock that a test can set.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::text;

/// A settable clock of the processes that are started with it.
pub struct Clock {
    file: PathBuf,
    /// The prefix of a command whose processes have this clock.
    pub prefix: Vec<String>,
}

impl Clock {
    pub fn make(directory: &Path, name: &str) -> Self {
        let library = directory.join("clock.so");
        if !library.exists() {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/clock.c");
            let compiled = Command::new("cc")
                .args(["-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", text(&library)])
                .arg(&source)
                .status();
            assert!(compiled.unwrap().success(), "cc");
        }
        let file = directory.join(name);
        let prefix = vec![
            "env".into(),
            format!("LD_PRELOAD={}", library.display()),
            format!("VMFERRY_TEST_CLOCK={}", file.display()),
        ];
        let clock = Self { file, prefix };
        clock.set(0);
        clock
    }

    /// Sets the offset in seconds.
    pub fn set(&self, offset: i64) {
        // In place, because processes have mapped the file, and in one write.
        let mut file = OpenOptions::new();
        let mut file = file.write(true).create(true).truncate(false).open(&self.file).unwrap();
        file.write_all(format!("{offset:<31}\n").as_bytes()).unwrap();
    }
}
