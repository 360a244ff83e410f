//! `vmferry doctor`: each check fails once, and the other host is a real receiver over TLS.

use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use vmferry_net_lab::{DESTINATION_ADDRESS, Namespaces};
use vmferry_transport::pki::{IssueRequest, Validity, issue};
use vmferry_transport::{Channel, Dialer, Listener, TlsIdentity};
use vmferry_wire::{
    GuestIdentity, HELLO_BYTES, HELLO_REPLY_BYTES, Hello, HelloReply, HelloStatus, ProbeMessage,
    Role, Token,
};

use crate::support::{Ended, Host, Running, World, inside, text};

/// A user ID that no test machine uses.
pub const STRANGER: u32 = 65_432;

pub fn doctor(host: &Host, more: &[&str]) -> Ended {
    host.run(&[&["doctor"], more].concat())
}

/// The last finding of a kind.
pub fn found<'a>(ended: &'a Ended, check: &str) -> &'a Value {
    let findings = ended.last()["findings"].as_array().expect("findings");
    let found = findings.iter().rfind(|finding| finding["check"] == check);
    found.unwrap_or_else(|| panic!("no check {check}: {ended:?}"))
}

/// Checks that a finding has this level, these words, and a remedy.
pub fn is_bad(ended: &Ended, check: &str, level: &str, words: &str) {
    let finding = found(ended, check);
    assert_eq!(finding["level"], level, "{finding}");
    assert!(finding["why"].as_str().unwrap().contains(words), "{finding}");
    assert!(finding["remedy"].as_str().is_some_and(|text| !text.is_empty()), "{finding}");
    let worst = ended.last()["worst"].as_str().unwrap();
    let expected = if worst == "error" { 18 } else { 17 };
    assert_eq!(ended.code, Some(expected), "{ended:?}");
}

/// A host whose directories are on the disk of the sources.
pub fn host_on_disk(world: &World) -> Host {
    let host = world.host("a");
    std::fs::DirBuilder::new()
        .mode(0o700)
        .recursive(true)
        .create(host.runtime.join("journal"))
        .unwrap();
    host
}

#[test]
fn doctor_checks_this_host_and_changes_nothing() {
    let world = World::without_certificates();
    let host = host_on_disk(&world);
    let ended = doctor(&host, &[]);
    for check in ["kvm", "userfaultfd", "post-copy", "ptrace", "journals", "journal-sync", "memory"]
    {
        let finding = found(&ended, check);
        assert!(!finding["object"].as_str().unwrap().is_empty(), "{finding}");
    }
    for check in ["userfaultfd", "post-copy"] {
        assert_eq!(found(&ended, check)["level"], "ok");
    }
    let status = if ended.last()["ok"] == true { 0 } else { 17 };
    assert_eq!(ended.code, Some(status), "{ended:?}");
    let left = std::fs::read_dir(host.runtime.join("journal")).unwrap().count();
    assert_eq!(left, 0, "its journals' directory is as it was");
    // For people: a table with each remedy.
    let shown = Command::new(env!("CARGO_BIN_EXE_vmferry"))
        .args(["doctor", "--memory", "512G", "--memory-kind", "hugetlb"])
        .env("VMFERRY_RUNTIME_DIR", &host.runtime)
        .env_remove("VMFERRY_STATE_DIR")
        .output()
        .unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    // Other tests may have reserved some at this moment.
    for words in ["ERROR", "262144 huge pages of 2 MiB", "-> reserve 262", "1 error, "] {
        assert!(shown.contains(words), "{shown}");
    }
}

#[test]
fn doctor_reports_missing_huge_pages_and_memory() {
    let world = World::without_certificates();
    let host = host_on_disk(&world);
    let huge = doctor(&host, &["--memory", "512G", "--memory-kind", "hugetlb"]);
    is_bad(&huge, "huge-pages", "error", "262144 huge pages of 2 MiB are needed");
    is_bad(&doctor(&host, &["--memory", "512T"]), "room", "error", "the guest has 512.0 TiB");
    let little = doctor(&host, &["--memory", "1M"]);
    assert_eq!(found(&little, "room")["level"], "ok");
}

#[test]
fn doctor_reports_journals_in_memory_on_a_full_disk_or_open_to_others() {
    let world = World::without_certificates();
    let host = world.host("a");
    std::fs::create_dir(&host.runtime).unwrap();
    let script = "mount -t tmpfs -o mode=0700,size=64k none \"$1\" && mkdir -m 700 \"$1/journal\" \
         && shift && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(&host.runtime);
    command.args([env!("CARGO_BIN_EXE_vmferry"), "--json", "doctor"]);
    command.env("VMFERRY_RUNTIME_DIR", &host.runtime).env_remove("VMFERRY_STATE_DIR");
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let ended = Host::spawn(command).finish();
    is_bad(&ended, "journals", "warning", "in memory (tmpfs)");
    is_bad(&ended, "journal-space", "error", "left");

    std::fs::set_permissions(&host.runtime, PermissionsExt::from_mode(0o755)).unwrap();
    is_bad(&doctor(&host, &[]), "journals", "error", "has mode 0755");
}

#[test]
fn doctor_reports_missing_access_to_kvm() {
    let world = World::without_certificates();
    std::fs::set_permissions(world.directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let host = world.host("a");
    std::fs::DirBuilder::new().mode(0o700).create(&host.runtime).unwrap();
    std::os::unix::fs::chown(&host.runtime, Some(STRANGER), Some(STRANGER)).unwrap();
    let mut command = host.command(&["doctor"]);
    command.uid(STRANGER).gid(STRANGER);
    let ended = Host::spawn(command).finish();
    is_bad(&ended, "kvm", "warning", "/dev/kvm");
}

#[test]
fn doctor_reports_certificates_by_dates_and_names() {
    let world = World::new();
    let host = host_on_disk(&world);
    let dated = |name: &str, from_days: i64, until_days: i64| {
        let out = world.path(name);
        let mut request = IssueRequest::new(name, Validity { from_days, until_days });
        request.addresses.push("127.0.0.1".into());
        issue(&world.path("ca"), &out, &request).unwrap();
        doctor(&host, &["--tls", text(&out)])
    };
    let good = doctor(&host, &["--tls", &world.tls()]);
    assert_eq!(found(&good, "certificates")["level"], "ok", "{good:?}");
    // The host's own certificate is listed before its authority's, which is valid.
    let first = |ended: &Ended, (level, status): (&str, i32), words: &str| {
        let findings = ended.last()["findings"].as_array().unwrap();
        let found = findings.iter().find(|one| one["check"] == "certificates").unwrap();
        assert_eq!((&found["level"], ended.code), (&level.into(), Some(status)), "{found}");
        assert!(found["why"].as_str().unwrap().contains(words), "{found}");
    };
    first(&dated("soon", -1, 9), ("warning", 17), "expires soon");
    first(&dated("over", -9, -1), ("error", 18), "has expired");
    first(&dated("later", 1, 9), ("error", 18), "is not valid before");
    let missing = doctor(&host, &["--tls", text(&world.path("nowhere"))]);
    first(&missing, ("error", 18), "ca.pem");
}

#[test]
fn doctor_reports_the_line_of_a_policy_mistake() {
    let world = World::without_certificates();
    let host = host_on_disk(&world);
    let policy = world.path("policy.toml");
    std::fs::write(&policy, "[[allow]]\nsauce = \"x\"\n").unwrap();
    is_bad(&doctor(&host, &["--policy", text(&policy)]), "policy", "error", "line");
    std::fs::write(&policy, "[[allow]]\nsource = \"x\"\nguests = [\"*\"]\n").unwrap();
    assert_eq!(found(&doctor(&host, &["--policy", text(&policy)]), "policy")["level"], "ok");
}

/// A receiver at 127.0.0.1 over TLS.
fn receiver(world: &World, more: &[&str]) -> (Running, String) {
    let tls = world.tls();
    world.host("b").receive(&[&["--listen", "127.0.0.1:0", "--tls", &tls], more].concat())
}

#[test]
fn probed_receiver_answers_and_continues_listening() {
    let world = World::new();
    let host = host_on_disk(&world);
    let (mut running, address) = receiver(&world, &["--once"]);
    let tls = world.tls();
    let _guest = host.guest("web", &["--memory", "64M", "--workload", "hot=4,random"]);
    let ask = ["web", "--to", &address, "--tls", &tls];
    for way in [&[][..], &["--no-load"]] {
        let ended = doctor(&host, &[&ask[..], way].concat());
        for check in ["guest", "admission", "processor", "room", "clock", "round-trip"] {
            assert_eq!(found(&ended, check)["level"], "ok", "{ended:?}");
        }
        let other = &ended.last()["other"];
        assert_eq!(other["name"], "spiffe://vmferry/host/test-host", "{other}");
        assert_eq!(other["host"]["kernel"], ended.last()["host"]["kernel"], "{other}");
        assert_eq!(other["bytes_per_s"].is_null(), !way.is_empty(), "{other}");
    }
    // The session of `--once` is still to come.
    host.run(&["send", "web", "--to", &address, "--tls", &tls]).exited(0);
    running.event("serving");
    // It still answers while it has a guest.
    let ended = doctor(&host, &["--to", &address, "--tls", &tls, "--no-load"]);
    assert_eq!(found(&ended, "admission")["level"], "ok", "{ended:?}");
    world.host("b").check_guest("web");
}

#[test]
fn probed_receiver_without_a_policy_rule_reveals_nothing_else() {
    let world = World::new();
    let host = host_on_disk(&world);
    let policy = world.path("policy.toml");
    let rule = |source: &str, guest: &str| {
        format!("[[allow]]\nsource = \"{source}\"\nguests = [\"{guest}\"]\n")
    };
    std::fs::write(&policy, rule("spiffe://vmferry/host/other", "*")).unwrap();
    let (mut running, address) = receiver(&world, &["--policy", text(&policy)]);
    let tls = world.tls();
    let _guest =
        host.guest("web", &["--guest", "process", "--memory", "64M", "--workload", "idle"]);
    let ask = || doctor(&host, &["web", "--to", &address, "--tls", &tls]);
    let ended = ask();
    is_bad(&ended, "admission", "error", "may not send guests here");
    assert!(ended.last()["other"]["link"].is_null(), "{ended:?}");
    assert!(ended.last()["other"]["host"]["kernel"].is_null(), "{ended:?}");
    let said = running.event("turned-away");
    assert!(said["reason"].as_str().unwrap().contains("may not send guests here"), "{said}");
    // A rule for other guests admits the host and not this guest.
    std::fs::write(&policy, rule("spiffe://vmferry/host/*", "db-*")).unwrap();
    let ended = ask();
    is_bad(&ended, "admission", "error", "the policy allows it other guests only");
    assert!(ended.last()["other"]["link"].is_object(), "{ended:?}");
    std::fs::write(&policy, rule("spiffe://vmferry/host/*", "web")).unwrap();
    assert_eq!(found(&ask(), "admission")["level"], "ok");
}

#[test]
fn doctor_reports_a_closed_port_and_an_untrusted_host() {
    let world = World::new();
    let host = host_on_disk(&world);
    let tls = world.tls();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = listener.local_addr().unwrap().to_string();
    drop(listener);
    let ended = doctor(&host, &["--to", &closed, "--tls", &tls]);
    is_bad(&ended, "other-host", "error", "refused");
    // A client of another authority.
    world.authority("other-ca");
    let other = world.certificate("other-ca", "other");
    let (_running, address) = receiver(&world, &[]);
    let ended = doctor(&host, &["--to", &address, "--tls", text(&other)]);
    is_bad(&ended, "other-host", "error", "authority");
}

fn identity(world: &World) -> Arc<TlsIdentity> {
    let at = Path::new(&world.tls()).to_owned();
    let files = ["ca.pem", "host.pem", "host.key"].map(|name| at.join(name));
    Arc::new(TlsIdentity::load(&files[0], &files[1], &files[2]).unwrap())
}

/// A channel of an accepted probe.
fn let_in(world: &World, address: &str) -> Channel {
    let dialer = Dialer::new(address.parse().unwrap(), Some(identity(world)));
    dialer.connect().unwrap()
}

/// The bytes that a receiver sends to a peer with this greeting and these messages until it closes
/// the connection.
fn said_to(world: &World, address: &str, messages: &[ProbeMessage]) -> Vec<u8> {
    let (mut reader, mut writer) = let_in(world, address).split();
    reader.set_timeout(Some(Duration::from_secs(60))).unwrap();
    writer.write_all(&probing()).unwrap();
    let mut bytes = Vec::new();
    messages.iter().for_each(|message| message.encode(&mut bytes));
    // The receiver may close the connection before the last message.
    let _ = writer.write_all(&bytes);
    let mut said = Vec::new();
    let _ = reader.read_to_end(&mut said);
    said
}

/// The greeting of a probe.
fn probing() -> [u8; HELLO_BYTES] {
    let (lane, token, attempt) = (0, Token([0; 16]), 0);
    Hello { version_min: 1, version_max: 2, role: Role::Probe, lane, token, attempt }.encode()
}

#[test]
fn probed_receiver_ends_hostile_probes_and_answers_the_next_one() {
    let world = World::new();
    let host = host_on_disk(&world);
    let (mut running, address) = receiver(&world, &[]);
    let tls = world.tls();
    let ask = ProbeMessage::Ask { guest: None };
    let echo = ProbeMessage::Echo { nonce: 1 };
    assert_eq!(said_to(&world, &address, std::slice::from_ref(&echo)).len(), HELLO_REPLY_BYTES);
    let said = running.event("turned-away");
    assert!(said["reason"].as_str().unwrap().contains("a probe begins with ASK"), "{said}");
    // The receiver closes each connection: otherwise `said_to` would not return.
    let many = [&[ask.clone()][..], &vec![echo; 1000]].concat();
    let answered = said_to(&world, &address, &many);
    let one = said_to(&world, &address, &[ask.clone(), ask.clone()]);
    assert!(answered.len() > one.len() && answered.len() < one.len() + 65 * 40, "64 echoes");
    let lying = ProbeMessage::Echoed { nonce: 1, clock_us: 1 };
    said_to(&world, &address, &[ask.clone(), lying]);
    said_to(&world, &address, &[ask.clone(), ProbeMessage::Load { filler: vec![] }]);
    said_to(&world, &address, &[ask.clone(), ProbeMessage::Load { filler: vec![0; 70_000] }]);

    // A machine that is no machine, and one of a guest that was not named.
    let guest = Some(GuestIdentity { uuid: uuid::Uuid::from_u128(1), name: "web".into() });
    let compare = ProbeMessage::Compare {
        vmm: "microvm/process".into(),
        config: b"[".to_vec(),
        layout: Vec::new(),
    };
    let answers = |asked: &[ProbeMessage]| {
        String::from_utf8_lossy(&said_to(&world, &address, asked)).into_owned()
    };
    let named = answers(&[ProbeMessage::Ask { guest }, compare.clone(), ask.clone()]);
    assert!(named.contains("its configuration"), "{named}");
    let nameless = answers(&[ask.clone(), compare.clone(), ask.clone()]);
    assert!(nameless.contains("no guest that may come here was named"), "{nameless}");

    // One probe at a time.
    let (mut reader, mut writer) = let_in(&world, &address).split();
    writer.write_all(&probing()).unwrap();
    reader.read_exact(&mut [0; HELLO_REPLY_BYTES]).unwrap();
    let to = ["--to", &address, "--tls", &tls, "--no-load"];
    is_bad(&doctor(&host, &to), "other-host", "warning", "answering another probe");
    drop((reader, writer));
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    // The end of the first probe is noticed when the next probe is accepted.
    while found(&doctor(&host, &to), "other-host")["level"] != "ok" {
        assert!(std::time::Instant::now() < deadline, "the next probe is never accepted");
    }
}

#[test]
fn doctor_learns_nothing_else_from_an_older_release() {
    let world = World::new();
    let host = host_on_disk(&world);
    let at = "tls:127.0.0.1:0".parse().unwrap();
    let listener = Listener::bind(&at, Some(identity(&world))).unwrap();
    let address = listener.local_address().to_string();
    // The answer of a release without probes to an unknown role.
    let answering = std::thread::spawn(move || {
        let pending = listener.accept().unwrap().unwrap();
        let (mut reader, mut writer) = pending.handshake(Duration::from_secs(60)).unwrap().split();
        let mut hello = [0; HELLO_BYTES];
        reader.read_exact(&mut hello).unwrap();
        let hello = Hello::parse(&hello).unwrap();
        let reply = HelloReply {
            status: HelloStatus::Refused,
            version_min: 1,
            version_max: 2,
            version: 2,
            placed: 0,
        };
        writer.write_all(&reply.encode()).unwrap();
        writer.finish().unwrap();
        let _ = reader.read(&mut [0; 1]);
        hello
    });
    let ended = doctor(&host, &["--to", &address, "--tls", &world.tls()]);
    is_bad(&ended, "other-host", "warning", "answers no probes");
    let hello = answering.join().unwrap();
    assert_eq!((hello.role, hello.token.0), (Role::Probe, [0; 16]));
}

#[test]
fn doctor_reports_a_clock_that_is_hours_ahead() {
    let world = World::new();
    let host = host_on_disk(&world);
    let clock = crate::support::clock::Clock::make(world.directory.path(), "offset");
    // By its own clock, its certificate is valid too.
    clock.set(2 * 3600);
    let tls = world.tls();
    let listen = ["receive", "--listen", "127.0.0.1:0", "--tls", &tls];
    let mut running = world.host("b").start_under(&clock.prefix, &listen);
    let address = running.event("listening")["address"].as_str().unwrap().to_owned();
    let ended = doctor(&host, &["--to", &address, "--tls", &tls, "--no-load"]);
    is_bad(&ended, "clock", "error", "s ahead");
    let ms = ended.last()["other"]["link"]["clock_ahead_ms"].as_f64().unwrap();
    assert!((ms - 7_200_000.0).abs() < 60_000.0, "{ms}");
}

#[test]
fn doctor_measures_the_throughput_of_the_link() {
    let network = Namespaces::make().unwrap();
    let world = World::new();
    let (host, tls) = (host_on_disk(&world), world.tls());
    // 80 Mbit/s are 10 MB/s.
    let [nsenter, net] = inside(&network.source_path());
    let mut tc = Command::new(nsenter);
    tc.args([&net, "tc"]);
    let limit = "qdisc add dev source root tbf rate 80mbit burst 64kb latency 50ms";
    assert!(tc.args(limit.split(' ')).status().unwrap().success(), "tc {limit}");
    let listen = format!("{DESTINATION_ADDRESS}:0");
    let receive = ["receive", "--listen", &listen, "--tls", &tls];
    let mut running = world.host("b").start_under(&inside(&network.destination_path()), &receive);
    let address = running.event("listening")["address"].as_str().unwrap().to_owned();
    let ask = ["doctor", "--to", &address, "--tls", &tls, "--server-name", "127.0.0.1"];
    let ended = host.start_under(&inside(&network.source_path()), &ask).finish();
    assert_eq!(found(&ended, "throughput")["level"], "ok", "{ended:?}");
    let rate = ended.last()["other"]["bytes_per_s"].as_f64().unwrap();
    assert!((0.5e6..20e6).contains(&rate), "{rate} bytes/s over a link of 10 MB/s");
}
