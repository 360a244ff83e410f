//! How vmferry identifies the process of a QEMU, and which vmferry works on it: PID namespaces,
//! sockets that were passed on, and several senders at once.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use vmferry::source::{Orders, migrate};
use vmferry_qemu::{CarriedSource, Mode, QemuError, QemuSource, Qmp, QmpError, Reached};
use vmferry_qemu_lab::{Machine, Qemu, Version, World};
use vmferry_transport::Dialer;

use crate::support::{config, ended, hop, receive_into};

fn machine() -> Machine {
    Machine { mib: 128, ..Machine::new(Version::V10_0, "dirty=8") }
}

/// A guest whose QEMU has a second QMP socket.
fn with_two_sockets(world: &World) -> (Qemu, PathBuf) {
    let second = world.path("second.qmp");
    let socket = format!("unix:{},server=on,wait=off", second.display());
    let here = machine().with(&["-qmp", &socket]).start_booted(world, "here");
    (here, second)
}

/// The userfaultfds of a process.
fn userfaultfds(pid: u32) -> usize {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let links = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links.filter(|to| to.as_os_str() == "anon_inode:[userfaultfd]").count()
}

/// The only child of a process.
fn child_of(parent: u32) -> u32 {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    children.unwrap().split_whitespace().next().unwrap().parse().unwrap()
}

/// The error for a second sender.
fn refusal<T>(attached: Result<T, QemuError>) -> QemuError {
    match attached {
        Ok(_) => panic!("it has attached to a QEMU that another sender has"),
        Err(error) => error,
    }
}

#[test]
fn second_sender_is_refused_and_the_first_migration_is_undisturbed() {
    let world = World::new();
    let (mut here, second) = with_two_sockets(&world);
    let pid = here.child.id();
    let mut there = machine().incoming(&world, "there");
    let source = QemuSource::attach(&here.qmp).unwrap();
    assert_eq!(userfaultfds(pid), 1);
    let own = std::process::id();
    for error in [
        refusal(QemuSource::attach(&second)),
        refusal(CarriedSource::attach(&second, 0)),
        refusal(Reached::by(&second, Mode::Auto, 0)),
    ] {
        assert!(
            matches!(error, QemuError::Locked { pid: it, by } if it == pid && by == Some(own)),
            "{error:?}"
        );
    }
    assert_eq!(userfaultfds(pid), 1, "the first one's is left alone");

    let (address, receiving) = receive_into(&world, 1, &there);
    let dialer = Dialer::new(address, None);
    let settings = vmferry::SourceConfig { verify: true, ..config(&world) };
    let outcome = migrate(source, &dialer, settings, &Orders::default(), &mut |_| {});
    let (source, stats) = ended(outcome, receiving).unwrap();
    assert_eq!(stats.verify_match, Some(true));
    drop(source);
    assert_eq!(userfaultfds(pid), 0);
    there.check_guest();
    // The lock is released: the next sender gets an error about the guest's state, and none about
    // another sender.
    let error = refusal(QemuSource::attach(&second));
    assert!(matches!(error, QemuError::State { .. }), "{error:?}");
    assert!(here.child.try_wait().unwrap().is_none());
}

/// As in a container: QEMU's own PID and thread IDs name other processes here.
#[test]
fn qemu_in_a_pid_namespace_is_attached_and_moved() {
    let world = World::new();
    let under = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let mut here = machine().start_booted_under(&world, "here", &under);
    let pid = child_of(here.child.id());
    let mut qmp = Qmp::connect(&here.qmp).unwrap();
    let vcpus = qmp.execute("query-cpus-fast", serde_json::json!({})).unwrap();
    let inside = vcpus[0]["thread-id"].as_u64().unwrap() as u32;
    assert!(!Path::new(&format!("/proc/{pid}/task/{inside}")).exists(), "numbers of its own");
    assert_eq!(qmp.pid(), Some(pid));
    drop(qmp);
    let source = QemuSource::attach(&here.qmp).unwrap();
    assert_eq!(source.pid(), pid);
    assert_eq!(userfaultfds(pid), 1);
    drop(source);
    assert_eq!(userfaultfds(pid), 0);
    let mut there = machine().incoming(&world, "there");
    let stats = hop(&world, 1, &here, &there);
    assert_eq!(stats.verify_match, Some(true));
    there.check_guest();
    assert!(here.child.wait().unwrap().success());
}

/// As with libvirt: a manager creates the socket, and QEMU only accepts on it.
#[test]
fn socket_created_by_another_process_leads_to_qemu() {
    let world = World::new();
    let socket = world.path("passed.qmp");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    // Without close-on-exec: it is passed on by its number.
    let passed = rustix::io::dup(&listener).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&passed);
    let chardev = format!("socket,id=passed,fd={number},server=on,wait=off");
    let machine = machine().with(&["-chardev", &chardev, "-mon", "chardev=passed,mode=control"]);
    let here = machine.start(&world, "here");
    // The kernel reports the process that called `listen` last.
    rustix::net::listen(&listener, 1).unwrap();
    assert_eq!(Qmp::connect(&socket).unwrap().pid(), Some(here.child.id()));
}

#[test]
fn busy_socket_names_its_client_at_once() {
    let world = World::new();
    let here = machine().start_booted(&world, "here");
    let _client = Qmp::connect(&here.qmp).unwrap();
    // For each place in the queue, and once when there is none.
    for _ in 0..4 {
        let Err(error) = Qmp::connect(&here.qmp) else { panic!("QMP takes one client") };
        let QmpError::Busy { clients, .. } = &error else { panic!("{error:?}") };
        let pids: BTreeSet<u32> = clients.iter().map(|client| client.pid).collect();
        // A child that another test is starting shares this process's descriptors until it calls
        // `exec`.
        assert!(pids.contains(&std::process::id()), "{pids:?}");
        assert!(error.to_string().contains("takes one client at a time"), "{error}");
    }
}

/// A process that has the socket open, with the name of libvirt's daemon.
#[test]
fn socket_held_by_libvirt_is_attributed_to_libvirt() {
    let world = World::new();
    let here = machine().start_booted(&world, "here");
    let daemon = world.path("virtqemud");
    std::os::unix::fs::symlink("/bin/sh", &daemon).unwrap();
    let socket = std::os::unix::net::UnixStream::connect(&here.qmp).unwrap();
    // It ends with QEMU.
    let mut daemon = Command::new(daemon)
        .args(["-c", "while read -r line; do :; done"])
        .stdin(std::os::fd::OwnedFd::from(socket))
        .spawn()
        .unwrap();
    let Err(error) = Qmp::connect(&here.qmp) else { panic!("QMP takes one client") };
    let text = error.to_string();
    assert!(text.contains(&format!("process {} (`virtqemud`)", daemon.id())), "{text}");
    assert!(text.contains("Have libvirt migrate the guest"), "{text}");
    drop(here);
    daemon.wait().unwrap();
}
