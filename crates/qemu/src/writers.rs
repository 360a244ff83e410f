//! Which parties write a guest's memory, and whether the dirty log sees their writes.
//!
//! The log sees writes through QEMU's own mapping: by vCPUs, by QEMU's own devices, and by the
//! kernel's vhost, which copies as QEMU would. It does not see hardware that writes by DMA, nor
//! other processes that have the memory mapped. So a guest is attached only if each of its devices
//! and back ends is on a list of those that write through QEMU's mapping alone. Any other guest is
//! carried: QEMU's own migration asks its back ends for their logs.
//!
//! Source of the lists: `-device help`, `-object help` and `-netdev help` of QEMU 7.2 and 10.0, and
//! what each of these does with guest memory. Devices that a machine type includes are parts of
//! QEMU; those that users add are listed below `/machine/peripheral`.

use serde_json::{Value, json};

use crate::disks::Disks;
use crate::error::QemuError;
use crate::machine::Habits;
use crate::qmp::{Qmp, QmpError};

/// Types of devices that write guest memory through QEMU's mapping alone. The `-transitional` and
/// `-non-transitional` variants of virtio devices are matched by these names. In order: buses;
/// disks; network, where `vhost=on` of a tap is the kernel's vhost; displays; input; sound; USB,
/// where libusb copies the data of host devices; serial ports; memory; the rest of a computer.
const DEVICES: &str = "
    i82801b11-bridge ioh3420 pci-bridge pci-bridge-seat pcie-pci-bridge pcie-root-port pxb
    pxb-pcie x3130-upstream xio3130-downstream ipoctal232 tpci200
    am53c974 dc390 floppy ich9-ahci ide-cd ide-cf ide-hd isa-fdc isa-ide lsi53c810
    lsi53c895a megasas megasas-gen2 mptsas1068 nvme nvme-ns nvme-subsys piix3-ide
    piix4-ide pvscsi scsi-block scsi-cd scsi-generic scsi-hd sd-card sdhci-pci ufs
    ufs-lu usb-bot usb-mtp usb-storage usb-uas virtio-9p-device virtio-9p-pci
    virtio-blk-device virtio-blk-pci virtio-scsi-device virtio-scsi-pci
    e1000 e1000-82544gc e1000-82545em e1000e i82550 i82551 i82557a i82557b i82557c
    i82558a i82558b i82559a i82559b i82559c i82559er i82562 i82801 igb ne2k_isa
    ne2k_pci pcnet rocker rtl8139 tulip usb-net vhost-vsock-device vhost-vsock-pci
    virtio-net-device virtio-net-pci vmxnet3
    VGA ati-vga bochs-display cirrus-vga isa-cirrus-vga isa-vga qxl qxl-vga ramfb
    secondary-vga virtio-gpu-device virtio-gpu-pci virtio-vga vmware-svga
    i8042 usb-braille usb-kbd usb-mouse usb-tablet usb-wacom-tablet virtio-input-host-device
    virtio-input-host-pci virtio-keyboard-device virtio-keyboard-pci virtio-mouse-device
    virtio-mouse-pci virtio-multitouch-device virtio-multitouch-pci virtio-tablet-device
    virtio-tablet-pci vmmouse
    AC97 ES1370 adlib cs4231a gus hda-duplex hda-micro hda-output ich9-intel-hda
    intel-hda sb16 usb-audio virtio-sound-device virtio-sound-pci
    ccid-card-emulated ccid-card-passthru ich9-usb-ehci1 ich9-usb-ehci2 ich9-usb-uhci1
    ich9-usb-uhci2 ich9-usb-uhci3 ich9-usb-uhci4 ich9-usb-uhci5 ich9-usb-uhci6 nec-usb-xhci
    pci-ohci piix3-usb-uhci piix4-usb-uhci qemu-xhci u2f-passthru usb-ccid usb-ehci usb-host
    usb-hub usb-redir usb-serial
    ipmi-bmc-extern ipmi-bmc-sim isa-debugcon isa-ipmi-bt isa-ipmi-kcs isa-parallel isa-serial
    pci-ipmi-bt pci-ipmi-kcs pci-serial pci-serial-2x pci-serial-4x sga smbus-ipmi
    virtconsole virtio-serial-device virtio-serial-pci virtserialport
    nvdimm pc-dimm virtio-balloon-device virtio-balloon-pci virtio-mem virtio-mem-pci
    virtio-pmem virtio-pmem-pci
    AMDVI-PCI acpi-erst amd-iommu ctucan_pci guest-loader hv-syndbg hyperv-testdev i2c-ddc
    i6300esb ib700 intel-iommu isa-applesmc isa-debug-exit kvaser_pci loader mc146818rtc
    mioe3680_pci pcm3680_pci pvpanic pvpanic-pci smbus-eeprom tpm-crb tpm-tis
    virtio-crypto-device virtio-crypto-pci virtio-iommu-device virtio-iommu-pci virtio-rng-device
    virtio-rng-pci vmbus-bridge vmclock vmcoreinfo vmgenid
";

/// Types of `-object` that write guest memory through QEMU's mapping only.
const OBJECTS: &str = "
    acpi-generic-initiator acpi-generic-port authz-list authz-list-file authz-pam authz-simple
    can-bus can-host-socketcan colo-compare cryptodev-backend cryptodev-backend-builtin
    cryptodev-backend-lkcf dbus-vmstate filter-buffer filter-dump filter-mirror filter-redirector
    filter-replay filter-rewriter input-barrier input-linux iommufd iothread main-loop
    memory-backend-epc memory-backend-file memory-backend-memfd memory-backend-ram
    memory-backend-shm pr-manager-helper qtest rng-builtin rng-egd rng-random secret
    secret_keyring thread-context throttle-group tls-cipher-suites tls-creds-anon tls-creds-psk
    tls-creds-x509
";

/// Network back ends whose packets are copied by QEMU or by the kernel's vhost, by their names in
/// `info network`.
const NETWORKS: &str = "
    af-xdp bridge dgram hubport l2tpv3 netmap nic none socket stream tap user
    vde
";

/// What to use instead of some unlisted devices, by the prefix of their type.
const INSTEAD: [(&str, &str); 6] = [
    (
        "vfio-",
        "a device that is passed through writes memory by DMA: detach it first (`device_del`)",
    ),
    ("vhost-user-", "its backend is another process: use the device without `vhost-user`"),
    ("vhost-vdpa-", "its backend is hardware: use a device of QEMU's own"),
    (
        "vhost-scsi",
        "the kernel's SCSI target writes pages that it has pinned: use `virtio-scsi-pci`",
    ),
    ("ivshmem", "other processes write its memory: detach it first (`device_del`)"),
    ("x-pci-proxy-dev", "its backend is another process: use a device of QEMU's own"),
];

/// Why a device or an object that is on no list is not trusted.
const UNKNOWN: &str = "it is not known to write guest memory only where the dirty log sees it";

/// vCPU features that let a guest run nested guests.
const NESTING: [&str; 2] = ["vmx", "svm"];

/// Checks that every writer of guest memory is seen by the dirty log. Returns the habits of the
/// devices that were found.
///
/// # Errors
/// `QemuError::Unattachable` with the name of what forbids attaching, and QMP errors.
pub fn all_seen(qmp: &mut Qmp) -> Result<Habits, QemuError> {
    let tree = types_of_tree(&qmp.human("info qtree")?);
    let mut devices = Vec::new();
    for owner in ["/machine/peripheral", "/machine/peripheral-anon"] {
        devices.extend(children(qmp, owner)?);
    }
    check_devices(&tree, &devices).map_err(QemuError::Unattachable)?;
    check_objects(&children(qmp, "/objects")?).map_err(QemuError::Unattachable)?;
    check_networks(&qmp.human("info network")?).map_err(QemuError::Unattachable)?;
    runs_no_guests(qmp)?;
    let all: Vec<String> =
        tree.into_iter().chain(devices.into_iter().map(|(_, kind)| kind)).collect();
    let disks = Disks::look(qmp, &all)?;
    let gives_pages_back = all
        .iter()
        .any(|kind| kind.starts_with("virtio-balloon-") || kind.starts_with("virtio-mem"));
    Ok(Habits { pins_pages: disks.pin_pages, gives_pages_back })
}

/// The names and types of an object's children.
///
/// # Errors
/// QMP errors.
pub fn children(qmp: &mut Qmp, of: &str) -> Result<Vec<(String, String)>, QmpError> {
    let listed = qmp.execute("qom-list", json!({ "path": of }))?;
    let child = |one: &Value| {
        let kind = one["type"].as_str()?.strip_prefix("child<")?.strip_suffix('>')?;
        Some((one["name"].as_str()?.to_owned(), kind.to_owned()))
    };
    Ok(listed.as_array().into_iter().flatten().filter_map(child).collect())
}

/// The types of all devices of `info qtree`, including those of the machine type.
fn types_of_tree(tree: &str) -> Vec<String> {
    let names = tree.lines().filter_map(|line| line.trim().strip_prefix("dev: "));
    names.map(|rest| rest.split(',').next().unwrap_or(rest).to_owned()).collect()
}

fn check_devices(tree: &[String], added: &[(String, String)]) -> Result<(), String> {
    for kind in tree {
        if let Some((_, why)) = INSTEAD.iter().find(|(begins, _)| kind.starts_with(begins)) {
            return Err(format!("it has a device `{kind}`, and {why}"));
        }
    }
    for (name, kind) in added {
        let plain = kind.strip_suffix("-transitional").unwrap_or(kind);
        let plain = plain.strip_suffix("-non").unwrap_or(plain);
        let is_vcpu = kind.ends_with("-x86_64-cpu") || kind.ends_with("-i386-cpu");
        if !is_vcpu && !is_listed(DEVICES, plain) {
            return Err(format!("it has a device `{kind}` (`{name}`), and {UNKNOWN}"));
        }
    }
    Ok(())
}

fn check_objects(objects: &[(String, String)]) -> Result<(), String> {
    match objects.iter().find(|(_, kind)| !is_listed(OBJECTS, kind)) {
        Some((name, kind)) => Err(format!("it has an object `{kind}` (`{name}`), and {UNKNOWN}")),
        None => Ok(()),
    }
}

fn is_listed(list: &str, kind: &str) -> bool {
    list.split_whitespace().any(|listed| listed == kind)
}

/// Parses lines such as `net0: index=0,type=tap,ifname=tap0`.
fn check_networks(networks: &str) -> Result<(), String> {
    let kinds = networks.lines().filter_map(|line| {
        let (name, rest) = line.split_once(": index=")?;
        let kind = rest.split_once(",type=")?.1;
        Some((name.trim_start_matches([' ', '\\']), kind.split(',').next().unwrap_or(kind).trim()))
    });
    for (name, kind) in kinds {
        if !is_listed(NETWORKS, kind) {
            return Err(format!(
                "its network backend `{name}` is of type={kind}, which may write guest memory from \
                 outside: use `tap` (vhost=on is no hindrance) or `user`"
            ));
        }
    }
    Ok(())
}

/// Refuses a guest of KVM that may run nested guests. For those the processor itself writes pages
/// that KVM has pinned (the virtual APIC page, posted interrupts). KVM's own log records these
/// writes, and a userfaultfd does not. For an emulated guest QEMU writes these pages.
fn runs_no_guests(qmp: &mut Qmp) -> Result<(), QemuError> {
    if qmp.execute("query-kvm", json!({}))?["enabled"] != true {
        return Ok(());
    }
    let vcpus = qmp.execute("query-cpus-fast", json!({}))?;
    let path = vcpus[0]["qom-path"].as_str().unwrap_or_default().to_owned();
    for feature in NESTING {
        let has = qmp.execute("qom-get", json!({ "path": path, "property": feature }));
        match has {
            Ok(Value::Bool(has)) => may_nest(feature, has).map_err(QemuError::Unattachable)?,
            // A vCPU without such a property lacks the feature.
            Ok(_) | Err(QmpError::Refused { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn may_nest(feature: &str, has: bool) -> Result<(), String> {
    if has {
        return Err(format!(
            "its vCPUs have `{feature}`, so it may run guests of its own, for which the processor \
             writes pages that no write protection sees: start QEMU with `-cpu …,{feature}=off` if \
             it runs none"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(all: &[&str]) -> Vec<(String, String)> {
        all.iter().map(|&kind| ("id".to_owned(), kind.to_owned())).collect()
    }

    #[test]
    fn unlisted_devices_are_refused_by_name() {
        let known =
            ["virtio-blk-pci-non-transitional", "virtio-net-pci-transitional", "qemu64-x86_64-cpu"];
        assert_eq!(check_devices(&[], &kinds(&known)), Ok(()));
        for kind in ["vfio-pci", "vhost-scsi-pci", "vhost-user-blk-pci", "made-up"] {
            let why = check_devices(&[], &kinds(&[kind])).unwrap_err();
            assert!(why.contains(&format!("`{kind}`")), "{why}");
        }
        let tree =
            types_of_tree("bus: main\r\n  dev: hpet, id \"\"\r\n  dev: vfio-pci, id \"\"\r\n");
        assert!(check_devices(&tree, &[]).unwrap_err().contains("by DMA"));
        assert!(
            check_objects(&kinds(&["x-vfio-user-server"])).unwrap_err().contains("object `x-vfio")
        );
        assert_eq!(check_objects(&kinds(&["iothread", "memory-backend-file"])), Ok(()));
    }

    #[test]
    fn unlisted_networks_are_refused_by_name() {
        let seen = "n0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\r\n \\ h: \
             index=0,type=tap,ifname=tap0,script=no\r\nfilters:\r\n  - f0: \
             type=filter-dump,file=x\r\n";
        assert_eq!(check_networks(seen), Ok(()));
        for kind in ["vhost-user", "vhost-vdpa", "passt"] {
            let line =
                format!("virtio.0: index=0,type=nic,model=x\r\n \\ p: index=0,type={kind},x=y\r\n");
            let why = check_networks(&line).unwrap_err();
            assert!(why.contains(&format!("`p` is of type={kind}")), "{why}");
        }
    }

    #[test]
    fn vcpus_that_may_run_guests_are_refused() {
        assert_eq!(may_nest("svm", false), Ok(()));
        assert!(may_nest("vmx", true).unwrap_err().contains("vmx=off"));
    }
}
