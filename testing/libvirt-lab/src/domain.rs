//! The definition of a domain as XML.

use uuid::Uuid;

use crate::boot::BootFiles;
use crate::guest::CONSOLES;
use crate::{Disk, LibvirtVersion};

/// The software that runs in a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// Linux, emulated (`type='qemu'`).
    Linux,
    /// The bare-metal guest of `crates/microvm/guest/`, on KVM (`type='kvm'`), with its memory in a
    /// shared memfd.
    BareMetal,
}

/// The definition of a domain.
#[derive(Clone, Debug)]
pub struct Domain {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// Memory.
    pub mib: u64,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// `q35` or `pc`.
    pub machine: &'static str,
    /// The software that runs in it, with its accelerator.
    pub guest: Guest,
    /// The CPU model of an emulated guest: `max` or `qemu64`.
    pub cpu: &'static str,
    /// The guest's command line, as that of `vmferry_qemu_lab::Machine`.
    pub workload: String,
    /// Its disks: `vda`, `vdb` and so on.
    pub disks: Vec<Disk>,
    /// Further elements of `<devices>`.
    pub devices: String,
}

impl Domain {
    /// A domain with Linux, 128 MiB and one vCPU.
    #[must_use]
    pub fn linux(name: &str, workload: &str) -> Self {
        Self {
            name: name.to_owned(),
            uuid: Uuid::new_v4(),
            mib: 128,
            vcpus: 1,
            machine: "q35",
            guest: Guest::Linux,
            cpu: "max",
            workload: workload.to_owned(),
            disks: Vec::new(),
            devices: String::new(),
        }
    }

    /// The same with the bare-metal guest on KVM.
    #[must_use]
    pub fn on_kvm(name: &str, workload: &str) -> Self {
        Self { guest: Guest::BareMetal, ..Self::linux(name, workload) }
    }

    /// The same with a further disk.
    #[must_use]
    pub fn with_disk(mut self, disk: Disk) -> Self {
        self.disks.push(disk);
        self
    }

    /// The definition for a version of libvirt.
    pub(crate) fn xml(&self, version: LibvirtVersion, software: &BootFiles) -> String {
        let Self { name, uuid, mib, vcpus, machine, .. } = self;
        let (kind, namespace, boot, cpu, backing);
        match self.guest {
            Guest::Linux => {
                kind = "qemu";
                namespace = " xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'";
                boot = format!(
                    "<kernel>{}</kernel><initrd>{}</initrd>\
                     <cmdline>console=ttyS0 quiet panic=-1 {}</cmdline>",
                    software.kernel.display(),
                    software.initramfs.display(),
                    self.workload
                );
                cpu = match self.cpu {
                    "max" => "<cpu mode='maximum'/>".to_owned(),
                    model => {
                        format!("<cpu mode='custom' match='exact'><model>{model}</model></cpu>")
                    }
                };
                backing = "";
            }
            Guest::BareMetal => {
                kind = "kvm";
                namespace = "";
                boot = format!(
                    "<kernel>{}</kernel><cmdline>{}</cmdline>",
                    software.bare_metal.display(),
                    self.workload
                );
                // QEMU's default. `host-passthrough` sets a register (IA32_ARCH_CAPABILITIES) that
                // KVM on some virtual machines refuses.
                cpu = "<cpu mode='custom' match='exact' check='none'>\
                       <model fallback='forbid'>qemu64</model></cpu>"
                    .to_owned();
                backing = "<memoryBacking><source type='memfd'/><access mode='shared'/>\
                           </memoryBacking>";
            }
        }
        let mut disks = String::new();
        for (number, disk) in self.disks.iter().enumerate() {
            disks.push_str(&disk.xml(number));
        }
        let mut xml = format!(
            "<domain type='{kind}'{namespace}><name>{name}</name><uuid>{uuid}</uuid>\
             <memory unit='MiB'>{mib}</memory><vcpu>{vcpus}</vcpu>{backing}\
             <os><type arch='x86_64' machine='{machine}'>hvm</type>{boot}</os>\
             <features><acpi/></features>{cpu}<devices>\
             <emulator>/usr/bin/qemu-system-x86_64</emulator>{disks}\
             <serial type='file'><source path='{CONSOLES}/{name}.console'/></serial>\
             <memballoon model='none'/>{}</devices>",
            self.devices
        );
        if self.guest == Guest::Linux && version == LibvirtVersion::V9_0 {
            xml.push_str(&self.odd_memory());
        }
        xml.push_str("</domain>");
        xml
    }

    /// Replaces the machine's memory by a block whose size is not a multiple of 256 KiB. libvirt
    /// rounds memory up to 1 MiB, and QEMU before 9.0 loses writes of an emulated guest in its own
    /// migration if the size is a multiple of 256 KiB.
    fn odd_memory(&self) -> String {
        let kib = (self.mib << 10) - 8;
        let arguments = [
            "-object",
            &format!("memory-backend-ram,id=odd.ram,size={kib}K"),
            "-machine",
            "memory-backend=odd.ram",
            "-m",
            &format!("{kib}K"),
        ];
        let arguments = arguments.map(|argument| format!("<qemu:arg value='{argument}'/>"));
        format!("<qemu:commandline>{}</qemu:commandline>", arguments.concat())
    }
}
