use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::*;

/// A definition as libvirt sends it: of a running guest with what most guests have.
const USUAL: &str = r#"<domain type='kvm'>
  <name>web</name>
  <uuid>c7a5fdbd-cdaf-9455-926a-d65c16db1809</uuid>
  <title>a web server</title>
  <metadata>
    <x:os xmlns:x='urn:x'><x:path file='/etc/shadow'>anything</x:path></x:os>
  </metadata>
  <memory unit='KiB'>4194304</memory>
  <currentMemory unit='KiB'>4194304</currentMemory>
  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
  <vcpu placement='static'>2</vcpu>
  <iothreads>1</iothreads>
  <cputune><vcpupin vcpu='0' cpuset='1'/></cputune>
  <resource>
    <partition>/machine</partition>
  </resource>
  <os firmware='efi'>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
    <firmware><feature enabled='yes' name='secure-boot'/></firmware>
    <loader readonly='yes' secure='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.ms.fd</loader>
    <nvram template='/usr/share/OVMF/OVMF_VARS_4M.ms.fd'>/var/lib/libvirt/qemu/nvram/web_VARS.fd</nvram>
    <boot dev='hd'/>
  </os>
  <features><acpi/><apic/><smm state='on'/></features>
  <cpu mode='custom' match='exact' check='full'><model fallback='forbid'>EPYC</model></cpu>
  <clock offset='utc'><timer name='hpet' present='no'/></clock>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <pm><suspend-to-mem enabled='no'/></pm>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none' discard='unmap'/>
      <source file='/var/lib/libvirt/images/web.qcow2' index='1'/>
      <backingStore type='file' index='2'>
        <format type='raw'/>
        <source file='/var/lib/libvirt/images/base.raw'/>
        <backingStore/>
      </backingStore>
      <target dev='vda' bus='virtio'/>
      <alias name='virtio-disk0'/>
      <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>
    </disk>
    <disk type='volume' device='disk'>
      <source pool='default' volume='data.raw'/>
      <target dev='vdb' bus='virtio'/>
    </disk>
    <disk type='file' device='cdrom'>
      <target dev='sda' bus='sata'/>
      <readonly/>
    </disk>
    <controller type='pci' index='0' model='pcie-root'><alias name='pcie.0'/></controller>
    <interface type='network'>
      <mac address='52:54:00:6b:3c:58'/>
      <source network='default' portid='0a1b' bridge='virbr0'/>
      <target dev='vnet3'/>
      <model type='virtio'/>
      <alias name='net0'/>
    </interface>
    <serial type='pty'>
      <source path='/dev/pts/4'/>
      <target type='isa-serial' port='0'><model name='isa-serial'/></target>
      <alias name='serial0'/>
    </serial>
    <console type='pty' tty='/dev/pts/4'>
      <source path='/dev/pts/4'/>
      <target type='serial' port='0'/>
    </console>
    <channel type='unix'>
      <source mode='bind' path='/run/libvirt/qemu/channel/3-web/org.qemu.guest_agent.0'/>
      <target type='virtio' name='org.qemu.guest_agent.0' state='connected'/>
    </channel>
    <input type='tablet' bus='usb'/>
    <tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>
    <graphics type='vnc' port='5900' autoport='yes' listen='127.0.0.1'>
      <listen type='address' address='127.0.0.1'/>
    </graphics>
    <audio id='1' type='none'/>
    <video><model type='virtio' heads='1' primary='yes'/></video>
    <watchdog model='itco' action='reset'/>
    <memballoon model='virtio'><stats period='5'/></memballoon>
    <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
  </devices>
  <seclabel type='dynamic' model='dac' relabel='yes'>
    <label>+64055:+108</label>
    <imagelabel>+64055:+108</imagelabel>
  </seclabel>
</domain>"#;

/// A host with the real file system, and a libvirt.
#[derive(Debug)]
struct Here(LibvirtResources);

impl Here {
    fn new() -> Self {
        let pool = |name: &str, kind: &str, target: &str| Pool {
            name: name.into(),
            kind: kind.into(),
            target: Some(target.into()),
        };
        Self(LibvirtResources {
            emulators: vec!["/usr/bin/qemu-system-x86_64".into()],
            pools: vec![
                pool("default", "dir", "/var/lib/libvirt/images"),
                pool("fast", "logical", "/dev/fast"),
                pool("hba", "scsi", "/dev/disk/by-path"),
            ],
        })
    }
}

impl DefinitionFacts for Here {
    fn libvirt(&self) -> Result<LibvirtResources, String> {
        Ok(self.0.clone())
    }

    fn resolve(&self, path: &Path) -> Result<Resolved, String> {
        // So that the tests do not depend on this machine's firmware.
        if path.starts_with("/usr/share/OVMF") && path.extension().is_some() {
            return Ok(Resolved { path: path.to_owned(), kind: FileKind::File });
        }
        if path == Path::new("/dev/fast/web") || path == Path::new("/dev/sda") {
            return Ok(Resolved { path: "/dev/dm-3".into(), kind: FileKind::BlockDevice });
        }
        resolve(path).map_err(|error| error.to_string())
    }

    fn image_names(&self, path: &Path) -> Result<ImageNames, String> {
        image_names(path).map_err(|error| error.to_string())
    }
}

fn rules(text: &str) -> Vec<Arc<DefinitionRules>> {
    vec![Arc::new(toml::from_str(text).unwrap())]
}

fn judge(xml: &str, cookie: Option<&str>, policy: &str) -> Vec<Objection> {
    let definition = Definition { guest: "web", xml: Some(xml), cookie };
    objections(definition, &rules(policy), Arc::new(Here::new())).unwrap()
}

/// The usual definition with one text replaced.
fn with(replaced: &str, by: &str) -> String {
    assert_eq!(USUAL.matches(replaced).count(), 1, "{replaced}");
    USUAL.replace(replaced, by)
}

/// The usual definition with a further device.
fn with_device(device: &str) -> String {
    with("</devices>", &format!("{device}</devices>"))
}

/// The usual definition with a further child of `<domain>`.
fn with_child(child: &str) -> String {
    with("<devices>", &format!("{child}<devices>"))
}

#[test]
fn usual_definition_is_permitted() {
    assert_eq!(judge(USUAL, None, ""), []);
    let cookie = format!("<qemu-migration><name>web</name>{USUAL}</qemu-migration>");
    assert_eq!(judge(USUAL, Some(&cookie), ""), []);
}

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

#[test]
fn files_are_where_their_links_lead() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    fs::create_dir(root.join("images")).unwrap();
    fs::create_dir(root.join("secrets")).unwrap();
    fs::write(root.join("secrets/key"), "").unwrap();
    fs::write(root.join("images/disk"), "").unwrap();
    symlink(root.join("secrets"), root.join("images/away")).unwrap();
    symlink(root.join("secrets/key"), root.join("images/key")).unwrap();
    symlink(root.join("images"), root.join("link")).unwrap();
    symlink("/nowhere/x", root.join("images/dangling")).unwrap();
    let images = format!("only_listed = true\ndirectories = [{:?}]", root.join("link"));
    let judge = |path: &str| {
        let xml = format!(
            "<domain type='kvm'><devices><disk type='file'><source file='{}'/></disk></devices>\
             </domain>",
            root.join(path).display()
        );
        self::judge(&xml, None, &images)
    };
    for permitted in ["images/disk", "link/disk", "images/new", "link/new"] {
        assert_eq!(judge(permitted), [], "{permitted}");
    }
    for refused in
        ["secrets/key", "images/key", "images/away/key", "images/away/new", "images/dangling"]
    {
        assert_eq!(judge(refused).len(), 1, "{refused}");
    }
    // What a link leads to, and what is outside, is nothing that a peer may learn.
    for (path, about) in [
        ("images/key", "has a link in it"),
        ("secrets/key", "no directory"),
        ("secrets/none", "no directory"),
        ("secrets", "no directory"),
    ] {
        let said = judge(path)[0].to_string();
        assert!(said.contains(about) && !said.contains("there is"), "{said}");
    }
    assert!(!judge("images/key")[0].to_string().contains("secrets"));
}

#[test]
fn rules_permit_what_they_name() {
    let disk = |disk: &str| with_device(disk);
    let rbd = "<disk type='network'><auth username='vms'><secret type='ceph' uuid='x'/></auth>\
        <source protocol='rbd' name='vms/web'><host name='mon1' port='6789'/>\
        <host name='mon2' port='6789'/></source></disk>";
    for (xml, policy) in [
        (disk("<disk type='block'><source dev='/dev/sda'/></disk>"), "devices = ['/dev/sd*']"),
        (disk("<disk type='block'><source dev='/dev/fast/web'/></disk>"), "pools = ['fast']"),
        (disk("<disk type='volume'><source pool='hba'/></disk>"), "pools = ['*']"),
        (disk(rbd), "network_disks = ['rbd://mon*:6789/vms/*']"),
        (
            with_device("<interface type='bridge'><source bridge='br0'/></interface>"),
            "bridges = ['br*']",
        ),
        (with("/usr/bin/qemu-system-x86_64", "/opt/qemu"), "emulators = ['/opt/qemu']"),
        (
            with_device("<hostdev mode='subsystem'><source><x/></source></hostdev>"),
            "permit = ['/domain/devices/hostdev']",
        ),
        (
            with_device("<interface type='user'><script path='/x'/></interface>"),
            "permit = [\"/domain/devices/interface[@type='user']\"]",
        ),
        (USUAL.to_owned(), "max_memory_mib = 4096\nmax_vcpus = 2"),
    ] {
        assert_eq!(judge(&xml, None, policy), [], "{policy}");
    }
    for (xml, policy) in [
        // The second server is another one.
        (disk(rbd), "network_disks = ['rbd://mon1:6789/vms/*']"),
        (
            with_device("<interface type='ethernet'/>"),
            "permit = [\"/domain/devices/interface[@type='user']\"]",
        ),
        (USUAL.to_owned(), "max_memory_mib = 4095"),
        (USUAL.to_owned(), "max_vcpus = 1"),
        (
            with("</cpu>", "<numa><cell cpus='0-1' memory='8' unit='GiB'/></numa></cpu>"),
            "max_memory_mib = 4096",
        ),
    ] {
        assert_eq!(judge(&xml, None, policy).len(), 1, "{policy}");
    }
}

/// The sender can have written the image.
#[test]
fn files_that_images_name_are_judged() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    let write = |name: &str, backing: &str, data: &str| {
        let data = (0x4441_5441, data.as_bytes());
        let extensions = if data.1.is_empty() { vec![] } else { vec![data] };
        fs::write(root.join(name), qcow2::tests::header(&extensions, backing)).unwrap();
    };
    write("alone", "", "");
    write("overlay", "alone", "");
    write("hostile", "/dev/sda", "");
    write("above", "hostile", "");
    write("network", "nbd://192.0.2.1/x", "");
    write("split", "", "/etc/shadow");
    write("circle", "circle", "");
    fs::write(root.join("raw"), "").unwrap();
    let rules = format!("directories = [{root:?}]");
    let disk = |format: &str, name: &str, below: &str| {
        let file = root.join(name);
        with_device(&format!(
            "<disk type='file'><driver name='qemu' type='{format}'/>\
             <source file='{}'/>{below}</disk>",
            file.display()
        ))
    };
    for (format, name, below) in [
        ("qcow2", "alone", ""),
        ("qcow2", "overlay", ""),
        ("qcow2", "missing", ""),
        ("qcow2", "raw", ""),
        // libvirt does not look into it.
        ("raw", "hostile", ""),
        ("qcow2", "hostile", "<backingStore/>"),
    ] {
        assert_eq!(judge(&disk(format, name, below), None, &rules), [], "{format} {name}");
    }
    for (name, below, says) in [
        ("hostile", "", "\"/dev/sda\": its image names this file"),
        ("above", "", "\"/dev/sda\""),
        ("network", "", "nbd:"),
        ("split", "", "\"/etc/shadow\""),
        ("split", "<backingStore/>", "\"/etc/shadow\""),
        ("circle", "", "too long"),
    ] {
        let xml = disk("qcow2", name, below);
        let found = judge(&xml, None, &rules);
        assert!(found.len() == 1 && found[0].to_string().contains(says), "{name}: {found:?}");
        assert_eq!(found[0].path, "/domain/devices/disk[4]");
        let permitted = format!("{rules}\n{}", found[0].permit.as_ref().unwrap());
        assert_eq!(judge(&xml, None, &permitted), []);
        // What libvirt keeps is not opened.
        let cookie = format!("<qemu-migration>{xml}</qemu-migration>");
        assert_eq!(judge(USUAL, Some(&cookie), &rules), []);
    }
    // The last image that the definition names.
    let below = format!(
        "<backingStore type='file'><format type='qcow2'/><source file='{}'/></backingStore>",
        root.join("hostile").display()
    );
    assert_eq!(judge(&disk("qcow2", "alone", &below), None, &rules).len(), 1);
}

/// Pools that somebody's tools have made are no permission.
#[test]
fn pools_are_usable_if_they_are_for_images() {
    let with_pool = |kind: &str, target: &str, path: &str, policy: &str| {
        let mut here = Here::new();
        here.0.pools.push(Pool {
            name: "more".into(),
            kind: kind.into(),
            target: Some(target.into()),
        });
        let xml = format!(
            "<domain type='kvm'><devices><disk type='file'><source file='{path}'/></disk>\
             </devices></domain>"
        );
        let definition = Definition { guest: "web", xml: Some(&xml), cookie: None };
        objections(definition, &rules(policy), Arc::new(here)).unwrap().is_empty()
    };
    assert!(with_pool("dir", "/srv/isos", "/srv/isos/new", ""));
    assert!(!with_pool("dir", "/srv/isos", "/srv/isos/below/new", ""));
    assert!(!with_pool("dir", "/srv/isos", "/srv/isos/.hidden", ""));
    for home in ["/root", "/home/u", "/tmp", "/etc", "/srv", "/var/lib/libvirt/qemu"] {
        let path = format!("{home}/new");
        assert!(!with_pool("dir", home, &path, ""), "{home}");
        assert!(with_pool("dir", home, &path, "pools = ['more']"), "{home}");
    }
    assert!(!with_pool("logical", "/dev/fast", "/dev/fast/web", ""));
    assert!(with_pool("logical", "/dev/fast", "/dev/fast/web", "pools = ['more']"));
    assert!(!with_pool("logical", "/dev/mapper", "/dev/sda", "pools = ['more']"));
    // No log or other file that QEMU writes.
    let log = with_device("<serial type='file'><source path='/srv/isos/x'/></serial>");
    assert_eq!(judge(&log, None, "pools = ['*']").len(), 1);
}

/// The Finish of a guest is judged by what was learned for its Prepare.
#[test]
fn host_is_asked_once() {
    #[derive(Debug)]
    struct Once(Here, std::sync::atomic::AtomicU32);
    impl DefinitionFacts for Once {
        fn libvirt(&self) -> Result<LibvirtResources, String> {
            let asked = self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if asked > 0 { Err("it is busy".into()) } else { self.0.libvirt() }
        }
        fn resolve(&self, path: &Path) -> Result<Resolved, String> {
            self.0.resolve(path)
        }
        fn image_names(&self, path: &Path) -> Result<ImageNames, String> {
            self.0.image_names(path)
        }
    }
    let facts = facts::Remembered::new(Arc::new(Once(Here::new(), 0.into())));
    let judgment = Judgment { rules: rules(""), facts };
    let cookie = format!("<qemu-migration>{USUAL}</qemu-migration>");
    for (xml, cookie) in [(Some(USUAL), None), (None, Some(&*cookie))] {
        let judged = Definition { guest: "web", xml, cookie };
        assert_eq!(judgment.objections(judged).unwrap(), []);
    }
    let many: String = (0..2000)
        .map(|n| format!("<serial type='file'><source path='/var/log/libvirt/qemu/{n}'/></serial>"))
        .collect();
    let found = judge(&with_device(&many), None, "");
    assert!(found[0].reason.contains("more than 1024 paths"), "{found:?}");
}

#[test]
fn socket_of_a_server_is_refused() {
    let xml = with_device(
        "<disk type='network'><source protocol='nbd'><host transport='unix' socket='/run/x'/>\
         </source></disk>",
    );
    let found = judge(&xml, None, "network_disks = ['nbd:///']");
    let paths: Vec<_> = found.iter().map(|one| one.path.rsplit('/').next().unwrap()).collect();
    assert_eq!(paths, ["@transport", "@socket"]);
}

/// An image of a directory of its own guest only.
#[test]
fn directory_may_contain_the_name_of_the_guest() {
    let xml = |path: &str| {
        format!(
            "<domain type='kvm'><devices><disk type='file'><source file='{path}'/></disk>\
             </devices></domain>"
        )
    };
    let policy = "only_listed = true\ndirectories = ['/srv/guests/{name}']";
    assert_eq!(judge(&xml("/srv/guests/web/disk"), None, policy), []);
    assert_eq!(judge(&xml("/srv/guests/db/disk"), None, policy).len(), 1);
    assert_eq!(judge(&xml("/srv/guests/web2/disk"), None, policy).len(), 1);
    assert_eq!(judge(&xml("/var/lib/libvirt/images/disk"), None, policy).len(), 1);
    assert_eq!(judge(&xml("/dev/fast/web"), None, policy).len(), 1);
    let policy = format!("{policy}\npools = ['default', 'fast']");
    assert_eq!(judge(&xml("/var/lib/libvirt/images/disk"), None, &policy), []);
    assert_eq!(judge(&xml("/dev/fast/web"), None, &policy), []);
}

#[test]
fn rule_with_the_fewest_objections_is_told() {
    let xml = with_device("<hostdev/><shmem name='x'/>");
    let definition = Definition { guest: "web", xml: Some(&xml), cookie: None };
    let all = [rules(""), rules("permit = ['/domain/devices/shmem']")].concat();
    let found = objections(definition, &all, Arc::new(Here::new())).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(
        found[0].to_string(),
        "/domain/devices/hostdev: this is not permitted (to permit it: \
         permit = [\"/domain/devices/hostdev\"])"
    );
    assert_eq!(objections(definition, &[], Arc::new(Here::new())).unwrap(), [Objection::of_all()]);
}

#[test]
fn work_is_bounded() {
    let nested = "<backingStore type='file'>".repeat(30_000);
    let xml = format!(
        "<domain type='kvm'><devices><disk type='file'>{nested}{}</disk></devices></domain>",
        "</backingStore>".repeat(30_000)
    );
    let found = judge(&xml, None, "");
    assert!(found.len() == 1 && found[0].reason.contains("too deeply"), "{}", found.len());
    let many = with_device(&"<hostdev/>".repeat(1000));
    let found = judge(&many, None, "");
    assert_eq!(found.len(), objection::MOST_OBJECTIONS);
    let said = refusal("web", &found).unwrap();
    assert!(said.ends_with("; and 61 more") && said.len() < 1000, "{said}");
}

#[test]
fn libvirt_that_does_not_answer_permits_no_emulator() {
    #[derive(Debug)]
    struct Silent;
    impl DefinitionFacts for Silent {
        fn libvirt(&self) -> Result<LibvirtResources, String> {
            Err("it is down".into())
        }
        fn resolve(&self, path: &Path) -> Result<Resolved, String> {
            Ok(Resolved { path: PathBuf::from(path), kind: FileKind::File })
        }
        fn image_names(&self, _: &Path) -> Result<ImageNames, String> {
            Err("it can't be read".into())
        }
    }
    let xml = "<domain type='kvm'><devices><emulator>/usr/bin/x</emulator></devices></domain>";
    let definition = Definition { guest: "web", xml: Some(xml), cookie: None };
    let found = objections(definition, &rules(""), Arc::new(Silent)).unwrap();
    assert!(found[0].reason.contains("it is down"), "{found:?}");
}
