//! Definitions that reach the host.

use super::*;

/// What reaches the host, with the path of the refused element or attribute, and the line of the
/// policy that permits exactly this.
#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn hostile_definitions_are_refused() {
    let devices = "/domain/devices";
    let image = |by: &str| with("/var/lib/libvirt/images/web.qcow2", by);
    let file = |text: &str, path: &str| (text.to_owned(), format!("{devices}/{path}"));
    let device = |text: &str, path: &str| file(&with_device(text), path);
    let child = |text: &str, path: &str| (with_child(text), format!("/domain/{path}"));
    let changed = |from: &str, to: &str, path: &str| (with(from, to), format!("/domain/{path}"));
    let qemu = "http://libvirt.org/schemas/domain/qemu/1.0";
    let cases = [
        // Files and devices of the host.
        file(&image("/etc/shadow"), "disk[1]/source/@file"),
        file(&image("/var/lib/libvirt/images/../../../../etc/shadow"), "disk[1]/source/@file"),
        file(&image("web.qcow2"), "disk[1]/source/@file"),
        file(&image("/dev/sda"), "disk[1]/source/@file"),
        file(&image("/dev/null"), "disk[1]/source/@file"),
        file(&image("/var/lib/libvirt/images"), "disk[1]/source/@file"),
        file(
            &with("/var/lib/libvirt/images/base.raw", "/etc/shadow"),
            "disk[1]/backingStore/source/@file",
        ),
        file(
            &with("<backingStore/>", "<backingStore><source dev='/dev/sda'/></backingStore>"),
            "disk[1]/backingStore/backingStore/source/@dev",
        ),
        device("<disk type='block'><source dev='/dev/sda'/></disk>", "disk[4]/source/@dev"),
        device("<disk type='dir'><source dir='/'/></disk>", "disk[4]"),
        device("<disk type='nvme'><source type='pci'/></disk>", "disk[4]"),
        device("<disk type='vhostuser'><source path='/x'/></disk>", "disk[4]"),
        device("<disk><source file='/etc/shadow'/></disk>", "disk[4]"),
        device("<disk type='file' rawio='yes'/>", "disk[4]/@rawio"),
        device("<disk type='file' device='lun'/>", "disk[4]/@device"),
        device("<disk type='file'><source fdgroup='x'/></disk>", "disk[4]/source/@fdgroup"),
        device(
            "<disk type='block'><source><reservations managed='yes'/></source></disk>",
            "disk[4]/source/reservations",
        ),
        device("<disk type='volume'><source pool='hba'/></disk>", "disk[4]/source/@pool"),
        device("<disk type='volume'><source pool='other'/></disk>", "disk[4]/source/@pool"),
        device(
            "<disk type='network'><source protocol='nbd'><host name='192.0.2.1'/></source></disk>",
            "disk[4]/source/@protocol",
        ),
        changed("<boot dev='hd'/>", "<kernel>/etc/shadow</kernel>", "os/kernel"),
        changed("<boot dev='hd'/>", "<initrd>/etc/shadow</initrd>", "os/initrd"),
        changed("<boot dev='hd'/>", "<initrd>/var/lib/libvirt/boot/a,/etc/x</initrd>", "os/initrd"),
        changed("<boot dev='hd'/>", "<dtb>/etc/shadow</dtb>", "os/dtb"),
        changed(
            "<boot dev='hd'/>",
            "<acpi><table type='slic'>/etc/shadow</table></acpi>",
            "os/acpi/table",
        ),
        changed("/usr/share/OVMF/OVMF_CODE_4M.ms.fd", "/etc/shadow", "os/loader"),
        changed("/usr/share/OVMF/OVMF_VARS_4M.ms.fd", "/etc/shadow", "os/nvram/@template"),
        changed("/var/lib/libvirt/qemu/nvram/web_VARS.fd", "/etc/shadow", "os/nvram"),
        changed(
            "readonly='yes' secure='yes' type='pflash'",
            "readonly='no' type='pflash'",
            "os/loader",
        ),
        child(
            "<sysinfo type='fwcfg'><entry name='x' file='/etc/shadow'/></sysinfo>",
            "sysinfo/entry/@file",
        ),
        // Programs.
        changed("/usr/bin/qemu-system-x86_64", "/bin/sh", "devices/emulator"),
        changed("<emulator>", "<emulator>/bin/sh</emulator><emulator>", "devices/emulator[1]"),
        child(
            &format!("<q:commandline xmlns:q='{qemu}'><q:arg value='-x'/></q:commandline>"),
            "qemu:commandline",
        ),
        child(&format!("<override xmlns='{qemu}'/>"), "qemu:override"),
        child("<bootloader>/bin/sh</bootloader>", "bootloader"),
        device("<interface type='ethernet'><script path='/x'/></interface>", "interface[2]"),
        device("<interface type='network'><script path='/x'/></interface>", "interface[2]/script"),
        device("<filesystem type='mount'><source dir='/'/></filesystem>", "filesystem"),
        // Devices, memory and networks of the host.
        device("<hostdev mode='subsystem' type='pci'/>", "hostdev"),
        device("<shmem name='x'/>", "shmem"),
        device("<memory model='nvdimm'><source><path>/x</path></source></memory>", "memory"),
        device(
            "<memory model='dimm'><source><path>/x</path></source></memory>",
            "memory/source/path",
        ),
        device("<input type='evdev'><source dev='/dev/input/event0'/></input>", "input[2]"),
        device("<vsock model='virtio'><cid auto='yes'/></vsock>", "vsock"),
        device(
            "<interface type='bridge'><source bridge='br0'/></interface>",
            "interface[2]/source/@bridge",
        ),
        device("<interface type='direct'><source dev='eth0'/></interface>", "interface[2]"),
        device("<interface type='vhostuser'/>", "interface[2]"),
        device("<interface type='user'/>", "interface[2]"),
        device("<interface type='hostdev'/>", "interface[2]"),
        changed("network='default'", "network='management'", "devices/interface/source/@network"),
        changed("dev='vnet3'", "dev='eth0'", "devices/interface/target/@dev"),
        device("<lease><lockspace>x</lockspace></lease>", "lease"),
        device("<graphics type='egl-headless'/>", "graphics[2]"),
        device("<graphics type='spice'><gl enable='yes'/></graphics>", "graphics[2]/gl/@enable"),
        changed(
            "autoport='yes' listen='127.0.0.1'",
            "listen='0.0.0.0'",
            "devices/graphics/@listen",
        ),
        device(
            "<graphics type='vnc'><listen type='socket' socket='/etc/x'/></graphics>",
            "graphics[2]/listen/@socket",
        ),
        device("<graphics type='vnc' socket='/etc/x'/>", "graphics[2]/@socket"),
        device("<audio id='2' type='file' path='/etc/x'/>", "audio[2]"),
        // What QEMU or a daemon of the host writes, and what it connects to.
        device(
            "<serial type='file'><source path='/etc/cron.d/x'/></serial>",
            "serial[2]/source/@path",
        ),
        device("<serial type='pty'><log file='/etc/cron.d/x'/></serial>", "serial[2]/log/@file"),
        device("<serial type='dev'><source path='/dev/ttyS0'/></serial>", "serial[2]"),
        device("<serial type='tcp'><source host='192.0.2.1'/></serial>", "serial[2]"),
        device("<channel type='udp'/>", "channel[2]"),
        device("<channel type='unix'><source mode='connect'/></channel>", "channel[2]/source"),
        // libvirt connects if nothing is said.
        device(
            "<channel type='unix'><source path='/run/libvirt/x'/></channel>",
            "channel[2]/source",
        ),
        device("<serial type='unix'><source path='/run/libvirt/x'/></serial>", "serial[2]/source"),
        // The path of its socket is made from the name.
        changed(
            "name='org.qemu.guest_agent.0'",
            "name='../../../etc/shadow'",
            "devices/channel/target/@name",
        ),
        changed("name='org.qemu.guest_agent.0'", "name='..'", "devices/channel/target/@name"),
        device(
            "<channel type='pty'><target type='guestfwd' address='10.0.2.1'/></channel>",
            "channel[2]/target",
        ),
        device("<graphics type='vnc' keymap='/etc/shadow'/>", "graphics[2]/@keymap"),
        // Images whose chain libvirt would follow by itself, and formats with more files.
        device("<disk type='file'><driver type='vmdk'/></disk>", "disk[4]/driver/@type"),
        device(
            "<channel type='unix'><source mode='bind' path='/etc/x'/></channel>",
            "channel[2]/source/@path",
        ),
        device("<smartcard mode='host'/>", "smartcard"),
        device("<redirdev bus='usb' type='tcp'/>", "redirdev"),
        device("<tpm model='tpm-tis'><backend type='passthrough'/></tpm>", "tpm[2]/backend"),
        device(
            "<tpm><backend type='emulator'><source type='dir' path='/etc'/></backend></tpm>",
            "tpm[2]/backend/source/@path",
        ),
        device("<pstore backend='acpi-erst'><path>/etc/shadow</path></pstore>", "pstore/path"),
        changed("/dev/urandom", "/dev/sda", "devices/rng/backend"),
        device("<rng model='virtio'><backend model='egd'/></rng>", "rng[2]/backend"),
        device("<crypto type='qemu'><backend model='lkcf'/></crypto>", "crypto/backend/@model"),
        changed("action='reset'", "action='dump'", "devices/watchdog/@action"),
        changed("<on_crash>destroy", "<on_crash>coredump-destroy", "on_crash"),
        // Confinement and shares.
        changed("<partition>/machine", "<partition>/system", "resource/partition"),
        changed("model='dac' relabel='yes'", "model='dac' relabel='no'", "seclabel/@relabel"),
        child("<seclabel type='none' model='selinux'/>", "seclabel[1]"),
        child("<seclabel type='static' model='dac'><label>0:0</label></seclabel>", "seclabel[1]"),
        changed("<label>", "<baselabel>x</baselabel><label>", "seclabel/baselabel"),
        changed(
            "<vcpupin vcpu='0' cpuset='1'/>",
            "<vcpusched vcpus='0' scheduler='fifo'/>",
            "cputune/vcpusched/@scheduler",
        ),
        child("<launchSecurity type='sev'/>", "launchSecurity"),
        child("<perf><event name='cmt' enabled='yes'/></perf>", "perf"),
        changed("<source type='memfd'/>", "<locked/>", "memoryBacking/locked"),
        changed("domain type='kvm'", "domain type='lxc'", "@type"),
        // What one parser could read differently than another.
        changed("<partition>/machine", "<partition><!-- -->/machine", "resource/partition"),
        changed("<emulator>", "<emulator><!-- -->", "devices/emulator"),
        child("<x:devices xmlns:x='urn:x'/>", "{urn:x}devices"),
        changed("<vcpu ", "<vcpu xmlns:x='urn:x' x:cpuset='1' ", "vcpu/@cpuset"),
    ];
    for (xml, path) in &cases {
        let found = judge(xml, None, "");
        let paths: Vec<_> = found.iter().map(|objection| objection.path.as_str()).collect();
        assert_eq!(paths, [path], "{found:#?}");
        // The line permits exactly this.
        if let Some(line) = &found[0].permit {
            let left = judge(xml, None, line);
            // An image is never another device.

            let is_odd = found[0].value.as_deref() == Some("/dev/null");
            assert!(left.is_empty() != is_odd, "{line}: {left:?}");
        }
        // The same in the definition that libvirt keeps.
        let cookie = format!("<qemu-migration>{xml}</qemu-migration>");
        let kept = judge(USUAL, Some(&cookie), "");
        assert_eq!(kept.len(), 1, "{kept:#?}");
        assert_eq!(kept[0].path, format!("/qemu-migration{path}"));
        assert!(refusal("web", &kept).unwrap().contains(&kept[0].path));
    }
}
