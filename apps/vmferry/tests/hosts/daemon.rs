//! `vmferry daemon` restricts itself, and what it then can't do its helper does.

use std::os::unix::process::ExitStatusExt;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::daemon_place::{Daemon, Place, arguments, configure};
use crate::sandbox::{EACCES, is_restricted, need_whole_sandbox, of_each_thread, tries};
use crate::support::inject::Argument::{Bytes, Number, Strings};
use crate::support::inject::{call, call_and_leave};
use crate::support::{World, text};

#[test]
fn daemon_is_restricted_before_it_listens_and_carries() {
    let place = Place::new("auto");
    let said = &place.b.listening["sandbox"];
    for done in ["no_new_privileges", "no_capabilities", "seccomp", "no_core_dumps"] {
        assert_eq!(said[done], true, "{said}");
    }
    place.carries();
    for daemon in [&place.a, &place.b] {
        is_restricted(daemon.pid());
        for command in ["help-daemon", "start-receivers"] {
            assert_eq!(of_each_thread(daemon.beside(command), "Seccomp")[0], "0", "{command}");
        }
    }
}

#[test]
fn sandbox_of_a_daemon_refuses_forbidden_calls() {
    let mut place = Place::new("auto");
    need_whole_sandbox(&place.b.listening);
    let pid = place.b.pid();
    for (what, refusal, result) in tries(pid, &place.world) {
        assert_eq!(result, refusal, "{what}");
    }
    // Sockets of this host are made by the helper only.
    let path = place.world.path("peers-b/mine");
    let mut address = [&[1, 0][..], text(&path).as_bytes(), b"\0"].concat();
    address.truncate(110);
    let stream = Number(libc::SOCK_STREAM as u64);
    let socket = call(pid, libc::SYS_socket, &[Number(libc::AF_UNIX as u64), stream, Number(0)]);
    let to = [Number(socket as u64), Bytes(&address), Number(address.len() as u64)];
    assert_eq!(call(pid, libc::SYS_bind, &to), EACCES);
    place.carries();
    let words: [&[u8]; 1] = [b"sh\0"];
    let execve = [Bytes(b"/bin/sh\0"), Strings(&words), Number(0)];
    call_and_leave(pid, libc::SYS_execve, &execve);
    let status = place.b.running.child.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGSYS), "{status}");
}

#[test]
fn unrestricted_daemon_uses_the_same_helper() {
    let place = Place::new("off");
    assert_eq!(place.a.listening["sandbox"]["seccomp"], false);
    assert_eq!(of_each_thread(place.a.pid(), "Seccomp")[0], "0");
    place.a.beside("help-daemon");
    place.carries();
}

#[test]
fn restricted_daemon_uses_files_that_replace_those_of_its_start() {
    let mut place = Place::apart("auto");
    place.introduce();
    place.carries();
    let fresh = place.world.certificate("ca", "fresh");
    for name in ["host.pem", "host.key"] {
        std::fs::rename(fresh.join(name), place.world.path("good").join(name)).unwrap();
    }
    let policy = place.world.path("policy.toml");
    std::fs::write(place.world.path("none.toml"), "").unwrap();
    std::fs::rename(place.world.path("none.toml"), &policy).unwrap();
    place.is_refused();
    let said = place.b.running.event_where(|event| event["event"] == "certificates");
    assert!(said["message"].as_str().unwrap().contains("have changed"), "{said}");
    let refused = place.b.running.event("refused");
    assert!(refused["reason"].as_str().unwrap().contains("may not send guests here"), "{refused}");
}

#[test]
fn daemon_ends_with_its_helper_and_the_next_one_works() {
    let mut place = Place::new("auto");
    place.carries();
    let helper = place.a.beside("help-daemon");
    kill_process(Pid::from_raw(helper.cast_signed()).unwrap(), Signal::KILL).unwrap();
    let ended = place.a.running.finish_by_ref();
    ended.failed(1, "the daemon's helper (`vmferry help-daemon`) has ended (signal: 9");
    assert!(place.world.path("in.sock").exists(), "nobody could remove it");
    place.a.restart("auto");
    place.carries();
}

#[test]
fn helper_ends_with_a_daemon_that_was_killed() {
    let mut place = Place::new("auto");
    let helper = place.a.beside("help-daemon");
    let pidfd = rustix::process::pidfd_open(
        Pid::from_raw(helper.cast_signed()).unwrap(),
        rustix::process::PidfdFlags::empty(),
    )
    .unwrap();
    place.a.running.kill();
    let mut ends = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut ends, None).unwrap(), 1);
    place.a.restart("auto");
    place.carries();
}

#[test]
fn daemon_removes_its_sockets_at_an_orderly_end() {
    let mut place = Place::new("auto");
    place.carries();
    let sockets = ["in.sock", "peers-a/b/libvirt", "peers-a/.daemon"];
    let exist = |place: &Place| sockets.map(|name| place.world.path(name).exists());
    assert_eq!(exist(&place), [true; 3]);
    place.a.running.signal(Signal::TERM);
    place.a.running.finish_by_ref().exited(0);
    assert_eq!(exist(&place), [false; 3]);
}

#[test]
fn missing_sandbox_of_a_daemon_is_an_error_if_required() {
    let world = World::new();
    let daemon = Daemon::start(&world, "a", "auto", "");
    let missing = daemon.listening["sandbox"]["missing"].as_array().unwrap().clone();
    drop(daemon);
    let config = configure(&world, "b", "127.0.0.1:0", "");
    let mut required = world.host("b").start(&arguments(&config, "require"));
    if missing.is_empty() {
        is_restricted(required.event("listening")["pid"].as_u64().unwrap() as u32);
    } else {
        required.finish().failed(16, "this kernel has no");
    }
}

/// Root reads such files as long as it has its capabilities, and the daemon reads them at its start
/// and again when they are replaced.
#[test]
fn key_that_a_restricted_daemon_could_not_read_again_is_an_error() {
    let world = World::new();
    let config = configure(&world, "a", "127.0.0.1:0", "");
    let key = world.path("good/host.key");
    std::os::unix::fs::chown(&key, Some(1), Some(1)).unwrap();
    let ended = world.host("a").run(&arguments(&config, "auto"));
    ended.failed(16, "host.key again when it changes: give the file to the user");
    world.host("a").start(&arguments(&config, "off")).event("listening");
}

#[test]
fn start_fails_with_the_code_of_its_cause() {
    let world = World::new();
    let first = Daemon::start(&world, "a", "auto", "");
    let address = |listening: &Value| listening["address"].as_str().unwrap()[4..].to_owned();
    let start = |name: &str, listen: &str, more: &str| {
        world.host(name).run(&arguments(&configure(&world, name, listen, more), "auto"))
    };
    start("b", &address(&first.listening), "").failed(7, "is in use");
    start("b", "192.0.2.1:7002", "").failed(3, "choose an address of this host");
    let twice = "[[peer]]\nname = \"c\"\naddress = \"127.0.0.1:1\"\n".repeat(2);
    start("b", "127.0.0.1:0", &twice).failed(2, "two peers have the name c");
    let config = std::fs::read_to_string(&first.config).unwrap();
    std::fs::write(world.path("c.toml"), config).unwrap();
    let other = world.host("c").run(&arguments(&world.path("c.toml"), "auto"));
    other.failed(7, "another daemon uses ");
}
