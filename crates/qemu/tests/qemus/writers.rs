//! The devices and back ends with which a real QEMU's guest can be attached.

use vmferry_qemu::{Mode, QemuSource, Reached};
use vmferry_qemu_lab::{Machine, Version, World};

/// QEMU itself logs the writes of such a device.
#[test]
fn guest_with_an_unknown_device_is_carried() {
    let world = World::new();
    let machine = Machine::new(Version::V10_0, "dirty=5").with(&["-device", "edu,id=odd"]);
    let mut qemu = machine.start(&world, "here");
    let reached = Reached::by(&qemu.qmp, Mode::Auto, 0).unwrap();
    let Reached::Carried { why: Some(why), .. } = reached else { panic!("it is attached") };
    assert!(why.to_string().contains("it has a device `edu` (`odd`)"), "{why}");
    qemu.check_guest();
}

/// The devices that libvirt gives to guests, and more.
#[test]
fn guest_with_common_devices_is_attached() {
    let devices = [
        "pcie-root-port,id=port1,chassis=1,slot=1,addr=10.0",
        "pcie-root-port,id=port2,chassis=2,slot=2,addr=11.0",
        "pcie-pci-bridge,id=pci1,bus=port1",
        "qemu-xhci,id=usb",
        "usb-hub,bus=usb.0",
        "usb-tablet,bus=usb.0",
        "usb-kbd,bus=usb.0",
        "usb-storage,drive=stick,bus=usb.0",
        "ich9-usb-ehci1,id=ehci",
        "virtio-scsi-pci,id=scsi,iothread=io",
        "scsi-hd,drive=scsi-disk,bus=scsi.0",
        "virtio-blk-pci-non-transitional,drive=disk,bus=port2",
        "ich9-ahci,id=sata",
        "ide-cd,bus=sata.0",
        "virtio-net-pci-transitional,netdev=net0,bus=pci1,addr=1",
        "e1000e,netdev=net1",
        "virtio-serial-pci,id=serial",
        "virtserialport,bus=serial.0,name=org.qemu.guest_agent.0,chardev=agent",
        "virtio-balloon-pci",
        "virtio-rng-pci,rng=random",
        "virtio-keyboard-pci",
        "bochs-display",
        "ich9-intel-hda",
        "hda-duplex,audiodev=sound",
        "i6300esb",
        "pvpanic",
        "vmcoreinfo",
        "vmgenid",
        "pc-dimm,memdev=plugged",
    ];
    for version in Version::ALL {
        let world = World::new();
        let disk = world.disk(16);
        let null = "driver=null-co,size=1048576,read-zeroes=on";
        let mut machine = Machine::new(version, "");
        let disk = format!("driver=file,node-name=disk,filename={}", disk.display());
        let plugged = world.path_on_tmpfs("plugged");
        let plugged = format!(
            "memory-backend-file,id=plugged,size=128M,share=on,mem-path={}",
            plugged.display()
        );
        for (option, value) in [
            ("-m", "256M,slots=2,maxmem=1G"),
            ("-object", "iothread,id=io"),
            ("-object", "rng-random,id=random,filename=/dev/urandom"),
            ("-object", &plugged),
            ("-blockdev", &disk),
            ("-blockdev", &format!("{null},node-name=stick")),
            ("-blockdev", &format!("{null},node-name=scsi-disk")),
            ("-netdev", "user,id=net0"),
            ("-netdev", "user,id=net1"),
            ("-chardev", "null,id=agent"),
            ("-audiodev", "none,id=sound"),
        ] {
            machine = machine.with(&[option, value]);
        }
        for device in devices {
            machine = machine.with(&["-device", device]);
        }
        let qemu = machine.start(&world, &format!("{version:?}"));
        let source = QemuSource::attach(&qemu.qmp);
        let source = source.unwrap_or_else(|error| panic!("{version:?}: {error}"));
        assert!(source.habits().gives_pages_back);
    }
}

/// A process unknown to QEMU may write the file of the guest's memory.
#[test]
fn guest_whose_memory_file_is_mapped_elsewhere_is_carried() {
    let world = World::new();
    let machine = Machine::on_kvm(Version::V10_0, "hot=8,rate=40000");
    let mut qemu = machine.start(&world, "here");
    let file = world.path_on_tmpfs("here-ram");
    let other =
        format!("memory-backend-file,id=other,size=16M,share=on,mem-path={}", file.display());
    let other = machine.clone().with(&["-S", "-object", &other]).start(&world, "other");
    let reached = Reached::by(&qemu.qmp, Mode::Auto, 0).unwrap();
    let Reached::Carried { why: Some(why), source } = reached else { panic!("it is attached") };
    drop(source);
    let why = why.to_string();
    assert!(why.contains("has its memory file") && why.contains("qemu-system-x86"), "{why}");
    drop(other);
    qemu.check_guest();
    let again = Reached::by(&qemu.qmp, Mode::Auto, 0);
    assert!(matches!(again, Ok(Reached::Attached(_))), "{:?}", again.err());
}
