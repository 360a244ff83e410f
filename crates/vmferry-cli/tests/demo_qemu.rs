//! `make demo-qemu`: the migration of `docs/qemu.md`, between two network namespaces.

use std::path::Path;
use std::process::Command;

use vmferry_qemu_lab::Fixture;

#[test]
fn a_guest_moves_from_host_to_host_with_its_disk() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: network namespaces need root");
        return;
    }
    let fixture = Fixture::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let output = Command::new(root.join("scripts/demo-qemu"))
        .env("VMFERRY", env!("CARGO_BIN_EXE_vmferry"))
        .env("QEMU", fixture.qemu)
        .env("QEMU_LIBRARIES", fixture.libraries)
        .env("QEMU_FIRMWARE", fixture.firmware)
        .env("QEMU_ROMS", fixture.roms)
        .env("GUEST_KERNEL", fixture.kernel)
        .env("GUEST_INITRAMFS", fixture.initramfs)
        .output()
        .unwrap();
    let (said, failed) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{failed}");
    assert!(said.contains("hashed whole and equal"), "{said}{failed}");
    assert!(said.contains("OK: the guest has moved"), "{said}{failed}");
}
