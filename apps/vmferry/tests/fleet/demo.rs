//! `make demo-fleet`: the fleet of `docs/fleet.md`, in namespaces of this machine.

use std::path::Path;
use std::process::Command;

use vmferry_qemu_lab::Fixture;

#[test]
fn demo_moves_guests_while_a_member_and_an_agent_are_killed() {
    assert!(rustix::process::geteuid().is_root(), "this test needs root: it makes namespaces");
    vmferry_kit::need_kvm();
    vmferry_kit::packages("etcd");
    let fixture = Fixture::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let output = Command::new(root.join("scripts/demo-fleet"))
        .env("VMFERRY", env!("CARGO_BIN_EXE_vmferry"))
        .env("QEMU", fixture.qemu)
        .env("QEMU_LIBRARIES", fixture.libraries)
        .env("QEMU_FIRMWARE", fixture.firmware)
        .env("QEMU_ROMS", fixture.roms)
        .env("GUEST_ELF", fixture.bare_metal)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    for result in [
        "20 guests: each runs on one host, has checked all its memory there, 0 corrupt pages",
        "14 moves: downtime ",
        "the agent and daemon of host-b",
    ] {
        assert!(said.contains(result), "no `{result}`: {said}");
    }
}
