//! The cases of QEMU's own migration tests, run against vmferry with real QEMUs: cancellation in
//! each state, peers that do not match, addresses that lead nowhere, links that fail during the
//! reconnect. `docs/qemu-tests.md` has the table.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;

use crate::support::outcomes::Owner;
use crate::support::scene::{Scene, Way};
use crate::support::stops::Stopped;
use crate::support::{BEFORE_COMMIT, all, faults, in_parallel, run_ok, text};
use vmferry_qemu_lab::{Machine, Version};

const WAYS: [Way; 2] = [Way::Attached, Way::Carried];

/// Both ways in the full matrix, one otherwise.
fn ways(sample: Way) -> Vec<Way> {
    if all() { WAYS.to_vec() } else { vec![sample] }
}

/// The destination has received the guest's description and does not answer, because its QEMU is
/// stopped.
#[test]
fn cancel_during_setup() {
    in_parallel(ways(Way::Attached), |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        let (there, mut receiving, address) = scene.receive_tls();
        let stopped = Stopped::now(there.child.id());
        let send = scene.send_tls(&address);
        // The guest was announced, and the destination prepares.
        receiving.event("authenticated");
        run_ok(&scene.a, &["cancel", "tested"]);
        send.finish().exited(11);
        scene.runs_on_here();
        stopped.wake();
        let received = receiving.finish();
        assert_ne!(received.code, Some(0), "{received:?}");
        scene.arrives();
    });
}

/// The destination accepts the connection and sends nothing, as a hung host does.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn cancel_while_connecting_to_a_silent_host() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", silent.local_addr().unwrap());
    let send = scene.send(&address, &["--plain"]);
    let (_held, _) = silent.accept().unwrap();
    run_ok(&scene.a, &["cancel", "tested"]);
    let sent = send.finish();
    assert!(matches!(sent.code, Some(3 | 11 | 12)), "{sent:?}");
    scene.runs_on_here();
    // Without a cancellation the command reports the error as well.
    let sent = scene.send(&address, &["--plain"]).finish();
    assert!(matches!(sent.code, Some(3 | 12)), "{sent:?}");
    scene.runs_on_here();
    scene.arrives();
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn cancel_twice_and_after_the_end() {
    in_parallel(WAYS.to_vec(), |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        for (name, moment) in BEFORE_COMMIT {
            let (_there, receiving, send) = scene.migrate_until(moment);
            run_ok(&scene.a, &["cancel", "tested"]);
            // It is being canceled, or has ended and nothing answers.
            let again = scene.a.run(&["cancel", "tested"]);
            assert!(matches!(again.code, Some(0 | 8)), "{name}: {again:?}");
            let sent = send.finish();
            assert_eq!(sent.code, Some(11), "{name}: {sent:?}");
            let received = receiving.finish();
            assert_eq!(received.code, Some(11), "{name}: {received:?}");
            scene.runs_on_here();
        }
        scene.a.run(&["cancel", "tested"]).failed(8, "no guest listens");
        // After COMMIT it is too late to cancel, and the command says so.
        let (mut there, mut receiving, mut send, proxy) = faults::in_doubt(&mut scene);
        run_ok(&scene.a, &["cancel", "tested"]);
        send.event("too-late-to-cancel");
        proxy.heal();
        receiving.event("received");
        send.finish().exited(0);
        there.check_guest();
        scene.a.run(&["cancel", "tested"]).failed(8, "no guest listens");
    });
}

/// QEMU's additional channels are closed with the first one, and the next migration has its own.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn cancel_with_multifd() {
    let mut scene = Scene::new(Version::V10_0, Way::Carried);
    let tls = scene.world.tls();
    let link = ["--tls", &tls, "--reconnect-timeout", "2s", "--multifd", "2"];
    for (name, moment) in BEFORE_COMMIT {
        let (_there, receiving, address) = scene.receive_tls();
        let mut send = scene.send(&address, &link);
        send.event_where(moment);
        run_ok(&scene.a, &["cancel", "tested"]);
        assert_eq!(send.finish().code, Some(11), "{name}");
        let received = receiving.finish();
        assert_eq!(received.code, Some(11), "{name}: {received:?}");
        scene.runs_on_here();
    }
    let (mut there, mut receiving, address) = scene.receive_tls();
    scene.send(&address, &link).finish().exited(0);
    receiving.event("received");
    there.check_guest();
}

/// A difference between the two sides is found before anything is sent, and named.
#[test]
fn mismatched_destination_is_refused_by_name() {
    type Change = fn(Machine) -> Machine;
    let others: [(&str, Change, &str); 7] = [
        ("UUID", |m| m.with(&["-uuid", "6b1f7a4c-0000-4000-8000-000000000008"]), "expects guest"),
        ("memory", |m| Machine { mib: 256, ..m }, "MiB"),
        ("vCPUs", |m| Machine { vcpus: 2, ..m }, "-smp"),
        ("machine type", |m| Machine { kind: "pc", ..m }, "-machine"),
        ("QEMU version", |m| Machine { version: Version::V7_2, ..m }, "-machine"),
        ("device", |m| m.with(&["-device", "virtio-rng-pci"]), "virtio-rng-pci"),
        ("CPU", |m| m.with(&["-cpu", "qemu64,-kvm-steal-time"]), "lack `kvm-steal-time`"),
    ];
    in_parallel(ways(Way::Attached), |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        for (what, change, says) in others {
            if !all() && matches!(what, "memory" | "vCPUs" | "device") {
                continue;
            }
            println!("{way:?}: another {what}");
            let same = scene.machine.clone();
            scene.machine = change(same.clone());
            let (mut there, receiving, address) = scene.receive_tls();
            scene.machine = same;
            let sent = scene.send_tls(&address).finish();
            sent.failed(6, says);
            let received = receiving.finish();
            assert_eq!(received.code, Some(6), "{what}: {received:?}");
            scene.runs_on_here();
            assert!(there.child.try_wait().unwrap().is_none(), "{what}: its QEMU waits on");
            let fault = format!("a destination of another {what}");
            scene.note(&mut there, &fault, "negotiation", (&sent, &received), Owner::Source);
        }
        scene.arrives();
    });
}

/// A destination without a UUID accepts any guest, as QEMU does; a destination with one accepts a
/// guest without.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn uuid_on_one_side_only_is_accepted() {
    const NONE: &str = "00000000-0000-0000-0000-000000000000";
    in_parallel(ways(Way::Attached), |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        let same = scene.machine.clone();
        scene.machine = same.clone().with(&["-uuid", NONE]);
        let (there, mut receiving, address) = scene.receive_tls();
        scene.send_tls(&address).finish().exited(0);
        receiving.event("received");
        scene.moved_to(there);
        // Now the source has no UUID and the destination has one: another guest may be meant.
        scene.machine = same;
        let (_there, receiving, address) = scene.receive_tls();
        scene.send_tls(&address).finish().failed(6, "expects guest");
        receiving.finish().exited(6);
        scene.runs_on_here();
    });
}

/// Addresses at which nothing listens, nothing exists, or something else is.
#[test]
fn unreachable_addresses_leave_the_guest_alone() {
    in_parallel(ways(Way::Attached), |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let stale = scene.world.path("stale");
        drop(UnixListener::bind(&stale).unwrap());
        let directory = scene.world.path("directory");
        std::fs::create_dir(&directory).unwrap();
        let file = scene.world.path("file");
        std::fs::write(&file, "no socket").unwrap();
        let unix = |path: &std::path::Path| format!("unix:{}", path.display());
        for (what, address) in [
            ("a closed port", format!("tcp:{closed}")),
            ("no such name", "tcp:no-such-host.invalid:7001".to_owned()),
            ("no such file", unix(&scene.world.path("nothing"))),
            ("a socket that nobody listens on", unix(&stale)),
            ("a directory", unix(&directory)),
            ("a file", unix(&file)),
        ] {
            println!("{way:?}: {what}");
            let sent = scene.send(&address, &["--plain"]).finish();
            assert_eq!(sent.code, Some(3), "{what}: {sent:?}");
            let said = sent.last()["error"]["message"].as_str().unwrap();
            let name = address.split_once(':').unwrap().1;
            assert!(said.contains(name), "{what}: {said}");
        }
        scene.runs_on_here();
        // A destination can't listen there either.
        for (what, address) in [("a directory", unix(&directory)), ("a file", unix(&file))] {
            let there =
                scene.machine.incoming(&scene.lab, &format!("for {what}").replace(' ', "-"));
            let receive = ["receive", "--qemu", text(&there.qmp), "--listen", &address];
            let received = scene.b.run(&receive);
            assert!(matches!(received.code, Some(3 | 7)), "{what}: {received:?}");
        }
        assert!(directory.is_dir() && file.is_file(), "they are left alone");
        // A listener takes over the socket file that an earlier one left.
        let address = unix(&stale);
        let (mut there, mut receiving, address) = scene.receive(&["--listen", &address]);
        scene.send(&address, &[]).finish().exited(0);
        receiving.event("received");
        there.check_guest();
    });
}

/// The link is lost again during the reconnect, and once more after it.
#[test]
fn link_that_fails_during_the_reconnect_ends_no_migration() {
    in_parallel(ways(Way::Carried), |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        let (mut there, mut receiving, mut send, proxy) = scene.cut_in_the_first_round();
        // For two seconds every attempt fails because nothing passes. The next attempts are cut as
        // soon as one channel is open.
        (0..10).for_each(|_| drop(send.event("progress")));
        proxy.heal();
        for _ in 0..2 {
            send.event("link-restored");
            proxy.cut();
            proxy.heal();
            send.event("link-lost");
        }
        let sent = send.finish().exited(0);
        let stats = sent.last();
        assert_eq!(stats["digest_match"], true);
        assert!(stats["reconnections"].as_u64() >= Some(3), "{stats}");
        receiving.event("received");
        there.check_guest();
    });
}
