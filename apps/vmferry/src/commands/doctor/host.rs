//! This host: KVM, userfaultfd, ptrace, journals, memory, control groups, the policy.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use vmferry::chain;
use vmferry::config::policy::Policy;
use vmferry::probe::HostFacts;
use vmferry_control::Directories;
use vmferry_dirty::UffdLog;
use vmferry_handover::journal::{self, Verdict};
use vmferry_memory::{GuestMemory, MemoryKind, SlotId, SlotLayout};

use super::{Findings, Level};

const HERE: &str = "this host";

/// File systems that a reboot empties.
const TMPFS: i64 = 0x0102_1994;
const RAMFS: i64 = 0x8584_58f6;

/// Less than so much is little for journals, of which each has a few hundred bytes.
const LITTLE_DISK: u64 = 16 << 20;

/// A promise is synced twice in a switchover: from here on its downtime shows it.
const SLOW_SYNC: Duration = Duration::from_millis(50);

/// Capability 19 (`CAP_SYS_PTRACE`), by `capabilities(7)`.
const SYS_PTRACE: u64 = 1 << 19;

/// Looks at what every migration needs.
pub fn look(host: &HostFacts, findings: &mut Findings) {
    look_at_kvm(findings);
    look_at_kernel(host, findings);
    look_at_ptrace(findings);
    look_at_journals(findings);
    look_at_memory(host, findings);
    look_at_control_groups(findings);
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
            "load kvm_intel or kvm_amd, and be in the group of /dev/kvm; guests of other kinds \
             need none",
        ),
    }
}

/// The kernel's features by trying them: what a release number promises may be configured away.
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
                 against userfaultfd (as containers have), and root, the sysctl at 1, or access \
                 to /dev/userfaultfd; QEMU guests are carried without it",
            );
        }
    }
}

fn look_at_ptrace(findings: &mut Findings) {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let scope = read("/proc/sys/kernel/yama/ptrace_scope").trim().to_owned();
    let may = capabilities(&read("/proc/self/status")) & SYS_PTRACE != 0;
    let object = "kernel.yama.ptrace_scope";
    match (scope.as_str(), may) {
        ("3", _) => findings.bad(
            "ptrace",
            Level::Warning,
            object,
            "is 3: no process may trace another one, so no QEMU can be attached to",
            "carry QEMU guests, or boot with another value: 3 can't be taken back",
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
            "run vmferry as root, or set it to 0; QEMU guests are carried without it",
        ),
    }
}

/// The effective capabilities in a `/proc/PID/status`.
fn capabilities(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|value| u64::from_str_radix(value.trim(), 16).ok()).unwrap_or(0)
}

/// Whether journals outlive a reboot; none if there is no place for them.
pub fn journals_on_disk() -> Option<bool> {
    let directories = Directories::of_this_user().ok()?;
    is_on_disk(&existing(&directories.journals()))
}

fn is_on_disk(path: &Path) -> Option<bool> {
    let found = rustix::fs::statfs(path).ok()?;
    Some(![TMPFS, RAMFS].contains(&found.f_type))
}

/// The directory itself, or the nearest one above that is there.
fn existing(path: &Path) -> std::path::PathBuf {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/")).to_owned()
}

fn look_at_journals(findings: &mut Findings) {
    let directories = match Directories::of_this_user() {
        Ok(directories) => directories,
        Err(error) => {
            findings.bad(
                "journals",
                Level::Error,
                "the directories of this user",
                chain(&error),
                "mend it, or name others by VMFERRY_STATE_DIR and VMFERRY_RUNTIME_DIR",
            );
            return;
        }
    };
    let journals = directories.journals();
    let (object, there) = (journals.display(), existing(&journals));
    if is_on_disk(&there) == Some(false) {
        findings.bad(
            "journals",
            Level::Warning,
            object,
            "is in memory (tmpfs): a reboot forgets what this host has promised, and a guest stays \
             in doubt",
            "set VMFERRY_STATE_DIR to a directory on a disk, or leave it and VMFERRY_RUNTIME_DIR \
             unset",
        );
    } else if there == journals {
        findings.ok("journals", object, "is this user's alone, and on a disk");
    } else {
        findings.ok("journals", object, "is made, on a disk, when it is needed");
    }
    if let Ok(found) = rustix::fs::statfs(&there) {
        let free = found.f_bavail.saturating_mul(u64::try_from(found.f_bsize).unwrap_or(0));
        if free < LITTLE_DISK {
            findings.bad(
                "journal-space",
                Level::Error,
                there.display(),
                format!(
                    "has {} left: without room for a journal no guest is sent or taken",
                    ByteSize(free)
                ),
                "make room there, or name another place by VMFERRY_STATE_DIR",
            );
        }
    }
    if there == journals {
        look_at_sync(&journals, findings);
        look_at_sessions(&directories, findings);
    }
}

/// How long a record takes to be on disk.
fn look_at_sync(journals: &Path, findings: &mut Findings) {
    let sync = || -> std::io::Result<Duration> {
        let mut file = tempfile::tempfile_in(journals)?;
        let mut slowest = Duration::ZERO;
        for _ in 0..3 {
            let begun = Instant::now();
            file.write_all(&[b'x'; 200])?;
            file.sync_data()?;
            slowest = slowest.max(begun.elapsed());
        }
        Ok(slowest)
    };
    let object = journals.display();
    match sync() {
        Ok(took) if took < SLOW_SYNC => {
            let ms = took.as_secs_f64() * 1e3;
            findings.ok("journal-sync", object, format!("a record is on disk after {ms:.1} ms"));
        }
        Ok(took) => findings.bad(
            "journal-sync",
            Level::Warning,
            object,
            format!(
                "a record takes {} ms to be on disk, twice in each switchover",
                took.as_millis()
            ),
            "put journals on a faster disk: a link called `journal`, or VMFERRY_STATE_DIR",
        ),
        Err(error) => findings.bad(
            "journal-sync",
            Level::Error,
            object,
            format!("no journal can be written there: {error}"),
            "is its disk mounted read-only, full, or failing?",
        ),
    }
}

fn look_at_sessions(directories: &Directories, findings: &mut Findings) {
    let journals = directories.journals();
    match journal::sessions(&journals) {
        Ok(sessions) => {
            for one in sessions.iter().filter(|one| one.verdict == Verdict::InDoubt) {
                findings.bad(
                    "session",
                    Level::Warning,
                    one.session,
                    "is in doubt: its guest is paused, or is lost with its VMM",
                    "look at the other host with `vmferry status --sessions`, then `vmferry \
                     resolve`",
                );
            }
        }
        Err(error) => findings.bad(
            "session",
            Level::Error,
            journals.display(),
            chain(&error),
            "no word is given on what can't be read: see the operations guide",
        ),
    }
    for older in directories.older() {
        findings.bad(
            "older-journals",
            Level::Warning,
            older.display(),
            "has journals that an earlier release has left there, which are read no more",
            format!("see `VMFERRY_STATE_DIR={} vmferry status --sessions`", older.display()),
        );
    }
}

fn look_at_memory(host: &HostFacts, findings: &mut Findings) {
    let Some(available) = host.memory_available else { return };
    let pages = host.huge_pages.iter().filter(|pages| pages.total > 0);
    let huge: Vec<String> = pages
        .map(|it| format!("{} of {} huge pages of {}", it.free, it.total, ByteSize(it.bytes)))
        .collect();
    let huge = if huge.is_empty() { "no reserved huge pages".into() } else { huge.join(", ") };
    findings.ok("memory", HERE, format!("{} can be used, {huge} are free", ByteSize(available)));
}

/// Whether a guest with so much memory finds room on a host.
pub fn look_for_room(
    host: &HostFacts,
    place: &str,
    bytes: u64,
    kind: MemoryKind,
    findings: &mut Findings,
) {
    const HUGE: u64 = 2 << 20;
    let needed = ByteSize(bytes);
    if kind == MemoryKind::Hugetlb {
        let pages = host.huge_pages.iter().find(|pages| pages.bytes == HUGE);
        let free = pages.map_or(0, |pages| pages.free);
        let wanted = bytes.div_ceil(HUGE);
        if free < wanted {
            findings.bad(
                "huge-pages",
                Level::Error,
                place,
                format!(
                    "{wanted} huge pages of 2 MiB are needed for {needed}, and {free} are free"
                ),
                format!(
                    "there: `sysctl vm.nr_hugepages=N`, for {} more, early after its boot",
                    wanted - free
                ),
            );
        } else {
            findings.ok("huge-pages", place, format!("{free} are free, and {wanted} are needed"));
        }
        return;
    }
    match host.memory_available {
        Some(available) if available < bytes => findings.bad(
            "room",
            Level::Error,
            place,
            format!("the guest has {needed}, and {} can be used there", ByteSize(available)),
            "end or move guests there, or choose another host",
        ),
        Some(available) => findings.ok(
            "room",
            place,
            format!("{} can be used there, and the guest has {needed}", ByteSize(available)),
        ),
        None => {}
    }
}

/// The same where it is not known whether the guest will have huge pages: its QEMU there says. What
/// is reserved for these is no room for others.
pub fn look_for_any_room(host: &HostFacts, place: &str, bytes: u64, findings: &mut Findings) {
    let huge = host.huge_pages.iter().map(|pages| pages.bytes.saturating_mul(pages.free));
    let huge = huge.max().unwrap_or(0);
    match host.memory_available {
        Some(available) if available < bytes && huge >= bytes => findings.bad(
            "room",
            Level::Warning,
            place,
            format!(
                "the guest has {}, and {} can be used there beside {} of free huge pages, which \
                 are enough",
                ByteSize(bytes),
                ByteSize(available),
                ByteSize(huge)
            ),
            "give its QEMU there memory on huge pages (`hugetlb=on`, or a `mem-path` on a \
             hugetlbfs), or choose another host",
        ),
        _ => look_for_room(host, place, bytes, MemoryKind::Private, findings),
    }
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
            "is not this user's: --throttle for a QEMU needs its group delegated (Delegate=yes) or \
             root",
        ),
        (false, _) => findings.note(
            "control-groups",
            root.display(),
            "has no cpu controller: --throttle does not work for a QEMU",
        ),
    }
}

/// Whether a policy can be used.
pub fn look_at_policy(path: &Path, findings: &mut Findings) {
    match Policy::load(path) {
        Ok(_) => findings.ok("policy", path.display(), "can be read, and every line is a rule"),
        Err(error) => findings.bad(
            "policy",
            Level::Error,
            path.display(),
            chain(&error),
            "mend the file: a receiver does not start with it",
        ),
    }
}

#[cfg(test)]
mod tests {
    use vmferry::probe::HugePages;

    use super::*;

    #[test]
    fn capabilities_are_the_effective_ones() {
        let status = "Name:\tx\nCapPrm:\t0\nCapEff:\t00000000000c0000\n";
        assert_eq!(capabilities(status) & SYS_PTRACE, SYS_PTRACE);
        assert_eq!(capabilities("CapEff:\t0\n"), 0);
        assert_eq!(capabilities(""), 0);
    }

    #[test]
    fn room_is_of_the_kind_that_the_guest_needs() {
        let huge_pages = vec![HugePages { bytes: 2 << 20, total: 9, free: 4 }];
        let host =
            HostFacts { memory_available: Some(1 << 30), huge_pages, ..HostFacts::default() };
        let level = |bytes, kind| {
            let mut findings = Findings::default();
            look_for_room(&host, "b", bytes, kind, &mut findings);
            findings.worst()
        };
        assert_eq!(level(1 << 30, MemoryKind::Private), Level::Ok);
        assert_eq!(level((1 << 30) + 1, MemoryKind::Private), Level::Error);
        assert_eq!(level(8 << 20, MemoryKind::Hugetlb), Level::Ok);
        assert_eq!(level((8 << 20) + 1, MemoryKind::Hugetlb), Level::Error);
    }

    #[test]
    fn room_of_a_qemu_may_be_in_huge_pages() {
        let huge_pages = vec![HugePages { bytes: 2 << 20, total: 900, free: 800 }];
        let host =
            HostFacts { memory_available: Some(1 << 30), huge_pages, ..HostFacts::default() };
        let level = |bytes| {
            let mut findings = Findings::default();
            look_for_any_room(&host, "b", bytes, &mut findings);
            findings.worst()
        };
        assert_eq!(level(1 << 30), Level::Ok);
        assert_eq!(level(1600 << 20), Level::Warning);
        assert_eq!(level((1600 << 20) + 1), Level::Error);
    }
}
