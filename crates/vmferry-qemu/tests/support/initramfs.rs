//! The guest's only file: its program, in a `newc` archive.
//!
//! Source: Linux `Documentation/driver-api/early-userspace/buffer-format.rst`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The archive, made once for each test program.
pub fn path(directory: &Path) -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/linux/init.c");
        let unique = std::process::id();
        let program = directory.join(format!("init-{unique}"));
        let built = Command::new("cc")
            .args(["-O2", "-static", "-Wall", "-Wextra", "-Werror", "-o"])
            .args([&program, &source])
            .status()
            .unwrap();
        assert!(built.success(), "guest/linux/init.c does not compile");
        let mut archive = entry("dev", 0o40755, (0, 0), &[]);
        archive.extend(entry("dev/console", 0o20600, (5, 1), &[]));
        archive.extend(entry("init", 0o100_755, (0, 0), &std::fs::read(&program).unwrap()));
        archive.extend(entry("TRAILER!!!", 0, (0, 0), &[]));
        std::fs::remove_file(&program).unwrap();
        let path = directory.join(format!("initramfs-{unique}"));
        std::fs::write(&path, archive).unwrap();
        path
    })
}

fn entry(name: &str, mode: u32, device: (u32, u32), content: &[u8]) -> Vec<u8> {
    let fields = [
        0,
        mode,
        0,
        0,
        1,
        0,
        content.len() as u32,
        0,
        0,
        device.0,
        device.1,
        name.len() as u32 + 1,
        0,
    ];
    let mut bytes = b"070701".to_vec();
    for field in fields {
        bytes.extend(format!("{field:08x}").bytes());
    }
    bytes.extend(name.bytes());
    bytes.push(0);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.extend(content);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}
