//! Which QEMU a command works on: two senders at once, and a vmferry that can't see QEMU's process.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;

use crate::support::scene::{Scene, Way};
use crate::support::{BEFORE_COMMIT, run_ok, text};
use vmferry_handover::journal::{FileJournal, Journal, Opening, Record, Side};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Backend, Machine, Version, World as Lab};
use vmferry_wire::{GuestIdentity, SessionId};

/// By another QMP socket, and from another runtime directory.
#[test]
fn second_send_is_refused_and_names_the_first() {
    let second = Lab::new();
    let socket = second.path("second.qmp");
    let machine = Machine { mib: 128, ..Machine::new(Version::V10_0, "dirty=8") };
    let listening = format!("unix:{},server=on,wait=off", text(&socket));
    let mut scene = Scene::of(machine.clone().with(&["-qmp", &listening]), Way::Attached);
    scene.machine = machine;
    let (mut there, mut receiving, address) = scene.receive_plain();
    let mut first = scene.send(&address, &["--plain"]);
    first.event_where(|event| event["event"] == "round-started");
    let other = scene.world.host("other");
    for mode in ["auto", "attached", "carried"] {
        let to = ["send", "--qemu", text(&socket), "--to", &address, "--plain", "--mode", mode];
        let refused = other.run(&to);
        refused.failed(7, &format!("in the hands of process {}", first.child.id()));
    }
    let sent = first.finish().exited(0);
    assert_eq!(sent.last()["verify_match"], true);
    receiving.event("received");
    there.check_guest();
}

#[test]
fn qemu_whose_socket_is_in_use_is_refused_and_names_the_client() {
    let machine = Machine { mib: 128, ..Machine::new(Version::V10_0, "dirty=8") };
    let mut scene = Scene::of(machine, Way::Attached);
    let client = Qmp::connect(&scene.here.qmp).unwrap();
    let holder = format!("process {} (", std::process::id());
    scene.send("127.0.0.1:1", &["--plain"]).finish().failed(7, &holder);
    let receive = ["receive", "--qemu", text(&scene.here.qmp), "--listen", "127.0.0.1:0"];
    scene.b.run(&[&receive[..], &["--plain"]].concat()).failed(7, &holder);
    drop(client);
    scene.runs_on_here();
}

/// Two guests with one name and no UUID; the QEMU of one session has ended.
#[test]
fn session_of_another_qemu_of_the_same_name_is_left_alone() {
    let none = "00000000-0000-0000-0000-000000000000";
    let machine = Machine { mib: 128, ..Machine::new(Version::V10_0, "dirty=8") };
    let mut scene = Scene::of(machine.with(&["-uuid", none]), Way::Attached);
    let identity = GuestIdentity { uuid: uuid::Uuid::nil(), name: "tested".into() };
    let peer = ("tcp:127.0.0.1:1", [].as_slice());
    let journals = scene.a.runtime.join("journal");
    // Created as vmferry does: a directory that other users may read is refused.
    DirBuilder::new().recursive(true).mode(0o700).create(&journals).unwrap();
    let open = |number: u8, process: Option<String>| {
        let of = Opening { guest: identity.clone(), process, witness: None };
        let (session, side) = (SessionId([number; 16]), Side::Source);
        FileJournal::begin_for(&journals, session, side, of, peer).unwrap()
    };
    let gone = format!(
        "{}/7/100",
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim()
    );
    // A session that names no process may be this guest's. No message tells the operator to end a
    // running QEMU.
    open(1, None).append(&Record::Commit).unwrap();
    // The later session is of a QEMU that has ended. It neither hides the first session nor counts
    // by itself.
    open(2, Some(gone)).append(&Record::Commit).unwrap();
    let (mut there, mut receiving, address) = scene.receive_plain();
    scene.send(&address, &["--plain"]).finish().failed(9, "decide session 0101");
    scene.runs_on_here();
    let resolve = ["resolve", &SessionId([1; 16]).to_string(), "--destination-owns", "--yes"];
    run_ok(&scene.a, &resolve);
    scene.send(&address, &["--plain"]).finish().exited(0);
    receiving.event("received");
    there.check_guest();
}

/// Wraps a command as in a container next to QEMU's that shares the sockets' directory.
fn apart() -> Vec<String> {
    ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"].map(str::to_owned).to_vec()
}

#[test]
fn qemu_in_another_pid_namespace_is_carried_and_its_end_noticed() {
    let machine = Machine { mib: 128, ..Machine::new(Version::V10_0, "dirty=8") };
    let machine = Machine { backend: Backend::Private, ..machine };
    let mut scene = Scene::of(machine, Way::Carried);
    let there = scene.machine.incoming(&scene.lab, "apart");
    let listen = ["receive", "--qemu", text(&there.qmp), "--once", "--listen", "tcp:127.0.0.1:0"];
    let mut receiving = scene.b.start_under(&apart(), &[&listen[..], &["--plain"]].concat());
    receiving.event("qemu-unseen");
    let address = receiving.event("listening")["address"].as_str().unwrap().to_owned();
    let here = scene.here.qmp.clone();
    let to = ["send", "--qemu", text(&here), "--to", &address, "--plain"];

    // Attaching would trace a process that is not proven to be this QEMU.
    let refused = [&to[..], &["--mode", "attached"]].concat();
    let refused = scene.a.start_under(&apart(), &refused).finish();
    refused.failed(8, "in another PID namespace");
    scene.runs_on_here();

    // When the migration is given up before COMMIT, the guest runs on.
    let slow = [&to[..], &["--max-bandwidth", "10M", "--when-stuck", "switch-over"]].concat();
    let mut send = scene.a.start_under(&apart(), &slow);
    send.event_where(BEFORE_COMMIT[0].1);
    run_ok(&scene.a, &["cancel", "tested"]);
    send.finish().exited(11);
    scene.runs_on_here();
    receiving.finish().exited(11);

    let mut again = scene.machine.incoming(&scene.lab, "apart-again");
    let listen = ["receive", "--qemu", text(&again.qmp), "--once", "--listen", "tcp:127.0.0.1:0"];
    let mut receiving = scene.b.start_under(&apart(), &[&listen[..], &["--plain"]].concat());
    let address = receiving.event("listening")["address"].as_str().unwrap().to_owned();
    let to = ["send", "--qemu", text(&here), "--to", &address, "--plain"];
    let sent = scene.a.start_under(&apart(), &to).finish().exited(0);
    assert_eq!(sent.last()["qemu"]["mode"], "carried");
    let kept = sent.lines.iter().find(|line| line["event"] == "memory-kept");
    assert_eq!(kept, None, "its memory is private");
    receiving.event("received");
    assert!(scene.here.child.wait().unwrap().success(), "the source's QEMU has exited regularly");
    again.check_guest();
    // Only the socket can tell the receiver.
    let _ = Qmp::connect(&again.qmp).unwrap().quit();
    receiving.finish().exited(0);
}
