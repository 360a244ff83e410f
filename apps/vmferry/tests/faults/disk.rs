//! The disk under a journal is full, read-only or removed, on either side, at every record. No
//! promise is made that was not written, and the error names the write that failed.
//!
//! The disk is a small tmpfs that the test fills at the chosen moment, so the tests need root.

use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::support::leftovers::{Descriptors, Living, descriptors_at_rest, left};
use crate::support::outcomes::{Outcome, Owner};
use crate::support::trial::{GUEST, SLOW, claim, of_a_destination};
use crate::support::{Ended, Host, Running, World, run_ok, text};
use serde_json::Value;
use vmferry_handover::journal::Record;

/// The unit in which tmpfs allocates. A record that fits into an allocated block can be written to
/// a full disk.
const BLOCK_BYTES: u64 = 4096;

/// A host's disk, unmounted on drop, and the unnamed file that fills it.
struct Disk(PathBuf, Cell<Option<File>>);

impl Disk {
    /// Mounts a 256 KiB disk at the host's runtime directory. `None` if this process may not mount.
    fn under(host: &Host) -> Option<Self> {
        std::fs::create_dir(&host.runtime).unwrap();
        let disk = Self(host.runtime.clone(), Cell::new(None));
        disk.mount(&["-t", "tmpfs", "-o", "size=256k,mode=0700", "none"]).then_some(disk)
    }

    fn mount(&self, arguments: &[&str]) -> bool {
        let mounted = Command::new("mount").args(arguments).arg(&self.0).output();
        mounted.is_ok_and(|output| output.status.success())
    }

    fn fill(&self) {
        let mut file = tempfile::tempfile_in(&self.0).unwrap();
        let block = [0xff; BLOCK_BYTES as usize];
        while file.write_all(&block).is_ok() {}
        self.1.set(Some(file));
    }

    fn free(&self) {
        self.1.set(None);
    }

    /// Makes the disk read-only or writable again. No file may be open for writing.
    fn set_writable(&self, writable: bool) {
        let how = if writable { "remount,rw" } else { "remount,ro" };
        assert!(self.mount(&["-o", how]), "{how}");
    }

    /// The journals on the disk.
    fn journals(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.0.join("journal")).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).output();
    }
}

/// Two hosts with small disks, and a guest.
struct Scene {
    world: World,
    a: Host,
    b: Host,
    here: Disk,
    there: Disk,
    guest: Running,
    /// The descriptors that the guest's VMM had open before the migration.
    before: Descriptors,
}

impl Scene {
    fn new() -> Option<Self> {
        let world = World::new();
        let (a, b) = (world.host("a"), world.host("b"));
        let (Some(here), Some(there)) = (Disk::under(&a), Disk::under(&b)) else {
            panic!("this test needs root: it mounts a small tmpfs");
        };
        let guest = a.guest("web", &GUEST);
        let before = descriptors_at_rest(guest.child.id());
        Some(Self { world, a, b, here, there, guest, before })
    }

    /// Certificates whose names fill the first record of a journal so that `left` bytes remain in
    /// its block. Each record contains the names of the other side.
    fn certificate(&self, left: u64) -> String {
        let issue = |name: &str, padding: u64| {
            let (from, out) = (self.world.path("ca"), self.world.path(name));
            let mut arguments =
                vec!["pki", "issue", "test-host", "--dir", text(&from), "--out", text(&out)];
            arguments.extend(["--address", "127.0.0.1"]);
            let names = names(padding);
            names.iter().for_each(|name| arguments.extend(["--address", name]));
            run_ok(&self.a, &arguments);
            out.display().to_string()
        };
        self.remove_journals();
        // Measures a record with known padding to compute the padding that is missing.
        let known = 300;
        let bytes = self.first_record_bytes(&issue(&format!("trial-{left}"), known));
        let padding = known + (BLOCK_BYTES - left).checked_sub(bytes).expect("a short record");
        let tls = issue(&format!("filling-{left}"), padding);
        assert_eq!(self.first_record_bytes(&tls), BLOCK_BYTES - left);
        tls
    }

    /// Measures with a migration that is canceled, after which the journals are removed.
    fn first_record_bytes(&self, tls: &str) -> u64 {
        let (destination, address) = self.receive(tls);
        let mut send = self.send(&address, tls);
        send.event("connected");
        let lengths: Vec<u64> = [&self.here, &self.there]
            .iter()
            .flat_map(|disk| disk.journals())
            .map(|journal| std::fs::metadata(journal).unwrap().len())
            .collect();
        run_ok(&self.a, &["cancel", "web"]);
        send.finish();
        destination.finish();
        self.remove_journals();
        // The source's record has the address it was given, and the destination's has the address
        // it sees.
        let [here, there] = lengths[..] else { panic!("{lengths:?}") };
        assert!(there <= here && here - there < 8, "both records have the same names: {lengths:?}");
        here
    }

    fn remove_journals(&self) {
        for journal in self.here.journals().into_iter().chain(self.there.journals()) {
            std::fs::remove_file(journal).unwrap();
        }
    }

    fn receive(&self, tls: &str) -> (Running, String) {
        self.b.receive(&["--listen", "127.0.0.1:0", "--tls", tls, "--once"])
    }

    fn send(&self, address: &str, tls: &str) -> Running {
        let mut arguments = vec!["send", "web", "--to", address, "--tls", tls];
        arguments.extend(["--reconnect-timeout", "1s"]);
        arguments.extend(SLOW);
        self.a.start(&arguments)
    }

    /// Checks that the guest is still at the source and that nothing is left over.
    fn stays(&self, fault: &str, phase: &str, sent: &Ended, received: &str) {
        self.a.check_guest("web");
        let (host, pid, descriptors) = (&self.a, self.guest.child.id(), self.before.clone());
        let living = Living { host, pid, descriptors };
        self.note(living, fault, phase, (sent, received), Owner::Source);
    }

    fn note(
        &self,
        living: Living<'_>,
        fault: &str,
        phase: &str,
        (sent, received): (&Ended, &str),
        owner: Owner,
    ) {
        let (here, there) = (claim(&self.a), claim(&self.b));
        assert!(!(here.runs && there.runs), "TWO OWNERS: {here:?}, {there:?}");
        assert_eq!((here.runs, there.runs), (owner == Owner::Source, owner == Owner::Destination));
        let left = left(self.world.directory.path(), &[&self.a, &self.b], &[living], &[]);
        assert!(left.is_empty(), "{fault}, {phase}: {left:#?}");
        let source = sent.in_words();
        let destination = received.to_owned();
        Outcome { guest: "microvm", fault, phase, source, destination, owner }.note();
    }
}

/// Names that take `bytes` bytes in a record. Each takes its letters, quotes and a comma.
fn names(bytes: u64) -> Vec<String> {
    const AROUND: u64 = 3;
    const LONGEST: u64 = 60 + AROUND;
    let mut names = Vec::new();
    let mut missing = bytes;
    while missing > 0 {
        // The remainder must be long enough for a name.
        let this = match missing {
            many if many > LONGEST + AROUND => LONGEST,
            some if some > LONGEST => some / 2,
            few => few,
        };
        names.push("a".repeat((this - AROUND) as usize));
        missing -= this;
    }
    names
}

/// Too little for any record.
const NOTHING: u64 = 12;

/// Time in which a source in doubt asks several times. It asks over TLS, so this test cannot count
/// the questions; `resolve.rs` does.
const ASKED: Duration = Duration::from_secs(4);

#[test]
fn full_disk_at_the_source_breaks_no_promise() {
    let Some(mut scene) = Scene::new() else { return };
    let tls = scene.certificate(NOTHING);

    // OPEN: no migration begins, and nothing is left over.
    scene.here.fill();
    let (destination, address) = scene.receive(&tls);
    let sent = scene.send(&address, &tls).finish();
    sent.failed(1, "writable and not full");
    let received = destination.finish();
    assert_ne!(received.code, Some(0));
    assert!(scene.here.journals().is_empty(), "{:?}", scene.here.journals());
    scene.stays("source: disk full", "OPEN", &sent, &received.in_words());
    scene.here.free();

    // COMMIT: it was never sent.
    let (destination, address) = scene.receive(&tls);
    let mut send = scene.send(&address, &tls);
    send.event("connected");
    scene.here.fill();
    let sent = send.finish();
    sent.failed(1, "writable and not full");
    assert!(!sent.lines.iter().any(|event| event["event"] == "committed"), "{sent:?}");
    let received = destination.finish();
    assert_ne!(received.code, Some(0));
    scene.stays("source: disk full", "COMMIT", &sent, &received.in_words());
    assert_eq!(claim(&scene.a).verdict.as_deref(), Some("here"));

    // KEPT informs operators only: the guest runs here without it.
    scene.here.free();
    let (destination, address) = scene.receive(&tls);
    let mut send = scene.send(&address, &tls);
    send.event("connected");
    scene.here.fill();
    run_ok(&scene.a, &["cancel", "web"]);
    let sent = send.finish().exited(11);
    let received = destination.finish();
    scene.stays("source: disk full", "KEPT", &sent, &received.in_words());
    scene.here.free();

    // GIVEN informs operators too. But COMMIT without GIVEN reads as doubt until the other host's
    // answer is noted.
    let commit = Record::Commit.encode().len() as u64;
    let tls = scene.certificate(commit + NOTHING);
    let (mut destination, address) = scene.receive(&tls);
    // A sandboxed process keeps the directories open that it may reach, such as the certificate's.
    let listening = descriptors_at_rest(destination.child.id());
    let mut send = scene.send(&address, &tls);
    send.event("connected");
    scene.here.fill();
    destination.event("serving");
    let sent = send.finish().exited(0);
    scene.guest.finish_by_ref().exited(0);
    scene.b.check_guest("web");
    let pid = destination.child.id();
    let mut descriptors = of_a_destination();
    for (kind, count) in listening {
        descriptors.entry(kind).or_insert(count);
    }
    let living = Living { host: &scene.b, pid, descriptors };
    let ends = (&sent, "runs the guest");
    scene.note(living, "source: disk full", "GIVEN", ends, Owner::Destination);
    let status = run_ok(&scene.a, &["status"]);
    assert_eq!(status["in_doubt"][0]["guest"], "web", "{status}");
    assert_eq!(claim(&scene.b).verdict.as_deref(), Some("here"));
    scene.here.free();
    run_ok(&scene.a, &["resolve", "web", "--destination-owns", "--yes"]);
    assert_eq!(run_ok(&scene.a, &["status"])["in_doubt"], Value::Array(vec![]));
}

#[test]
fn full_disk_at_the_destination_breaks_no_promise() {
    let Some(scene) = Scene::new() else { return };
    let tls = scene.certificate(NOTHING);

    // OPEN
    scene.there.fill();
    let (destination, address) = scene.receive(&tls);
    let sent = scene.send(&address, &tls).finish();
    assert_ne!(sent.code, Some(0), "{sent:?}");
    let received = destination.finish();
    received.failed(1, "writable and not full");
    assert!(scene.there.journals().is_empty(), "{:?}", scene.there.journals());
    scene.stays("destination: disk full", "OPEN", &sent, &received.in_words());
    scene.there.free();

    // ABORTED: no answer is given, and the next process gives it.
    let (destination, address) = scene.receive(&tls);
    let mut send = scene.send(&address, &tls);
    send.event("connected");
    scene.there.fill();
    run_ok(&scene.a, &["cancel", "web"]);
    let sent = send.finish().exited(11);
    let received = destination.finish();
    received.failed(1, "writable and not full");
    scene.stays("destination: disk full", "ABORTED", &sent, &received.in_words());
    assert_eq!(claim(&scene.b).verdict.as_deref(), Some("there"), "the guest never ran there");
    scene.there.free();

    // RUN-INTENT: the guest does not run, and the source waits for an answer.
    let (destination, address) = scene.receive(&tls);
    let mut send = scene.send(&address, &tls);
    send.event("connected");
    scene.there.fill();
    let received = destination.finish();
    received.failed(1, "writable and not full");
    assert!(!received.lines.iter().any(|event| event["event"] == "running"), "{received:?}");
    send.event("in-doubt");
    assert_eq!(scene.a.status("web")["phase"], "paused");
    scene.there.free();
    let (mut successor, _) = scene.b.receive(&["--listen", &address, "--tls", &tls]);
    let sent = send.finish();
    sent.failed(1, "ABORTED");
    successor.kill();
    let received = format!("{}, started again", received.in_words());
    scene.stays("destination: disk full", "RUN-INTENT", &sent, &received);
}

#[test]
fn read_only_or_removed_directory_breaks_no_promise() {
    let Some(scene) = Scene::new() else { return };
    let tls = scene.world.tls();

    scene.here.set_writable(false);
    let (destination, address) = scene.receive(&tls);
    let sent = scene.send(&address, &tls).finish();
    sent.failed(1, "writable and not full");
    let received = destination.finish();
    scene.here.set_writable(true);
    scene.stays("source: disk read-only", "OPEN", &sent, &received.in_words());

    scene.there.set_writable(false);
    let (destination, address) = scene.receive(&tls);
    let sent = scene.send(&address, &tls).finish();
    assert_ne!(sent.code, Some(0), "{sent:?}");
    let received = destination.finish();
    received.failed(1, "writable and not full");
    scene.there.set_writable(true);
    scene.stays("destination: disk read-only", "OPEN", &sent, &received.in_words());

    // COMMIT in an unlinked file is no promise.
    let (destination, address) = scene.receive(&tls);
    let mut send = scene.send(&address, &tls);
    send.event("connected");
    std::fs::remove_dir_all(scene.a.runtime.join("journal")).unwrap();
    let sent = send.finish();
    sent.failed(1, "was removed or replaced");
    let received = destination.finish();
    scene.stays("source: journals removed", "COMMIT", &sent, &received.in_words());

    // The same holds for RUN-INTENT. A host that has lost its journals does not know the session.
    let (destination, address) = scene.receive(&tls);
    let mut send = scene.send(&address, &tls);
    send.event("connected");
    std::fs::remove_dir_all(scene.b.runtime.join("journal")).unwrap();
    let received = destination.finish();
    received.failed(1, "was removed or replaced");
    assert!(!received.lines.iter().any(|event| event["event"] == "running"), "{received:?}");
    send.event("in-doubt");
    let (mut successor, _) = scene.b.receive(&["--listen", &address, "--tls", &tls]);
    // The source asks once a second, and UNKNOWN does not end the doubt.
    std::thread::sleep(ASKED);
    assert_eq!(scene.a.status("web")["migration"]["in_doubt"], true);
    successor.kill();
    run_ok(&scene.a, &["resolve", "web", "--source-resumes", "--yes"]);
    let sent = send.finish();
    assert_ne!(sent.code, Some(0), "{sent:?}");
    let received = format!("{}, the operator decides", received.in_words());
    scene.stays("destination: journals removed", "RUN-INTENT", &sent, &received);
}
