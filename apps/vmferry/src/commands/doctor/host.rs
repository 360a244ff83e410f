//! Checks of this host: KVM, userfaultfd, ptrace, journals, memory, control groups, the policy.

mod journals;
mod room;

use std::path::Path;

use bytesize::ByteSize;
use rustix::thread::CapabilitySet;
use vmferry::chain;
use vmferry::config::policy::Policy;
use vmferry::probe::HostFacts;
use vmferry_dirty::UffdLog;
use vmferry_faults::{FaultDescriptor, FaultError};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout};

pub use self::journals::journals_on_disk;
pub use self::room::{look_for_any_room, look_for_room};
use super::{Findings, Level};

const HERE: &str = "this host";

/// Checks what every migration needs.
pub fn look(host: &HostFacts, findings: &mut Findings) {
    look_at_kvm(findings);
    look_at_kernel(host, findings);
    look_at_post_copy(host, findings);
    look_at_ptrace(findings);
    journals::look(findings);
    look_at_memory(host, findings);
    look_at_control_groups(findings);
    if let Some(control) = &host.congestion_control {
        findings.ok("congestion-control", HERE, format!("new TCP connections use {control}"));
    }
}

/// Checks what matters to `vmferry daemon` and to the guests of libvirt.
pub fn look_for_libvirt(host: &HostFacts, findings: &mut Findings) {
    look_at_kvm(findings);
    journals::look(findings);
    look_at_memory(host, findings);
    if let Some(control) = &host.congestion_control {
        findings.ok("congestion-control", HERE, format!("new TCP connections use {control}"));
    }
}

fn look_at_kvm(findings: &mut Findings) {
    match vmferry_microvm::kvm::KvmBackend::available() {
        Ok(()) => findings.ok("kvm", "/dev/kvm", "is usable"),
        Err(error) => findings.bad(
            "kvm",
            Level::Warning,
            "/dev/kvm",
            chain(&error),
            "load kvm_intel or kvm_amd, and add this user to the group of /dev/kvm; guests of \
             other kinds don't need KVM",
        ),
    }
}

/// Tests the kernel's features by using them, because they can be disabled in any release.
fn look_at_kernel(host: &HostFacts, findings: &mut Findings) {
    let kernel = host.kernel.as_deref().unwrap_or("unknown");
    let layout = SlotLayout { slot: SlotId(0), gpa: 0, pages: 1 };
    let tried = GuestMemory::allocate(&[layout], MemoryKind::Memfd)
        .map_err(|error| chain(&error))
        .and_then(|memory| UffdLog::new(&memory).map_err(|error| chain(&error)).map(drop));
    match tried {
        Ok(()) => findings.ok(
            "userfaultfd",
            format!("Linux {kernel}"),
            "has asynchronous write protection and PAGEMAP_SCAN, and this user may use them",
        ),
        Err(why) => {
            let sysctl = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
            let sysctl = sysctl.map_or_else(|_| "?".into(), |value| value.trim().to_owned());
            findings.bad(
                "userfaultfd",
                Level::Warning,
                format!("Linux {kernel}"),
                format!("{why} (vm.unprivileged_userfaultfd is {sysctl})"),
                "attaching to a QEMU, and guests without KVM, need Linux 6.7, no seccomp filter \
                 that denies userfaultfd (as in containers), and root, the sysctl at 1, or access \
                 to /dev/userfaultfd; without it QEMU guests are carried",
            );
        }
    }
}

/// Whether a guest may be received here before it has all its pages: KVM's faults are the kernel's.
pub fn post_copy() -> Result<(), FaultError> {
    FaultDescriptor::open(PAGE_SIZE as u64).map(drop)
}

fn look_at_post_copy(host: &HostFacts, findings: &mut Findings) {
    let kernel = host.kernel.as_deref().unwrap_or("unknown");
    let object = format!("Linux {kernel}");
    match &host.no_post_copy {
        None => findings.ok(
            "post-copy",
            object,
            "has userfaultfd for the kernel's faults too, and this user may use it",
        ),
        Some(why) => findings.bad(
            "post-copy",
            Level::Note,
            object,
            why,
            "without it this host receives guests with pre-copy only",
        ),
    }
}

fn look_at_ptrace(findings: &mut Findings) {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let may = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_PTRACE));
    let object = "kernel.yama.ptrace_scope";
    match (scope.trim(), may) {
        ("3", _) => findings.bad(
            "ptrace",
            Level::Warning,
            object,
            "is 3: no process may trace another one, so no QEMU can be attached to",
            "let QEMU guests be carried, or boot with another value: 3 can't be changed until a \
             reboot",
        ),
        (_, true) => findings.ok("ptrace", HERE, "this process may trace QEMU (CAP_SYS_PTRACE)"),
        ("" | "0", false) => {
            findings.ok("ptrace", HERE, "QEMUs of this user may be traced");
        }
        (scope, false) => findings.bad(
            "ptrace",
            Level::Warning,
            object,
            format!("is {scope}: without CAP_SYS_PTRACE no QEMU can be attached to"),
            "run vmferry as root, or set it to 0; otherwise QEMU guests are carried",
        ),
    }
}

fn look_at_memory(host: &HostFacts, findings: &mut Findings) {
    let Some(available) = host.memory_available else { return };
    let pages = host.huge_pages.iter().filter(|pages| pages.total > 0);
    let huge: Vec<String> = pages
        .map(|it| format!("{} of {} huge pages of {}", it.free, it.total, ByteSize(it.bytes)))
        .collect();
    let huge = if huge.is_empty() { "no reserved huge pages".into() } else { huge.join(", ") };
    findings.ok("memory", HERE, format!("{} are available, {huge} are free", ByteSize(available)));
}

fn look_at_control_groups(findings: &mut Findings) {
    let root = Path::new("/sys/fs/cgroup");
    let controllers = std::fs::read_to_string(root.join("cgroup.controllers"));
    let has_cpu = match &controllers {
        Ok(controllers) => controllers.split_whitespace().any(|name| name == "cpu"),
        Err(_) => root.join("cpu").exists() || root.join("cpu,cpuacct").exists(),
    };
    let writable = rustix::fs::access(root, rustix::fs::Access::WRITE_OK).is_ok();
    match (has_cpu, writable) {
        (true, true) => {
            findings.ok("control-groups", root.display(), "vCPUs of a QEMU can be throttled")
        }
        (true, false) => findings.note(
            "control-groups",
            root.display(),
            "is not writable: --throttle for a QEMU needs root, or QEMU's group delegated \
             (Delegate=yes)",
        ),
        (false, _) => findings.note(
            "control-groups",
            root.display(),
            "has no cpu controller: --throttle does not work for a QEMU",
        ),
    }
}

/// Checks whether a policy is valid.
pub fn look_at_policy(path: &Path, findings: &mut Findings) {
    match Policy::load(path) {
        Ok(_) => findings.ok("policy", path.display(), "is valid"),
        Err(error) => findings.bad(
            "policy",
            Level::Error,
            path.display(),
            chain(&error),
            "correct the file: a receiver does not start with it",
        ),
    }
}
