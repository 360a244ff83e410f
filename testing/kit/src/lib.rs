//! Helpers for the tests of several crates. A test that needs something of this machine fails
//! without it, and says what is missing.

#![forbid(unsafe_code)]

mod huge_pages;
pub mod relay;

pub use huge_pages::HugePages;

/// Fails without `/dev/kvm`.
///
/// # Panics
/// If there is no `/dev/kvm`.
pub fn need_kvm() {
    assert!(std::path::Path::new("/dev/kvm").exists(), "this test needs /dev/kvm");
}
