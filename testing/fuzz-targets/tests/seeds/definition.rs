//! Runs the seeds of the fuzz target of definitions.

use vmferry_fuzz_targets::definition;

seed_tests!(definition, places: 200, differs: |_| false);

/// Devices that the list permits, and some that reach the host.
const DEVICES: [(&str, &str); 10] = [
    ("none", ""),
    ("empty-drive", "<disk type='file' device='cdrom'><target dev='sda'/><readonly/></disk>"),
    ("disk", "<disk type='block'><source dev='/dev/sda'/><target dev='vda'/></disk>"),
    ("chain", "<disk type='file'><backingStore><backingStore/></backingStore></disk>"),
    ("network-disk", "<disk type='network'><source protocol='rbd' name='a/b'/></disk>"),
    ("interface", "<interface type='network'><source network='default'/></interface>"),
    ("bridge", "<interface type='bridge'><source bridge='br0'/></interface>"),
    ("console", "<console type='pty'><source path='/dev/pts/1'/></console>"),
    ("log", "<serial type='file'><source path='/etc/x'/></serial>"),
    ("host-device", "<hostdev mode='subsystem' type='pci'/>"),
];

fn seeds() -> Vec<(String, Vec<u8>)> {
    let with = |(name, devices): (&str, &str)| {
        let xml = format!(
            "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
             <name>web</name><memory unit='KiB'>1024</memory><vcpu placement='static'>1</vcpu>\
             <os><type arch='x86_64' machine='q35'>hvm</type><boot dev='hd'/></os>\
             <metadata><a:b xmlns:a='urn:a'/></metadata><devices>{devices}</devices></domain>"
        );
        (name.to_owned(), xml.into_bytes())
    };
    DEVICES.into_iter().map(with).collect()
}
