//! `vmferry receive` gives up the rights it does not need and keeps all that it needs.

use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;

use vmferry_kit::need_kvm;

use crate::support::inject::{Argument, call, call_and_leave};
use crate::support::{Host, Running, World, run_ok, text};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
use serde_json::Value;

use Argument::{Bytes, Number, Strings};

/// Returned by the filter.
const ENOSYS: i64 = -libc::ENOSYS as i64;
/// Returned by Landlock.
pub const EACCES: i64 = -libc::EACCES as i64;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Fails if this kernel lacks a part of the sandbox.
pub fn need_whole_sandbox(event: &Value) {
    let missing = event["sandbox"]["missing"].as_array().unwrap();
    assert!(missing.is_empty(), "this test needs a kernel with {missing:?}");
}

/// A receiver on a Unix socket with `--sandbox`, and its event about the sandbox.
fn receiver(host: &Host, socket: &Path, how: &str) -> (Running, Value) {
    let listen = format!("unix:{}", text(socket));
    let mut running = host.start(&["receive", "--listen", &listen, "--sandbox", how]);
    let event = running.event("listening");
    (running, event)
}

/// A field of `/proc/PID/status`, for each thread.
pub fn of_each_thread(pid: u32, field: &str) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of = |task: std::io::Result<std::fs::DirEntry>| {
        // A thread may end meanwhile.
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        Some(line.unwrap().trim().to_owned())
    };
    let found: Vec<_> = tasks.filter_map(of).collect();
    assert!(!found.is_empty(), "{pid} has ended");
    found
}

/// Checks what the kernel reports about a sandboxed process.
pub fn is_restricted(pid: u32) {
    let all_are = |field: &str, wanted: &str| {
        let found = of_each_thread(pid, field);
        assert!(found.iter().all(|value| value == wanted), "{field}: {found:?}");
    };
    all_are("Seccomp", "2");
    all_are("NoNewPrivs", "1");
    let none = "0000000000000000";
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        all_are(set, none);
    }
    if is_root() {
        all_are("CapBnd", none);
    }
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let core: Vec<_> = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max core file size"))
        .unwrap()
        .split_whitespace()
        .collect();
    assert_eq!(core, ["1", "1", "bytes"]);
}

#[test]
fn receiver_is_sandboxed_before_it_listens_and_says_so() {
    let world = World::new();
    let (running, event) = receiver(&world.host("b"), &world.path("s"), "auto");
    let said = &event["sandbox"];
    for done in ["no_new_privileges", "no_capabilities", "seccomp", "no_core_dumps"] {
        assert_eq!(said[done], true, "{said}");
    }
    is_restricted(running.child.id());

    let (running, event) = receiver(&world.host("c"), &world.path("t"), "off");
    assert_eq!(event["sandbox"]["seccomp"], false);
    assert_eq!(of_each_thread(running.child.id(), "NoNewPrivs")[0], "0");
    assert_eq!(of_each_thread(running.child.id(), "Seccomp")[0], "0");
}

/// Calls that an attacker inside the process might try and that return, each with its result and
/// the expected result.
pub fn tries(pid: u32, world: &World) -> Vec<(&'static str, i64, i64)> {
    let at = |path: &str| format!("{path}\0").into_bytes();
    let secret = at(if is_root() { "/etc/shadow" } else { "/etc/passwd" });
    let outside = at(text(&world.path(&format!("outside-{pid}"))));
    let own = at(text(&world.path("good/ca.pem")));
    let (cwd, flags) = (Number(libc::AT_FDCWD as u64), libc::O_CREAT | libc::O_WRONLY);
    let socket = |family: i32, kind: i32| {
        call(pid, libc::SYS_socket, &[Number(family as u64), Number(kind as u64), Number(0)])
    };
    let packets = if is_root() { libc::AF_PACKET } else { libc::AF_NETLINK };
    let tcp = socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC);
    assert!(tcp >= 0, "a guest's process may connect, and the call fails otherwise: {tcp}");
    // 127.0.0.1 at any free port.
    let address = [2, 0, 0, 0, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    let unlimited = [0xff; 16];
    let executable = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    let anonymous = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let us = u64::from(std::process::id());
    let one = Number(1);
    vec![
        ("read a file", EACCES, call(pid, libc::SYS_openat, &[cwd, Bytes(&secret), Number(0)])),
        (
            "write outside",
            EACCES,
            call(
                pid,
                libc::SYS_openat,
                &[
                    Number(libc::AT_FDCWD as u64),
                    Bytes(&outside),
                    Number(flags as u64),
                    Number(0o600),
                ],
            ),
        ),
        (
            "listen at another port",
            EACCES,
            call(pid, libc::SYS_bind, &[Number(tcp as u64), Bytes(&address), Number(16)]),
        ),
        (
            "open a file to others",
            ENOSYS,
            call(
                pid,
                libc::SYS_fchmodat,
                &[Number(libc::AT_FDCWD as u64), Bytes(&own), Number(0o644)],
            ),
        ),
        ("packets", ENOSYS, socket(packets, libc::SOCK_RAW)),
        ("datagrams", ENOSYS, socket(libc::AF_INET, libc::SOCK_DGRAM)),
        ("signal others", ENOSYS, call(pid, libc::SYS_kill, &[Number(us), Number(0)])),
        (
            "new code",
            ENOSYS,
            call(
                pid,
                libc::SYS_mmap,
                &[Number(0), Number(4096), Number(executable), Number(anonymous), Number(u64::MAX)],
            ),
        ),
        (
            "change limits",
            ENOSYS,
            call(
                pid,
                libc::SYS_setrlimit,
                &[
                    Number(libc::RLIMIT_NOFILE.into()),
                    Bytes(&[0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]),
                ],
            ),
        ),
        (
            "become dumpable",
            ENOSYS,
            call(pid, libc::SYS_prctl, &[Number(libc::PR_SET_DUMPABLE as u64), one]),
        ),
        (
            "a message queue",
            ENOSYS,
            call(pid, libc::SYS_io_uring_setup, &[Number(1), Bytes(&[0; 120])]),
        ),
        (
            "core dumps",
            ENOSYS,
            call(
                pid,
                libc::SYS_prlimit64,
                &[Number(0), Number(libc::RLIMIT_CORE.into()), Bytes(&unlimited), Number(0)],
            ),
        ),
    ]
}

#[test]
fn sandbox_refuses_forbidden_calls() {
    let world = World::new();
    let (running, event) = receiver(&world.host("b"), &world.path("s"), "auto");
    need_whole_sandbox(&event);
    for (what, refusal, result) in tries(running.child.id(), &world) {
        assert_eq!(result, refusal, "{what}");
    }
    // The receiver continues to serve.
    let a = world.host("a");
    let _guest = a.guest("web", &["--memory", "64M", "--workload", "hot=8,random,rate=20000"]);
    let to = format!("unix:{}", world.path("s").display());
    a.run(&["send", "web", "--to", &to, "--verify"]).exited(0);

    let (running, _) = receiver(&world.host("c"), &world.path("t"), "off");
    for (what, _, result) in tries(running.child.id(), &world) {
        // Some calls need rights that the user may lack, or a kernel that supports them. In no case
        // does a filter refuse them.
        let other = ["core dumps", "a message queue"].contains(&what) && result != ENOSYS;
        assert!(result >= 0 || other, "{what} without the sandbox: {result}");
    }
}

#[test]
fn sandbox_kills_on_calls_that_only_an_attacker_makes() {
    let world = World::new();
    let program = b"/bin/sh\0";
    let words: [&[u8]; 3] = [b"sh\0", b"-c\0", b"exit 42\0"];
    let execve = [Bytes(program), Strings(&words), Number(0)];
    let fatal: [(&str, i64, &[Argument<'_>]); 4] = [
        ("execve", libc::SYS_execve, &execve),
        ("ptrace", libc::SYS_ptrace, &[Number(libc::PTRACE_TRACEME.into())]),
        ("unshare", libc::SYS_unshare, &[Number(libc::CLONE_FS as u64)]),
        ("process_vm_readv", libc::SYS_process_vm_readv, &[Number(1)]),
    ];
    for (what, number, arguments) in &fatal {
        let (mut running, _) = receiver(&world.host("b"), &world.path("s"), "auto");
        call_and_leave(running.child.id(), *number, arguments);
        let status = running.child.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{what}: {status}");
        std::fs::remove_file(world.path("s")).unwrap();
    }
    // Without the sandbox a program is started, and the other calls do no harm.
    let (mut running, _) = receiver(&world.host("b"), &world.path("s"), "off");
    let pid = running.child.id();
    assert_eq!(call(pid, libc::SYS_unshare, &[Number(libc::CLONE_FS as u64)]), 0);
    assert_eq!(call(pid, libc::SYS_process_vm_readv, &[Number(pid.into())]), 0);
    call_and_leave(pid, libc::SYS_execve, &execve);
    assert_eq!(running.child.wait().unwrap().code(), Some(42));
}

/// Moves there, and back from the very process that received the guest, to a host name and with
/// certificates that the receiver was not started with.
fn there_and_back(kind: &str, log: &str) {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let (tls, other) = (world.tls(), world.certificate("ca", "other"));
    let flags =
        ["--guest", kind, "--memory", "64M", "--workload", "fill=8,text hot=8,random,rate=20000"];
    let first = a.guest("web", &flags);
    let receive = ["--listen", "127.0.0.1:0", "--tls", &tls, "--once", "--dirty-log", log];
    let receive = [&receive[..], &["--sandbox", "auto"]].concat();
    let send = |host: &Host, to: &str, tls: &str| {
        let sent = host.run(&[
            "send",
            "web",
            "--to",
            to,
            "--tls",
            tls,
            "--server-name",
            "127.0.0.1",
            "--verify",
            "--when-stuck",
            "switch-over",
            "--max-rounds",
            "4",
        ]);
        assert_eq!(sent.code, Some(0), "{kind} {log}: {sent:?}");
        assert_eq!(sent.last()["verify_match"], true);
    };
    let (mut there, address) = b.receive(&receive);
    send(&a, &address, &tls);
    first.finish().exited(0);
    there.event("serving");
    // All its threads are sandboxed, including vCPU threads.
    is_restricted(there.child.id());
    assert_eq!(b.status("web")["guest"], kind);
    for order in ["pause", "resume"] {
        run_ok(&b, &[order, "web"]);
    }
    b.check_guest("web");
    let (mut back, address) = a.receive(&receive);
    let port = address.rsplit_once(':').unwrap().1;
    send(&b, &format!("localhost:{port}"), text(&other));
    assert_eq!(there.finish().code, Some(0), "the sandboxed VMM exits regularly");
    back.event("serving");
    a.check_guest("web");
    run_ok(&a, &["quit", "web"]);
    back.finish().exited(0);
}

#[test]
fn sandboxed_receiver_takes_and_sends_a_kvm_guest() {
    need_kvm();
    for log in ["bitmap", "clear", "ring", "uffd"] {
        there_and_back("kvm", log);
    }
}

#[test]
fn sandboxed_receiver_takes_and_sends_a_process_guest() {
    there_and_back("process", "uffd");
}

#[test]
fn missing_sandbox_is_an_error_if_required() {
    let world = World::new();
    let (running, event) = receiver(&world.host("b"), &world.path("s"), "auto");
    drop(running);
    let listen = format!("unix:{}", world.path("t").display());
    let mut running =
        world.host("c").start(&["receive", "--listen", &listen, "--sandbox", "require"]);
    if event["sandbox"]["missing"].as_array().unwrap().is_empty() {
        let said = running.event("listening")["sandbox"].clone();
        assert!(said["landlock_abi"].as_u64() >= Some(6), "{said}");
        is_restricted(running.child.id());
    } else {
        running.finish().failed(16, "this kernel has no Landlock");
    }
}

/// Starts a receiver under a hard limit of 0 for core dumps, which the receiver may not raise.
fn without_dumps(host: &Host, listen: &str, how: &str) -> Running {
    let mut command = host.command(&["receive", "--listen", listen, "--sandbox", how]);
    let limit = || {
        match remove_capability_from_bounding_set(CapabilitySet::SYS_RESOURCE) {
            // A receiver that can't write dumps has none to lose.
            Ok(()) | Err(Errno::PERM) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?)
    };
    // SAFETY: the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(limit) };
    Host::spawn(command)
}

#[test]
fn hard_core_dump_limit_of_0_is_reported_as_limited_to_files() {
    let world = World::new();
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    let enough = !pattern.starts_with(['|', '@']);
    let listen = |name: &str| format!("unix:{}", text(&world.path(name)));
    let mut running = without_dumps(&world.host("b"), &listen("s"), "auto");
    let said = running.event("listening")["sandbox"].clone();
    assert_eq!(said["no_core_dumps"], enough, "{said}");
    let missing = said["missing"].as_array().unwrap();
    let limit = missing.iter().any(|what| what.as_str().unwrap().contains("limit for core dumps"));
    assert_eq!(limit, !enough, "{said}");

    let mut required = without_dumps(&world.host("c"), &listen("t"), "require");
    if missing.is_empty() {
        assert_eq!(required.event("listening")["sandbox"]["no_core_dumps"], true);
    } else if missing.len() == 1 && limit {
        required.finish().failed(16, "ulimit -Hc");
    } else {
        required.finish().failed(16, "this kernel has no Landlock");
    }
}

/// Journals must outlive a host's reboot; sockets need not.
#[test]
fn sandbox_allows_journals_on_another_disk() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let disk = world.path("disk");
    for directory in [&disk, &b.runtime] {
        std::fs::DirBuilder::new().mode(0o700).create(directory).unwrap();
    }
    std::os::unix::fs::symlink(&disk, b.runtime.join("journal")).unwrap();
    let (_running, _) = receiver(&b, &world.path("s"), "auto");
    let _guest = a.guest("web", &["--memory", "64M", "--workload", "hot=8,random,rate=20000"]);
    let to = format!("unix:{}", text(&world.path("s")));
    a.run(&["send", "web", "--to", &to, "--verify"]).exited(0);
    assert!(std::fs::read_dir(&disk).unwrap().next().is_some(), "the journal is there");
    b.check_guest("web");
}
