//! `send --qemu`, `receive --qemu` and `receive --exec` with real QEMUs, and what happens when somebody
//! dies, phase after phase.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use support::proxy::Proxy;
use support::{BEFORE_COMMIT, Host, Running, World, all, run_ok, text};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Machine, Qemu, Version, World as Lab};

/// Two hosts, and a QEMU guest on the first.
struct Scene {
    world: World,
    lab: Lab,
    a: Host,
    b: Host,
    machine: Machine,
    here: Qemu,
    destinations: u32,
}

impl Scene {
    fn new(version: Version) -> Self {
        let (world, lab) = (World::new(), Lab::new());
        let (a, b) = (world.host("a"), world.host("b"));
        let machine = Machine { mib: 128, ..Machine::new(version, "dirty=8") };
        let mut here = machine.start(&lab, "here");
        here.check_guest();
        Self { world, lab, a, b, machine, here, destinations: 0 }
    }

    /// A QEMU that waits for the guest, and the vmferry beside it.
    fn receive(&mut self, link: &[&str]) -> (Qemu, Running, String) {
        self.destinations += 1;
        let qemu = self.machine.incoming(&self.lab, &format!("there-{}", self.destinations));
        let mut arguments = vec!["--qemu", text(&qemu.qmp), "--once"];
        arguments.extend(link);
        let (running, address) = self.b.receive(&arguments);
        (qemu, running, address)
    }

    fn receive_tls(&mut self) -> (Qemu, Running, String) {
        let tls = self.world.tls();
        self.receive(&["--listen", "127.0.0.1:0", "--tls", &tls])
    }

    fn receive_plain(&mut self) -> (Qemu, Running, String) {
        self.receive(&["--listen", "tcp:127.0.0.1:0", "--plain"])
    }

    /// A migration with few, slow rounds.
    fn send(&self, address: &str, link: &[&str]) -> Running {
        self.send_capped(address, link, "30M")
    }

    fn send_capped(&self, address: &str, link: &[&str], cap: &str) -> Running {
        let mut arguments = vec!["send", "--qemu", text(&self.here.qmp), "--to", address];
        arguments.extend(link);
        arguments.extend(["--max-bandwidth", cap, "--max-rounds", "2", "--compress", "none"]);
        arguments.extend(["--when-stuck", "switch-over", "--downtime-limit", "50ms", "--verify"]);
        self.a.start(&arguments)
    }

    fn send_tls(&self, address: &str) -> Running {
        let tls = self.world.tls();
        self.send(address, &["--tls", &tls])
    }

    /// The guest runs on here, unharmed, and nothing of vmferry is left in its QEMU.
    fn runs_on_here(&mut self) {
        self.here.check_guest();
        self.is_clean();
    }

    /// Waits until whoever tidies up is done: it lets go of QMP last.
    fn is_clean(&self) {
        let mut qmp = Qmp::connect(&self.here.qmp).unwrap();
        assert_eq!(qmp.execute("query-status", json!({})).unwrap()["running"], true);
        let capabilities = qmp.execute("query-migrate-capabilities", json!({})).unwrap();
        for name in ["x-ignore-shared", "pause-before-switchover"] {
            let found = capabilities.as_array().unwrap().iter();
            let found = found.clone().find(|one| one["capability"] == name).unwrap();
            assert_eq!(found["state"], false, "{name} is as it was");
        }
        let pid = self.here.child.id();
        let left =
            std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten().filter(|entry| {
                std::fs::read_link(entry.path())
                    .is_ok_and(|to| to.to_string_lossy().contains("userfaultfd"))
            });
        assert_eq!(left.count(), 0, "a userfaultfd is left in QEMU");
    }

    /// After everything that went wrong, a migration still works.
    fn arrives(mut self) {
        let (mut there, mut receiving, address) = self.receive_tls();
        let sent = self.send_tls(&address).finish();
        assert_eq!(sent.code, Some(0), "{sent:?}");
        receiving.event("received");
        assert!(self.here.child.wait().unwrap().success(), "the source's QEMU has ended in order");
        there.check_guest();
    }
}

/// The versions of the long matrix, or one of them.
fn versions() -> &'static [Version] {
    if all() { &Version::ALL } else { &Version::ALL[1..] }
}

#[test]
fn there_and_back_and_into_a_qemu_that_vmferry_starts() {
    for version in versions() {
        let mut scene = Scene::new(*version);
        let (there, mut receiving, address) = scene.receive_tls();
        let tls = scene.world.tls();
        let send = |host: &Host, qmp: &str, address: &str| {
            let sent =
                host.run(&["send", "--qemu", qmp, "--to", address, "--tls", &tls, "--verify"]);
            assert_eq!(sent.code, Some(0), "{sent:?}");
            sent.last().clone()
        };
        let stats = send(&scene.a, text(&scene.here.qmp), &address);
        assert_eq!(stats["verify_match"], true, "{stats}");
        assert!(stats["state_bytes"].as_u64().unwrap() > 10_000, "{stats}");
        assert_eq!(stats["dirty_log"], "userfaultfd", "{stats}");
        receiving.event("received");
        assert!(scene.here.child.wait().unwrap().success());
        scene.here = there;
        scene.here.check_guest();

        // Into a QEMU that vmferry starts, from the same command line, over gRPC.
        let line = scene.machine.command_line(&scene.lab, "started");
        let mut command = String::from("env LD_LIBRARY_PATH='");
        command += &scene.machine.libraries().unwrap().display().to_string();
        command += "'";
        for word in line {
            command += &format!(" '{}'", word.display());
        }
        let (mut started, address) =
            scene.a.receive(&["--listen", "grpc:127.0.0.1:0", "--tls", &tls, "--exec", &command]);
        send(&scene.b, text(&scene.here.qmp), &address);
        let received = started.event("received");
        let qmp = PathBuf::from(received["qmp"].as_str().unwrap());
        // The vmferry that gave its word ends with its QEMU.
        assert_eq!(receiving.finish().code, Some(0));
        let mut monitor = Qmp::connect(&qmp).unwrap();
        assert_eq!(monitor.execute("query-status", json!({})).unwrap()["status"], "running");
        monitor.execute("quit", json!({})).unwrap();
        assert_eq!(started.finish().code, Some(0));
    }
}

#[test]
fn the_sender_is_killed_in_each_phase_and_the_guest_runs_on() {
    for version in versions() {
        let mut scene = Scene::new(*version);
        for (name, moment) in BEFORE_COMMIT {
            println!("{version:?}: {name}");
            let (_there, receiving, address) = scene.receive_tls();
            let mut send = scene.send_tls(&address);
            send.event_where(moment);
            send.kill();
            let received = receiving.finish();
            assert_eq!(received.code, Some(12), "{name}: {received:?}");
            scene.runs_on_here();
        }
        scene.arrives();
    }
}

/// The attach stops a thread of QEMU for microseconds and lets it make a system call. Whatever moment the
/// sender is killed at, QEMU and its guest go on, and the next attach works.
#[test]
fn killed_at_any_moment_of_the_attach_it_harms_nothing() {
    let mut scene = Scene::new(Version::V10_0);
    let tls = scene.world.tls();
    for attempt in 0..if all() { 300 } else { 60 } {
        let arguments =
            ["send", "--qemu", text(&scene.here.qmp), "--to", "127.0.0.1:1", "--tls", &tls];
        let mut send = scene.a.start(&arguments);
        // From before its QMP connection until after its end.
        std::thread::sleep(Duration::from_micros(attempt * 211 % 12_000));
        send.kill();
    }
    scene.here.check_guest();
    scene.arrives();
}

#[test]
fn sender_and_guardian_are_killed_and_the_next_sender_tidies_up() {
    let mut scene = Scene::new(Version::V10_0);
    let (_there, receiving, address) = scene.receive_tls();
    let tls = scene.world.tls();
    let mut send = scene.send_capped(&address, &["--tls", &tls], "10M");
    send.event_where(BEFORE_COMMIT[3].1);
    // Five times a second: by the second one the state is saved. Before that QEMU itself would continue a
    // guest whose migration breaks, and the pages take longer.
    send.event("progress");
    send.event("progress");
    let sender = send.child.id();
    let children = std::fs::read_to_string(format!("/proc/{sender}/task/{sender}/children"));
    let guardian: i32 = children.unwrap().trim().parse().unwrap();
    let guardian = rustix::process::Pid::from_raw(guardian).unwrap();
    rustix::process::kill_process(guardian, rustix::process::Signal::KILL).unwrap();
    send.kill();
    receiving.finish();
    // Nobody is left to resume it.
    let status = |scene: &Scene| {
        Qmp::connect(&scene.here.qmp).unwrap().execute("query-status", json!({})).unwrap()
    };
    assert_eq!(status(&scene)["running"], false);
    let (mut there, mut receiving, address) = scene.receive_tls();
    let sent = scene.send_tls(&address).finish();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    receiving.event("received");
    scene.here.child.wait().unwrap();
    there.check_guest();
}

#[test]
fn the_receiver_or_its_qemu_is_killed_in_each_phase() {
    for version in versions() {
        let mut scene = Scene::new(*version);
        for (name, moment) in BEFORE_COMMIT {
            println!("{version:?}: the receiver at {name}");
            let (_there, mut receiving, address) = scene.receive_tls();
            let mut send = scene.send_tls(&address);
            send.event_where(moment);
            receiving.kill();
            let sent = send.finish();
            assert_eq!(sent.code, Some(12), "{name}: {sent:?}");
            scene.runs_on_here();

            println!("{version:?}: its QEMU at {name}");
            let (mut there, receiving, address) = scene.receive_tls();
            let mut send = scene.send_tls(&address);
            send.event_where(moment);
            there.child.kill().unwrap();
            let sent = send.finish();
            assert_ne!(sent.code, Some(0), "{name}: {sent:?}");
            assert_ne!(receiving.finish().code, Some(0), "{name}");
            scene.runs_on_here();
        }
        scene.arrives();
    }
}

#[test]
fn the_source_s_qemu_is_killed_in_each_phase_and_never_half_a_guest_runs() {
    for (name, moment) in BEFORE_COMMIT {
        println!("{name}");
        let mut scene = Scene::new(Version::V10_0);
        let (mut there, mut receiving, address) = scene.receive_tls();
        let mut send = scene.send_tls(&address);
        send.event_where(moment);
        scene.here.child.kill().unwrap();
        let sent = send.finish();
        // Killed when its state was out already, it was not needed any more.
        if sent.lines.iter().any(|event| event["event"] == "committed") {
            receiving.event("received");
            there.check_guest();
        } else {
            assert_ne!(sent.code, Some(0), "{name}: {sent:?}");
            let received = receiving.finish();
            assert_ne!(received.code, Some(0), "{name}: {received:?}");
        }
    }
}

#[test]
fn the_link_is_cut_in_each_phase() {
    let mut scene = Scene::new(Version::V10_0);
    for (name, moment) in BEFORE_COMMIT {
        let (_there, receiving, address) = scene.receive_plain();
        let proxy = Proxy::before(&address);
        let mut send = scene.send(&proxy.address, &["--plain", "--reconnect-timeout", "1s"]);
        send.event_where(moment);
        proxy.cut();
        let sent = send.finish();
        assert_eq!(sent.code, Some(12), "{name}: {sent:?}");
        assert_eq!(receiving.finish().code, Some(12), "{name}");
        scene.runs_on_here();
    }
    scene.arrives();
}

#[test]
fn the_link_breaks_and_comes_back() {
    let mut scene = Scene::new(Version::V10_0);
    let (mut there, mut receiving, address) = scene.receive_plain();
    let proxy = Proxy::before(&address);
    let mut send = scene.send(&proxy.address, &["--plain"]);
    send.event_where(|event| event["event"] == "round-started");
    proxy.cut();
    send.event("link-lost");
    proxy.heal();
    send.event("link-restored");
    // While it is paused: QEMU runs on and is paused once more, or the hand-over asks again.
    send.event_where(|event| event["event"] == "round-started" && event["paused"] == true);
    proxy.cut();
    let sent = send.finish();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    let stats = sent.last();
    assert_eq!((&stats["digest_match"], &stats["verify_match"]), (&true.into(), &true.into()));
    assert!(stats["reconnections"].as_u64() >= Some(3), "{stats}");
    receiving.event("link-restored");
    receiving.event("received");
    assert!(scene.here.child.wait().unwrap().success(), "the source's QEMU has ended in order");
    there.check_guest();
}

#[test]
fn cancelled_by_the_operator_it_runs_on() {
    let mut scene = Scene::new(Version::V10_0);
    for (name, moment) in BEFORE_COMMIT {
        let (_there, receiving, address) = scene.receive_tls();
        let mut send = scene.send_tls(&address);
        send.event_where(moment);
        let status = scene.a.status("tested");
        assert_eq!(status["guest"], "qemu", "{status}");
        run_ok(&scene.a, &["cancel", "tested"]);
        let sent = send.finish();
        assert_eq!(sent.code, Some(11), "{name}: {sent:?}");
        assert_eq!(receiving.finish().code, Some(11), "{name}");
        scene.runs_on_here();
    }
    scene.arrives();
}

/// A migration whose COMMIT does not arrive.
fn in_doubt(scene: &mut Scene) -> (Qemu, Running, Running, Proxy) {
    let (there, receiving, address) = scene.receive_plain();
    let proxy = Proxy::before(&address);
    let mut send = scene.send(&proxy.address, &["--plain"]);
    send.event("in-doubt");
    (there, receiving, send, proxy)
}

#[test]
fn commit_is_lost_and_the_link_heals() {
    let mut scene = Scene::new(Version::V10_0);
    let (mut there, mut receiving, send, proxy) = in_doubt(&mut scene);
    proxy.heal();
    receiving.event("received");
    let sent = send.finish();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    assert!(scene.here.child.wait().unwrap().success());
    there.check_guest();
}

/// Waits until the guardian has taken over, and answers for the guest.
fn guardian_is_in_doubt(host: &Host) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let asked = host.run(&["status", "tested"]);
        if asked.code == Some(0) && asked.last()["migration"]["in_doubt"] == true {
            assert_eq!(asked.last()["guest"], "qemu", "{asked:?}");
            return;
        }
        assert!(Instant::now() < deadline, "no guardian: {asked:?}");
        // A socket that appears wakes nobody.
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A guardian never sends COMMIT: the destination, which has not run the guest, gives it back.
#[test]
fn commit_is_lost_and_the_sender_killed_and_the_guardian_asks() {
    let mut scene = Scene::new(Version::V10_0);
    let (_there, receiving, mut send, proxy) = in_doubt(&mut scene);
    send.kill();
    // Doubt is no reason to resume.
    guardian_is_in_doubt(&scene.a);
    proxy.heal();
    let received = receiving.finish();
    assert_ne!(received.code, Some(0), "{received:?}");
    scene.runs_on_here();
    scene.arrives();
}

#[test]
fn commit_is_lost_and_the_operator_decides() {
    let mut scene = Scene::new(Version::V10_0);
    let (mut there, mut receiving, mut send, _proxy) = in_doubt(&mut scene);
    send.kill();
    receiving.kill();
    there.child.kill().unwrap();
    guardian_is_in_doubt(&scene.a);
    run_ok(&scene.a, &["resolve", "tested", "--source-resumes"]);
    scene.runs_on_here();
    scene.arrives();
}

/// The user that has nothing, on every Linux.
const NOBODY: u32 = 65534;

#[test]
fn an_ordinary_user_moves_a_guest_of_their_own() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: all other tests are those of an ordinary user already");
        return;
    }
    let binary = std::process::Command::new(env!("CARGO_BIN_EXE_vmferry"))
        .arg("--version")
        .uid(NOBODY)
        .output();
    if !binary.is_ok_and(|output| output.status.success()) {
        println!("SKIPPED: this directory is closed to other users");
        return;
    }
    let (world, lab) = (World::new(), Lab::new());
    lab.give_to(NOBODY).unwrap();
    let machine =
        Machine { mib: 128, user: Some(NOBODY), ..Machine::new(Version::V10_0, "dirty=8") };
    let mut here = machine.start(&lab, "here");
    here.check_guest();
    let mut there = machine.incoming(&lab, "there");
    // Runtime directories and link where that user may make them.
    let host = |name: &str| Host { runtime: lab.path(&format!("host-{name}")) };
    let link = format!("unix:{}", lab.path("link").display());
    let mut receiving = host("b")
        .start_as(NOBODY, &["receive", "--qemu", text(&there.qmp), "--listen", &link, "--once"]);
    receiving.event("listening");
    let send = ["send", "--qemu", text(&here.qmp), "--to", &link, "--verify"];
    let sent = host("a").start_as(NOBODY, &send).finish();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    assert_eq!(sent.last()["verify_match"], true);
    receiving.event("received");
    there.check_guest();
    drop(world);

    // Nor may they move somebody else's: the QEMU of root.
    let theirs = Machine { user: None, ..machine }.start(&lab, "root");
    std::fs::set_permissions(&theirs.qmp, std::fs::Permissions::from_mode(0o777)).unwrap();
    let send = ["send", "--qemu", text(&theirs.qmp), "--to", &link];
    host("a").start_as(NOBODY, &send).finish().failed(1, "ptrace");
}

#[test]
fn what_can_t_be_done_is_said() {
    let mut scene = Scene::new(Version::V10_0);
    let tls = scene.world.tls();
    let nowhere = scene.world.path("nowhere.qmp");
    let send = |scene: &Scene, qmp: &str| {
        scene.a.run(&["send", "--qemu", qmp, "--to", "127.0.0.1:1", "--tls", &tls])
    };
    send(&scene, text(&nowhere)).failed(8, "-qmp unix:");
    // Nobody listens at the destination.
    send(&scene, text(&scene.here.qmp)).failed(3, "127.0.0.1:1");
    scene.runs_on_here();
    // A QEMU that runs a guest is no destination.
    let running =
        ["receive", "--qemu", text(&scene.here.qmp), "--listen", "127.0.0.1:0", "--tls", &tls];
    scene.a.run(&running).failed(9, "-incoming defer");
    // A QEMU that waits for a guest has none to send.
    let empty = scene.machine.incoming(&scene.lab, "empty");
    send(&scene, text(&empty.qmp)).failed(9, "must be running");
    // A command that is no QEMU, and one that refuses its arguments.
    for (command, says) in [("true", "has ended"), ("no-such-qemu", "has ended")] {
        let receive = ["receive", "--exec", command, "--listen", "127.0.0.1:0", "--tls", &tls];
        scene.a.run(&receive).failed(1, says);
    }
    scene.runs_on_here();
}
