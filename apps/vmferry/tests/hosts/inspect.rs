//! Real migrations, recorded at both sides and inspected; and what `inspect` reports about damage.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::proxy::Proxy;
use crate::support::{World, text};
use serde_json::Value;

/// A guest that rewrites 32 MiB as fast as it can.
const HOT: &str = "fill=16,text hot=32,random ticks";

/// A side's recordings, and the events of its command about them.
struct Side {
    directory: PathBuf,
    events: Vec<Value>,
}

/// Sends a guest whose pages change, recorded at both sides.
fn recorded(world: &World, address: &str, flags: &[&str], limit: &str) -> [Side; 2] {
    let tls = world.tls();
    let (a, b) = (world.host("a"), world.host("b"));
    let arguments =
        ["--guest", "process", "--memory", "64M", "--workload", "fill=8,text hot=4,random ticks"];
    let vmm = a.guest("web", &arguments);
    let [here, there] = [world.path("source-record"), world.path("destination-record")];
    let record = |directory: &Path| {
        ["--record", text(directory), "--record-limit", limit].map(str::to_owned)
    };
    let (records_here, records_there) = (record(&here), record(&there));
    let mut receive = vec!["--listen", address, "--tls", &tls, "--once"];
    receive.extend(records_there.iter().map(String::as_str));
    let (mut next, to) = b.receive(&receive);
    let mut send = vec!["send", "web", "--to", &to, "--tls", &tls, "--verify"];
    send.extend(["--downtime-limit", "1ms", "--when-stuck", "switch-over", "--max-rounds", "4"]);
    send.extend(records_here.iter().map(String::as_str));
    send.extend(flags);
    let sent = a.run(&send).exited(0);
    assert_eq!(sent.last()["verify_match"], true, "{sent:?}");
    vmm.finish().exited(0);
    next.event("serving");
    b.run(&["quit", "web"]).exited(0);
    let received = next.finish();
    [(here, sent), (there, received)].map(|(directory, ended)| {
        let events = ended.lines.into_iter().filter(|line| line["event"] == "recording").collect();
        Side { directory, events }
    })
}

/// The recordings of a directory, by name.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// The exit status and the output of `vmferry inspect`.
fn inspect(flags: &[&str], files: &[PathBuf]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry"))
        .arg("inspect")
        .args(flags)
        .args(files)
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn migration_over_tls_is_recorded_completely_at_both_sides() {
    let world = World::new();
    let both = recorded(&world, "tls:127.0.0.1:0", &["--compress", "zstd:3"], "1G");
    for Side { directory, events } in &both {
        assert_eq!(events, &[] as &[Value]);
        // A control channel, two data channels, and the reverse directions.
        let files = files(directory);
        assert!(files.len() >= 6, "{files:?}");
        let (code, told) = inspect(&["--pages"], &files);
        assert_eq!(code, Some(0), "{told}");
        for wanted in ["BEGIN", "ACCEPT", "FINAL", "COMMIT", "RUNNING", "algorithm=zstd", "section"]
        {
            assert!(told.contains(wanted), "{wanted} is not in what {directory:?} holds");
        }
        let whole = told.lines().filter(|line| line.ends_with(" bytes, whole")).count();
        assert_eq!(whole, files.len(), "{told}");
        assert!(!told.contains("unchecked"), "every frame was recorded");
    }
    // Both sides recorded the same bytes of each channel, under different numbers.
    let contents = |directory: &Path| {
        let read = |path: &PathBuf| std::fs::read(path).unwrap().split_off(24);
        let mut contents: Vec<Vec<u8>> = files(directory).iter().map(read).collect();
        contents.sort();
        contents
    };
    assert!(contents(&both[0].directory) == contents(&both[1].directory), "the recordings differ");
    // Journals are recognized by their name.
    for host in ["host-a", "host-b"] {
        let journals = files(&world.path(host).join("journal"));
        let (code, told) = inspect(&[], &journals);
        assert_eq!(code, Some(0), "{told}");
        assert!(told.contains("verdict"), "{told}");
    }
}

#[test]
fn inspect_checks_deltas_over_grpc_and_finds_damage() {
    let world = World::new();
    let [here, there] = recorded(&world, "grpc:127.0.0.1:0", &["--compress", "delta"], "1G");
    for Side { directory, .. } in [&here, &there] {
        let (code, told) = inspect(&[], &files(directory));
        assert_eq!(code, Some(0), "{told}");
        assert!(told.contains(" delta=") && !told.contains("unchecked"), "{told}");
    }
    let files = files(&here.directory);
    let largest = files.iter().max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    let good = std::fs::read(largest).unwrap();
    // The middle of a frame in the middle of the largest file.
    let (code, told) = inspect(&["--json"], std::slice::from_ref(largest));
    assert_eq!(code, Some(0), "{told}");
    let records = told.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let frames: Vec<(usize, usize)> = records
        .filter(|record| record["record"] == "frame")
        .map(|frame| ["offset", "bytes"].map(|name| frame[name].as_u64().unwrap() as usize))
        .map(|[offset, bytes]| (offset, bytes))
        .collect();
    let (offset, bytes) = frames[frames.len() / 2];
    let at = offset + bytes / 2;
    let mut bad = good.clone();
    bad[at] ^= 1;
    std::fs::write(largest, &bad).unwrap();
    let (code, told) = inspect(&["--summary"], &files);
    assert_eq!(code, Some(5), "{told}");
    let broken = told.lines().find(|line| line.contains("broken at byte")).expect(&told);
    assert!(broken.starts_with(text(largest)), "{broken}");
    // The damage is in the frame that contains the byte, and no later frame was read.
    let place: usize =
        broken.split("broken at byte ").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
    assert!((offset..=at).contains(&place), "{at} in the frame at {offset}: {broken}");
    // A recording cut off before the damage is reported as cut off, not as damaged.
    std::fs::write(largest, &bad[..at]).unwrap();
    let (code, told) = inspect(&["--summary"], &files);
    assert_eq!(code, Some(0), "{told}");
    let cut = told.lines().find(|line| line.starts_with(text(largest))).expect(&told);
    assert!(cut.contains(" cut off in record "), "{cut}");
    let end = format!("a frame at byte {offset}: {} of {bytes} bytes are there", bytes / 2);
    assert!(cut.ends_with(&end), "{cut} does not end with: {end}");
}

#[test]
fn recording_ends_at_its_limit_and_the_migration_continues() {
    let world = World::new();
    let socket = format!("unix:{}", text(&world.path("in.sock")));
    for Side { directory, events } in recorded(&world, &socket, &["--compress", "none"], "1M") {
        let [event] = &events[..] else { panic!("the limit is reported once: {events:?}") };
        let message = event["message"].as_str().unwrap();
        assert!(message.contains(text(&directory)), "{message}");
        assert!(message.contains("its limit of 1048576 bytes is reached"), "{message}");
        let bytes: u64 = files(&directory).iter().map(|path| path.metadata().unwrap().len()).sum();
        assert!(bytes <= 1 << 20, "{bytes}");
        let (code, told) = inspect(&[], &files(&directory));
        assert_eq!(code, Some(0), "{told}");
        // The guest was announced while there was room, and handed over when there was none.
        assert!(told.contains(" BEGIN ") && told.contains(" frame "), "{told}");
        assert!(!told.contains(" FINAL ") && !told.contains(" COMMIT "), "{told}");
    }
}

/// All channels break while the guest fetches. The source redials the fetch lanes, on which frames
/// are numbered from 1 again, and asks on another channel.
#[test]
fn post_copy_over_a_broken_link_is_recorded_completely() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let guest = ["--guest", "process", "--memory", "64M", "--workload", HOT];
    let vmm = a.guest("web", &guest);
    let [here, there] = [world.path("source-record"), world.path("destination-record")];
    let listen = ["--listen", "tcp:127.0.0.1:0", "--plain", "--once", "--record", text(&there)];
    let (mut next, address) = b.receive(&listen);
    let proxy = Proxy::holding(&address, "127.0.0.1", None);
    let send = ["send", "web", "--plain", "--to", &proxy.address, "--record", text(&here)];
    let limits = ["--max-bandwidth", "4M", "--post-copy", "now", "--downtime-limit", "5ms"];
    let mut sending = a.start(&[&send[..], &limits].concat());
    sending.event("serving");
    proxy.cut();
    sending.event("link-lost");
    // While the link is lost, the guest can't have all its pages and end at the source.
    a.run(&["set", "web", "--max-bandwidth", "none"]).exited(0);
    proxy.heal();
    sending.event("link-restored");
    sending.finish().exited(0);
    vmm.finish().exited(0);
    next.event("serving");
    b.run(&["quit", "web"]).exited(0);
    next.finish();
    for directory in [here, there] {
        let files = files(&directory);
        let (code, told) = inspect(&["--pages"], &files);
        assert_eq!(code, Some(0), "{told}");
        for wanted in [
            " LACKING ",
            " post_copy=true",
            " section ",
            " request ",
            r#" offer={"first":2,"faults":2,"background":2}"#,
            " word=fetching",
        ] {
            assert!(told.contains(wanted), "{wanted} is not in what {directory:?} holds");
        }
        // The last page may arrive before the question.
        assert!(told.contains(" RUNNING ") || told.contains(" word=owns"), "{directory:?}");
        let redialed = |line: &str| line.contains(" role=data ") && !line.ends_with(" attempt=0");
        assert!(told.lines().any(redialed), "{directory:?}");
        // A lost channel may end within a record.
        let ends = told.lines().filter(|line| line.contains(": recorded channel, ")).count();
        assert_eq!(ends, files.len());
    }
}

/// The files and the text are those of the inspector's own test.
#[test]
fn inspect_output_is_pinned() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inspect/tests/sessions/golden");
    let mut files: Vec<String> = std::fs::read_dir(&golden)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".vmftrace"))
        .collect();
    files.sort();
    for (flags, name) in [(&[][..], "inspect.txt"), (&["--pages"][..], "inspect-pages.txt")] {
        let output = Command::new(env!("CARGO_BIN_EXE_vmferry"))
            .arg("inspect")
            .args(flags)
            .args(&files)
            .current_dir(&golden)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let expected = std::fs::read_to_string(golden.join(name)).unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected, "{name}");
    }
}

#[test]
fn inspect_stops_without_error_when_its_output_closes() {
    let world = World::new();
    let journal = world.path("x.source.journal");
    let record = vmferry_handover::journal::Record::Commit.encode();
    std::fs::write(&journal, record.repeat(200_000)).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_vmferry"))
        .args(["inspect", text(&journal)])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 100];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((child.wait().unwrap().code(), said.as_str()), (Some(0), ""));
    // A file that is no recording ends the command with 5.
    let other = world.path("other");
    std::fs::write(&other, b"GIF89a").unwrap();
    let (code, told) = inspect(&[], &[other]);
    assert_eq!(code, Some(5));
    assert!(told.contains("broken at byte 0"), "{told}");
}
