//! The destination runs out of memory. Where that is known in advance it refuses the guest;
//! otherwise the kernel kills it. The guest stays at the source.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use vmferry_kit::HugePages;

use crate::support::leftovers::{Descriptors, Living, descriptors_at_rest, left};
use crate::support::outcomes::{Outcome, Owner};
use crate::support::trial::{SLOW, claim};
use crate::support::{Ended, Host, Running, World, run_ok};

/// Moves a guest to a destination that runs under a wrapper program and lacks memory.
struct Scene {
    world: World,
    a: Host,
    b: Host,
    guest: Running,
    /// The descriptors that the guest's VMM had open before the migration.
    before: Descriptors,
}

impl Scene {
    fn new(guest: &[&str]) -> Self {
        let world = World::without_certificates();
        let (a, b) = (world.host("a"), world.host("b"));
        let guest = a.guest("web", guest);
        let before = descriptors_at_rest(guest.child.id());
        Self { world, a, b, guest, before }
    }

    /// The ends of the source's command and of the destination.
    fn send(&self, prefix: &[String], flags: &[&str]) -> (Ended, Ended) {
        let mut arguments = vec!["receive", "--listen", "tcp:127.0.0.1:0", "--plain", "--once"];
        arguments.extend(flags);
        let mut destination = self.b.start_under(prefix, &arguments);
        let address = destination.event("listening")["address"].as_str().unwrap().to_owned();
        let mut arguments = vec!["send", "web", "--to", &address, "--plain"];
        arguments.extend(["--reconnect-timeout", "1s"]);
        arguments.extend(SLOW);
        let sent = self.a.run(&arguments);
        (sent, destination.finish())
    }

    fn stays(mut self, fault: &str, phase: &str, (sent, received): &(Ended, Ended)) {
        self.a.check_guest("web");
        let (here, there) = (claim(&self.a), claim(&self.b));
        assert!(here.runs && here.has && !there.runs && !there.has, "{here:?}, {there:?}");
        let end = |ended: &Ended| {
            ended.code.map_or_else(|| "killed by the kernel".into(), |code| format!("exit {code}"))
        };
        let (source, destination) = (end(sent), end(received));
        Outcome { guest: "microvm", fault, phase, source, destination, owner: Owner::Source }
            .note();
        let (host, pid, descriptors) = (&self.a, self.guest.child.id(), self.before.clone());
        let living = Living { host, pid, descriptors };
        let left = left(self.world.directory.path(), &[&self.a, &self.b], &[living], &[]);
        assert!(left.is_empty(), "{fault}: {left:#?}");
        assert_eq!(run_ok(&self.a, &["status"])["in_doubt"].as_array().map(Vec::len), Some(0));
        // The guest moves to a destination with enough memory.
        let (mut destination, address) =
            self.b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain", "--once"]);
        self.a.run(&["send", "web", "--to", &address, "--plain"]).exited(0);
        destination.event("serving");
        self.b.check_guest("web");
        self.guest.finish_by_ref().exited(0);
    }
}

#[test]
fn destination_refuses_a_guest_larger_than_its_address_space() {
    let scene = Scene::new(&["--memory", "4G", "--workload", "ticks"]);
    // There is room for the threads' stacks and none for the guest.
    let prefix = ["prlimit", "--as=2147483648"].map(String::from);
    let ended = scene.send(&prefix, &[]);
    let said = ended.0.last()["error"]["message"].as_str().unwrap();
    assert!(said.contains("memory"), "{said}");
    assert_ne!(ended.0.code, Some(0), "{ended:?}");
    assert_ne!(ended.1.code, Some(0), "{ended:?}");
    scene.stays("destination: no address space", "announced", &ended);
}

#[test]
fn destination_without_huge_pages_refuses_the_guest() {
    // More than are free, and than other tests add meanwhile.
    let memory = format!("{}M", 2 * HugePages::free() + (4 << 10));
    let scene = Scene::new(&["--memory", &memory, "--workload", "ticks"]);
    let ended = scene.send(&[], &["--memory-kind", "hugetlb"]);
    let said = ended.0.last()["error"]["message"].as_str().unwrap();
    assert!(said.contains("huge"), "{said}");
    assert_ne!(ended.1.code, Some(0), "{ended:?}");
    scene.stays("destination: no huge pages", "announced", &ended);
}

/// A memory control group of cgroup version 1 or 2, removed on drop.
struct Group(PathBuf);

impl Group {
    fn with_limit(bytes: u64) -> Option<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("vmferry-test-{}-{number}", std::process::id());
        let old = Path::new("/sys/fs/cgroup/memory");
        let (path, limits) = if old.is_dir() {
            (old.join(name), ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"])
        } else {
            (Path::new("/sys/fs/cgroup").join(name), ["memory.max", "memory.swap.max"])
        };
        std::fs::create_dir(&path).ok()?;
        let group = Self(path);
        std::fs::write(group.0.join(limits[0]), bytes.to_string()).ok()?;
        // A kernel without swap accounting has no such file.
        let swap = if limits[1] == "memory.swap.max" { 0 } else { bytes };
        let _ = std::fs::write(group.0.join(limits[1]), swap.to_string());
        Some(group)
    }

    /// A wrapper that enters the group and then executes the program.
    fn prefix(&self) -> Vec<String> {
        let join = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.0.display());
        ["sh", "-c", &join, "sh"].map(String::from).to_vec()
    }

    /// The number of processes of the group that the OOM killer has killed.
    fn killed(&self) -> u64 {
        let files = ["memory.oom_control", "memory.events"].map(|name| self.0.join(name));
        let text: String =
            files.iter().filter_map(|file| std::fs::read_to_string(file).ok()).collect();
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).unwrap_or_default()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn destination_refuses_a_guest_larger_than_its_control_group() {
    let group = Group::with_limit(48 << 20).expect("a memory control group can be made");
    let flags =
        ["--memory", "256M", "--workload", "fill=128,incompressible hot=1,sequential ticks"];
    let scene = Scene::new(&flags);
    let ended = scene.send(&group.prefix(), &["--memory-kind", "memfd"]);
    for ended in [&ended.0, &ended.1] {
        assert_eq!(ended.code, Some(6), "{ended:?}");
        let said = ended.last()["error"]["message"].as_str().unwrap();
        assert!(said.contains("control group") && said.contains("(limit 48.0 MiB)"), "{said}");
    }
    assert_eq!(group.killed(), 0, "nothing was sent that did not fit");
    scene.stays("destination: its control group is too small", "announced", &ended);
}

#[test]
fn destination_killed_for_memory_leaves_the_guest_at_the_source() {
    let group = Group::with_limit(48 << 20).expect("a memory control group can be made");
    let flags =
        ["--memory", "256M", "--workload", "fill=128,incompressible hot=1,sequential ticks"];
    let scene = Scene::new(&flags);
    let mut arguments = vec!["receive", "--listen", "tcp:127.0.0.1:0", "--plain", "--once"];
    // A source of that version does not send how much memory its guest uses, so the guest is not
    // refused.
    arguments.extend(["--memory-kind", "memfd", "--protocol", "1"]);
    let mut destination = scene.b.start_under(&group.prefix(), &arguments);
    let address = destination.event("listening")["address"].as_str().unwrap().to_owned();
    let sent = scene
        .a
        .run(&[
            "send",
            "web",
            "--to",
            &address,
            "--plain",
            "--reconnect-timeout",
            "1s",
            "--compress",
            "none",
        ])
        .exited(12);
    let received = destination.finish();
    assert_eq!(received.code, None, "{received:?}");
    assert!(group.killed() > 0, "the OOM killer has killed it");
    scene.stays("destination: killed for its memory", "first round", &(sent, received));
    let path = group.0.clone();
    drop(group);
    assert!(!path.exists(), "no process is left in the control group");
}
