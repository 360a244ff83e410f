//! The guest's files: its program and the kernel's modules, in a `newc` archive.
//!
//! Source: Linux `Documentation/driver-api/early-userspace/buffer-format.rst`.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Modules of the Debian kernel, in the order of their dependencies.
const MODULES: [&str; 10] = [
    "drivers/virtio/virtio.ko",
    "drivers/virtio/virtio_ring.ko",
    "drivers/virtio/virtio_pci_legacy_dev.ko",
    "drivers/virtio/virtio_pci_modern_dev.ko",
    "drivers/virtio/virtio_pci.ko",
    "net/core/failover.ko",
    "drivers/net/net_failover.ko",
    "drivers/block/virtio_blk.ko",
    "drivers/net/virtio_net.ko",
    "drivers/virtio/virtio_balloon.ko",
];

/// The parts of the guest's program.
const SOURCES: [&str; 7] =
    ["main.c", "modules.c", "disk.c", "network.c", "churn.c", "beat.c", "program.c"];

/// The archive. It is built again if what it is made of has changed.
pub fn path(directory: &Path) -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let modules = modules(directory);
        let mut content = DefaultHasher::new();
        (include_str!("initramfs.rs"), &modules).hash(&mut content);
        for file in SOURCES.iter().chain(&["guest.h"]) {
            std::fs::read(sources().join(file)).expect("a source is there").hash(&mut content);
        }
        let path = directory.join(format!("initramfs-{:016x}", content.finish()));
        if !path.exists() {
            // Several tests may do this at the same time: each replaces the file by equal content.
            let unique = directory.join(format!("initramfs.{}", std::process::id()));
            std::fs::write(&unique, archive(&program(directory), &modules))
                .expect("the initramfs can be written");
            std::fs::rename(&unique, &path).expect("the initramfs can be put in its place");
        }
        path
    })
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("linux")
}

/// The modules' files.
fn modules(directory: &Path) -> Vec<Vec<u8>> {
    let modules = directory.join("kernel/lib/modules");
    let release = std::fs::read_dir(&modules)
        .and_then(|mut found| found.next().transpose())
        .expect("the kernel's modules can be listed")
        .expect("the kernel has modules")
        .path();
    let read = |module: &&str| {
        std::fs::read(release.join("kernel").join(module))
            .unwrap_or_else(|error| panic!("{module}: {error}"))
    };
    MODULES.iter().map(read).collect()
}

fn archive(program: &[u8], modules: &[Vec<u8>]) -> Vec<u8> {
    let mut archive = entry("dev", 0o40755, (0, 0), &[]);
    archive.extend(entry("dev/console", 0o20600, (5, 1), &[]));
    archive.extend(entry("init", 0o100_755, (0, 0), program));
    archive.extend(entry("modules", 0o40755, (0, 0), &[]));
    for (number, module) in modules.iter().enumerate() {
        archive.extend(entry(&format!("modules/{number:02}.ko"), 0o100_644, (0, 0), module));
    }
    archive.extend(entry("TRAILER!!!", 0, (0, 0), &[]));
    archive
}

fn program(directory: &Path) -> Vec<u8> {
    let program = directory.join(format!("init.{}", std::process::id()));
    let built = Command::new("cc")
        .args(["-O2", "-static", "-pthread", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .args(SOURCES.map(|file| sources().join(file)))
        .status()
        .expect("there is a C compiler: `make setup`");
    assert!(built.success(), "linux does not compile");
    let content = std::fs::read(&program).expect("the program can be read");
    std::fs::remove_file(&program).expect("the program can be removed");
    content
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
