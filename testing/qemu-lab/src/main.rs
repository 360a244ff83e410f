//! Builds the Linux guest of the tests and prints what a QEMU needs to run it, as shell variables.

#![forbid(unsafe_code)]

use vmferry_qemu_lab::Fixture;

fn main() {
    let fixture = Fixture::new();
    for (name, value) in [
        ("QEMU", fixture.qemu),
        ("QEMU_LIBRARIES", fixture.libraries),
        ("QEMU_FIRMWARE", fixture.firmware),
        ("QEMU_ROMS", fixture.roms),
        ("GUEST_KERNEL", fixture.kernel),
        ("GUEST_INITRAMFS", fixture.initramfs),
        ("GUEST_ELF", fixture.bare_metal),
    ] {
        println!("{name}='{}'", value.display());
    }
}
