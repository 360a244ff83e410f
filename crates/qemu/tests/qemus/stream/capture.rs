//! A migration from QEMU to QEMU whose streams pass through the test, as they pass through vmferry.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmferry::vmm::streamed::{LONGEST_RECORD, Marks, PageMark, Recogniser};
use vmferry_qemu::{Blocks, MainStream, MultifdChannel, Qmp};
use vmferry_qemu_lab::{Qemu, World};

const PATIENCE: Duration = Duration::from_secs(180);

/// A recorded migration.
pub struct Capture {
    /// The main stream, followed by the multifd channels.
    pub streams: Vec<Recorded>,
    /// QEMU's own figures.
    pub normal: u64,
    pub duplicate: u64,
    /// The number of passes over memory.
    pub passes: u64,
    /// The blocks and their lengths in pages.
    pub layout: Vec<(String, u64)>,
}

/// A stream, and what was found in it while it arrived, in the pieces in which it arrived.
pub struct Recorded {
    pub bytes: Vec<u8>,
    /// With positions from the beginning of the stream.
    pub marks: Marks,
}

/// How a guest is moved.
#[derive(Clone, Copy, Default)]
pub struct Way {
    /// Number of multifd channels; 0 for none.
    pub channels: u8,
    /// The minimum number of passes over memory.
    pub passes: u64,
    /// Further capabilities, and a parameter with its value.
    pub capabilities: &'static [&'static str],
    pub parameter: Option<(&'static str, &'static str)>,
}

/// Moves a guest to a QEMU that does not run it.
pub fn migrate(world: &World, from: &Qemu, to: &Qemu, way: Way) -> Capture {
    let Way { channels, passes, .. } = way;
    let (mut source, mut destination) =
        (Qmp::connect(&from.qmp).unwrap(), Qmp::connect(&to.qmp).unwrap());
    let (out_path, in_path) = (world.path("out"), world.path("in"));
    let layout = layout(&mut source);
    let blocks = Arc::new(Blocks::new(layout.iter().map(|(name, pages)| (name, *pages))));
    for qmp in [&mut source, &mut destination] {
        let capability = |name: &str, on: bool| json!({ "capability": name, "state": on });
        let mut capabilities =
            vec![capability("events", true), capability("multifd", channels > 0)];
        capabilities.extend(way.capabilities.iter().map(|name| capability(name, true)));
        qmp.execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).unwrap();
        if channels > 0 {
            let count = json!({ "multifd-channels": channels });
            qmp.execute("migrate-set-parameters", count).unwrap();
        }
        if let Some((name, value)) = way.parameter {
            qmp.execute("migrate-set-parameters", json!({ name: value })).unwrap();
        }
    }
    // The migration continues as long as the guest writes faster than this limit. (With a limit of
    // 0, QEMU ends after the first pass, without checking what was written meanwhile.)
    let settings = json!({ "downtime-limit": 1, "max-bandwidth": 32 << 20 });
    source.execute("migrate-set-parameters", settings).unwrap();
    let uri = |path: &Path| json!({ "uri": format!("unix:{}", path.display()) });
    destination.execute("migrate-incoming", uri(&in_path)).unwrap();
    let listener = UnixListener::bind(&out_path).unwrap();
    source.execute("migrate", uri(&out_path)).unwrap();
    let relays: Vec<JoinHandle<Recorded>> = (0..=channels)
        .map(|number| {
            let (outgoing, _) = listener.accept().unwrap();
            let incoming = UnixStream::connect(&in_path).unwrap();
            let blocks = Arc::clone(&blocks);
            std::thread::spawn(move || match number {
                0 => relay(outgoing, incoming, &mut MainStream::new(blocks)),
                _ => relay(outgoing, incoming, &mut MultifdChannel::new(blocks)),
            })
        })
        .collect();
    wait(&mut source, |said| {
        said["ram"]["dirty-sync-count"].as_u64() >= Some(passes) || said["status"] == "completed"
    });
    let settings = json!({ "downtime-limit": 1_000_000, "max-bandwidth": 8_u64 << 30 });
    source.execute("migrate-set-parameters", settings).unwrap();
    let said = wait(&mut source, |said| said["status"] == "completed");
    wait(&mut destination, |said| said["status"] == "completed");
    let count = |name: &str| said["ram"][name].as_u64().unwrap();
    Capture {
        normal: count("normal"),
        duplicate: count("duplicate"),
        passes: count("dirty-sync-count"),
        streams: relays.into_iter().map(|relay| relay.join().unwrap()).collect(),
        layout,
    }
}

fn wait(qmp: &mut Qmp, wanted: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let said = qmp.execute("query-migrate", json!({})).unwrap();
        if wanted(&said) {
            return said;
        }
        assert!(said["status"] != "failed" && Instant::now() < deadline, "{said}");
        // QEMU 7.2 sends no event for passes, nor for these figures.
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// QEMU's blocks, from its monitor.
fn layout(qmp: &mut Qmp) -> Vec<(String, u64)> {
    let text = qmp.human("info ramblock").unwrap();
    let block = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let used = words.get(4)?.strip_prefix("0x")?;
        Some((words[0].to_owned(), u64::from_str_radix(used, 16).ok()? / 4096))
    };
    text.lines().filter_map(block).collect()
}

/// Carries a stream to its end and passes each piece to the recognizer, as the engine does.
fn relay(mut from: UnixStream, mut to: UnixStream, recogniser: &mut dyn Recogniser) -> Recorded {
    let mut recorded = Recorded { bytes: Vec::new(), marks: Marks::default() };
    let (mut piece, mut marks, mut taken) = (vec![0; 256 << 10], Marks::default(), 0);
    loop {
        let length = from.read(&mut piece).unwrap();
        if length == 0 {
            return recorded;
        }
        to.write_all(&piece[..length]).unwrap();
        recorded.bytes.extend_from_slice(&piece[..length]);
        marks.clear();
        let more = recogniser.look(&recorded.bytes[taken..], &mut marks);
        recorded.marks.zero_pages += marks.zero_pages;
        let pages = marks.pages.iter().map(|mark| PageMark { at: mark.at + taken, ..*mark });
        recorded.marks.pages.extend(pages);
        taken += more;
        assert!(recorded.bytes.len() - taken < LONGEST_RECORD);
    }
}
