//! The default places of journals and sockets, in a mount namespace whose `/var/lib` and `/run` are
//! the test's own; and directories that are refused.

use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use vmferry_handover::journal::{FileJournal, Journal, Record, Side};
use vmferry_wire::{GuestIdentity, SessionId};

use crate::support::{Ended, Host, Running, World, text};

/// A user ID that no test machine uses.
const STRANGER: u32 = 65_432;

/// A host whose `/var/lib` and `/run` are directories of the test.
struct Machine {
    world: World,
}

impl Machine {
    fn new() -> Self {
        let machine = Self { world: World::without_certificates() };
        for directory in ["var-lib", "run", "run/user", "run/user/0"] {
            std::fs::create_dir(machine.world.path(directory)).unwrap();
        }
        machine
    }

    /// A vmferry command on that host without any variables of its own. With `login` it has the
    /// variables of root's ssh session.
    fn command(&self, login: bool, arguments: &[&str]) -> Command {
        let script =
            "mount --bind \"$1\" /var/lib && mount --bind \"$2\" /run && shift 2 && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
        command.args([self.world.path("var-lib"), self.world.path("run")]);
        command.arg(env!("CARGO_BIN_EXE_vmferry")).arg("--json").args(arguments);
        for variable in ["VMFERRY_RUNTIME_DIR", "VMFERRY_STATE_DIR", "XDG_STATE_HOME"] {
            command.env_remove(variable);
        }
        command.env_remove("XDG_RUNTIME_DIR");
        if login {
            command.env("XDG_RUNTIME_DIR", "/run/user/0");
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        command
    }

    fn start(&self, login: bool, arguments: &[&str]) -> Running {
        Host::spawn(self.command(login, arguments))
    }

    fn run(&self, login: bool, arguments: &[&str]) -> Ended {
        self.start(login, arguments).finish()
    }

    fn status(&self, login: bool) -> Value {
        let ended = self.run(login, &["status"]).exited(0);
        ended.last().clone()
    }
}

/// A session that this host has promised to another host and whose outcome it does not know.
fn leave_in_doubt(journals: &Path) {
    let guest = GuestIdentity { uuid: uuid::Uuid::new_v4(), name: "web".into() };
    let session = SessionId([9; 16]);
    let mut journal =
        FileJournal::begin(journals, session, Side::Source, guest, ("b", &[])).unwrap();
    journal.append(&Record::Commit).unwrap();
}

#[test]
fn journals_of_root_outlive_its_logout_and_are_found_from_cron() {
    let machine = Machine::new();
    leave_in_doubt(&machine.world.path("var-lib/vmferry/journal"));
    let by_ssh = machine.status(true);
    assert_eq!(by_ssh["in_doubt"][0]["guest"], "web", "{by_ssh}");
    assert_eq!(by_ssh["directories"]["journals"], "/var/lib/vmferry/journal");
    // As logind does when the last session ends.
    std::fs::remove_dir_all(machine.world.path("run/user/0")).unwrap();
    let by_cron = machine.status(false);
    assert_eq!(by_cron["in_doubt"], by_ssh["in_doubt"]);
    assert_eq!(by_cron["directories"], by_ssh["directories"]);
}

#[test]
fn journals_of_a_migration_by_root_are_on_disk_for_any_users_guest() {
    let machine = Machine::new();
    let flags = ["--guest", "process", "--memory", "64M", "--workload", "hot=4,random,rate=20000"];
    let mut guest = machine.start(true, &[&["run", "web"], &flags[..]].concat());
    guest.event("serving");
    let there = machine.world.host("b");
    let socket = machine.world.path("in");
    let listen = format!("unix:{}", text(&socket));
    let (_received, _) = there.receive(&["--listen", &listen]);
    machine.run(false, &["send", "web", "--to", &listen]).exited(0);
    guest.finish().exited(0);
    let journals = machine.world.path("var-lib/vmferry/journal");
    let found = vmferry_handover::journal::sessions(&journals).unwrap();
    assert_eq!(found.len(), 1);
    assert!(found[0].records.contains(&Record::Given { by_operator: false }), "{found:?}");
    let mode = std::fs::metadata(journals).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn journals_of_an_older_release_are_counted_and_located() {
    let machine = Machine::new();
    assert_eq!(machine.status(true)["older"], Value::Array(vec![]));
    for (login, place) in [(false, "run/vmferry"), (true, "run/user/0/vmferry")] {
        leave_in_doubt(&machine.world.path(place).join("journal"));
        let status = machine.status(login);
        let older = status["older"].as_array().unwrap();
        let found = older.iter().find(|one| one["directory"] == format!("/{place}"));
        assert_eq!(found.unwrap()["sessions"][0]["verdict"], "in-doubt", "{status}");
        assert_eq!(status["in_doubt"], Value::Array(vec![]), "they are not this directory's");
    }
    let mut command = machine.command(false, &["status", "--sessions"]);
    command.env("VMFERRY_STATE_DIR", "/run/vmferry");
    let ended = Host::spawn(command).finish();
    assert_eq!(ended.last()["sessions"][0]["verdict"], "in-doubt", "{ended:?}");
}

#[test]
fn journals_of_users_are_below_home_and_never_below_tmp() {
    let world = World::without_certificates();
    std::fs::set_permissions(world.directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let home = world.path("home");
    std::fs::create_dir(&home).unwrap();
    chown(&home, Some(STRANGER), Some(STRANGER)).unwrap();
    let status = |home: Option<&Path>| {
        let mut command = world.host("none").command(&["status"]);
        command.env_remove("VMFERRY_RUNTIME_DIR").env_remove("XDG_RUNTIME_DIR");
        command.env_remove("XDG_STATE_HOME").env_remove("HOME").uid(STRANGER).gid(STRANGER);
        command.envs(home.map(|home| ("HOME", home)));
        Host::spawn(command).finish()
    };
    let ended = status(Some(&home));
    let expected = home.join(".local/state/vmferry/journal");
    assert_eq!(ended.last()["directories"]["journals"], text(&expected), "{ended:?}");
    status(None).failed(1, "has no home directory");
}

/// A directory with this mode, for vmferry.
fn made(world: &World, name: &str, mode: u32) -> PathBuf {
    let path = world.path(name);
    std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&path).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    path
}

#[test]
fn directory_that_others_can_reach_is_refused_with_its_reason() {
    let world = World::without_certificates();
    let refused = |runtime: &Path, words: &str| {
        let host = Host { runtime: runtime.to_owned() };
        host.run(&["status"]).failed(1, words);
        host.run(&["run", "web", "--guest", "process"]).failed(1, words);
    };
    let mine = made(&world, "mine", 0o700);
    Host { runtime: mine.clone() }.run(&["status"]).exited(0);

    refused(&made(&world, "open", 0o755), "open has mode 0755, so other users can");
    symlink(&mine, world.path("link")).unwrap();
    refused(&world.path("link"), "link is a symbolic link: name the directory");
    let theirs = made(&world, "theirs", 0o700);
    chown(&theirs, Some(STRANGER), None).unwrap();
    refused(&theirs, &format!("theirs belongs to user {STRANGER}"));
    let below = made(&world, "above/below", 0o700);
    made(&world, "above", 0o777);
    refused(&below, "above (user 0, mode 0777), which contains it");
    let journals = made(&world, "state/journal", 0o775);
    refused(journals.parent().unwrap(), "journal has mode 0775");
}
