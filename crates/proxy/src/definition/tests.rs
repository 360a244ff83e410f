use std::path::{Path, PathBuf};

use super::*;

mod files;
mod hostile;

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
    <nvram
      template='/usr/share/OVMF/OVMF_VARS_4M.ms.fd'>/var/lib/libvirt/qemu/nvram/web_VARS.fd</nvram>
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
