//! Helpers for the tests of several crates. A test that needs something of this machine fails
//! without it, and says what is missing.

#![forbid(unsafe_code)]

mod cable;
mod exclusive;
mod huge_pages;
pub mod relay;
mod systemd;

use std::path::{Path, PathBuf};

pub use cable::Cable;
pub use exclusive::Exclusive;
pub use huge_pages::HugePages;
pub use systemd::Systemd;

/// Where `scripts/setup-tests` has unpacked the packages of a lab: `qemu` or `browser`.
///
/// # Panics
/// If it has not.
pub fn packages(lab: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let packages = root.join("target").join(lab);
    assert!(
        packages.join("done").exists(),
        "run `make setup-tests` first: {packages:?} is not there"
    );
    packages
}

/// Fails without `/dev/kvm`.
///
/// # Panics
/// If there is no `/dev/kvm`.
pub fn need_kvm() {
    assert!(Path::new("/dev/kvm").exists(), "this test needs /dev/kvm");
}
