//! The bare-metal guest as a file that QEMU boots (`-kernel`, through its PVH note).

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use vmferry_microvm::kvm::GUEST_ELF;

/// The file, written once per process.
pub fn path(directory: &Path) -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let unique = directory.join(format!("bare-metal.{}", std::process::id()));
        std::fs::write(&unique, GUEST_ELF).expect("the guest can be written");
        // Several tests may do this at the same time: each replaces the file by equal content.
        let path = directory.join("bare-metal.elf");
        std::fs::rename(&unique, &path).expect("the guest can be put in its place");
        path
    })
}
