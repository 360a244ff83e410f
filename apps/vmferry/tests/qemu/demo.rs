//! `make demo-qemu`: the migration of `docs/qemu.md`, between two network namespaces.

use std::path::Path;
use std::process::Command;

use vmferry_qemu_lab::Fixture;

/// The script's output.
fn demo(mode: &str) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        panic!("this test needs root: it makes network namespaces");
    }
    let fixture = Fixture::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let output = Command::new(root.join("scripts/demo-qemu"))
        .arg(mode)
        .env("VMFERRY", env!("CARGO_BIN_EXE_vmferry"))
        .env("QEMU", fixture.qemu)
        .env("QEMU_LIBRARIES", fixture.libraries)
        .env("QEMU_FIRMWARE", fixture.firmware)
        .env("QEMU_ROMS", fixture.roms)
        .env("GUEST_KERNEL", fixture.kernel)
        .env("GUEST_INITRAMFS", fixture.initramfs)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("OK: the guest moved"), "{said}");
    Some(said)
}

#[test]
fn demo_moves_an_attached_guest_with_its_disk() {
    let Some(said) = demo("attached") else { return };
    assert!(said.contains("hashes to the same value on both sides"), "{said}");
}

#[test]
fn demo_moves_a_carried_guest_with_its_disk() {
    let Some(said) = demo("carried") else { return };
    assert!(said.contains("carrying the migration of QEMU 10.0"), "{said}");
    assert!(said.contains("not attached, because the guest's memory"), "{said}");
}
