//! `vmferry doctor` on hosts that lack something: processes without rights, journals that can't be
//! written, sessions in doubt, outdated revocation lists.

use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::process::{Command, Stdio};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
use vmferry_handover::journal::{FileJournal, Journal, Record, Side};
use vmferry_transport::pki::{Validity, revoke};
use vmferry_wire::{GuestIdentity, SessionId};

use crate::doctor::{STRANGER, doctor, found, host_on_disk, is_bad};
use crate::support::{Ended, Host, World, text};

/// Runs `doctor` under the wrapper programs of `prefix`, with its own directory.
fn doctor_under(prefix: &[&str], host: &Host) -> Ended {
    let mut command = Command::new(prefix[0]);
    command.args(&prefix[1..]).args([env!("CARGO_BIN_EXE_vmferry"), "--json", "doctor"]);
    command.env("VMFERRY_RUNTIME_DIR", &host.runtime).env_remove("VMFERRY_STATE_DIR");
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    Host::spawn(command).finish()
}

/// Runs `doctor` as a user without rights who owns the directory.
fn doctor_of_a_stranger(world: &World) -> Ended {
    std::fs::set_permissions(world.directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let host = world.host("stranger");
    std::fs::DirBuilder::new().mode(0o700).create(&host.runtime).unwrap();
    std::os::unix::fs::chown(&host.runtime, Some(STRANGER), Some(STRANGER)).unwrap();
    let user = STRANGER.to_string();
    let setpriv = ["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"];
    doctor_under(&setpriv, &host)
}

#[test]
fn doctor_reports_missing_userfaultfd_and_control_groups() {
    let world = World::without_certificates();
    // As in a container with the default profile. A thread's children inherit its seccomp filter.
    let refusing = SeccompFilter::new(
        [(libc::SYS_userfaultfd, vec![])].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let program: BpfProgram = refusing.unwrap().try_into().unwrap();
    let ended = std::thread::scope(|scope| {
        let filtered = scope.spawn(|| {
            apply_filter(&program).unwrap();
            doctor_of_a_stranger(&world)
        });
        filtered.join().unwrap()
    });
    is_bad(&ended, "userfaultfd", "warning", "vm.unprivileged_userfaultfd is ");
    is_bad(&ended, "post-copy", "note", "let this user read /dev/userfaultfd");
    let groups = found(&ended, "control-groups");
    assert_eq!(groups["level"], "note", "{groups}");
    assert!(groups["why"].as_str().unwrap().contains("Delegate=yes"), "{groups}");
}

/// Replaces Yama's setting, as the kernel shows it, in a mount namespace: not every kernel has
/// Yama.
fn with_ptrace_scope(scope: &str) -> [String; 7] {
    let script = "mount -t tmpfs none /proc/sys/kernel && mkdir /proc/sys/kernel/yama && \
                  echo \"$1\" > /proc/sys/kernel/yama/ptrace_scope && shift && exec \"$@\"";
    ["unshare", "--mount", "sh", "-c", script, "sh", scope].map(str::to_owned)
}

#[test]
fn doctor_reports_yama_and_the_ptrace_capability() {
    let world = World::without_certificates();
    for (scope, words) in [("1", "is 1: without CAP_SYS_PTRACE"), ("3", "no process may trace")] {
        let prefix = with_ptrace_scope(scope);
        let prefix: Vec<&str> = prefix.iter().map(String::as_str).collect();
        let host = world.host(scope);
        let without = ["setpriv", "--bounding-set", "-sys_ptrace"];
        let ended = doctor_under(&[&prefix[..], &without].concat(), &host);
        is_bad(&ended, "ptrace", "warning", words);
        let with = found(&doctor_under(&prefix, &host), "ptrace")["level"].clone();
        assert_eq!(with, if scope == "3" { "warning" } else { "ok" }, "with the capability");
    }
}

#[test]
fn doctor_reports_a_read_only_journal_directory() {
    let world = World::without_certificates();
    let host = host_on_disk(&world);
    let script =
        "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" && shift && exec \"$@\"";
    let runtime = text(&host.runtime);
    let ended = doctor_under(&["unshare", "--mount", "sh", "-c", script, "sh", runtime], &host);
    is_bad(&ended, "journal-sync", "error", "no journal can be written there: Read-only");
    // A disk that is slow at this moment is a warning.
    assert_ne!(found(&doctor(&host, &[]), "journal-sync")["level"], "error");
}

#[test]
fn doctor_reports_a_session_in_doubt_until_it_is_resolved() {
    let world = World::without_certificates();
    let host = host_on_disk(&world);
    let guest = GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "web".into() };
    let (session, peer) = (SessionId([7; 16]), ("tls:host-b:7001", [].as_slice()));
    let journals = host.runtime.join("journal");
    // The process that promised the guest away died afterward.
    let mut journal = FileJournal::begin(&journals, session, Side::Source, guest, peer).unwrap();
    journal.append(&Record::Commit).unwrap();
    drop(journal);
    let ended = doctor(&host, &[]);
    is_bad(&ended, "session", "warning", "is in doubt");
    assert_eq!(found(&ended, "session")["object"], session.to_string());
    host.run(&["resolve", "web", "--destination-owns", "--yes"]).exited(0);
    let findings = doctor(&host, &[]).last()["findings"].clone();
    let checks = findings.as_array().unwrap().iter().map(|one| &one["check"]);
    assert_eq!(checks.filter(|check| *check == "session").count(), 0, "{findings}");
}

#[test]
fn doctor_reports_outdated_revocation_lists() {
    let world = World::new();
    let host = host_on_disk(&world);
    let (authority, tls) = (world.path("ca"), world.tls());
    let crl = std::path::Path::new(&tls).join("crl.pem");
    let listed = |from_days, until_days| {
        let list = revoke(&authority, &[], Validity { from_days, until_days }).unwrap();
        std::fs::copy(list.path, &crl).unwrap();
        doctor(&host, &["--tls", &tls])
    };
    let good = listed(-1, 30);
    assert_eq!(found(&good, "revocations")["level"], "ok", "{good:?}");
    is_bad(&listed(-1, 3), "revocations", "warning", "; then no peer of its authority is accepted");
    is_bad(&listed(-9, -1), "revocations", "error", "expired at");
    // A list that is named counts like the one next to the certificate.
    std::fs::rename(&crl, world.path("named.pem")).unwrap();
    let named = world.path("named.pem");
    let ended = doctor(&host, &["--tls", &tls, "--crl", text(&named)]);
    is_bad(&ended, "revocations", "error", "expired at");
}
