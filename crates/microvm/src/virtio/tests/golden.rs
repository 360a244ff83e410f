//! The state of a balloon as a host of another release sends it.

use super::*;

/// `golden/balloon.json` was saved by this VMM, with a driver that had set it up, and is never changed: a state that changes gets
/// a version of its own (`SectionKind::since`), and another file beside this one.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/virtio/golden/balloon.json");

fn saved(device: &BalloonDevice) -> String {
    let mut out = StateWriter::new();
    device.save(&mut out).unwrap();
    let state = out.finish();
    let reader = StateReader::parse(&state).unwrap();
    String::from_utf8(reader.sections()[0].payload().to_vec()).unwrap()
}

#[test]
fn a_device_takes_the_golden_state() {
    let golden = std::fs::read_to_string(GOLDEN).unwrap();
    let mut out = StateWriter::new();
    out.section(&SECTIONS[0], 0, golden.as_bytes()).unwrap();
    let state = out.finish();
    // A driver has set its queues up in this memory.
    let rig = Rig::running(MemoryKind::Private);
    rig.device.run(false);
    let other = Rig::with_memory(Arc::clone(&rig.mapped));
    other.device.load(&StateReader::parse(&state).unwrap()).unwrap();
    assert_eq!(saved(&other.device), golden, "another layout under the same version");
}

/// Writes the file anew: `cargo test -p vmferry-microvm -- --ignored write_the_golden_balloon`.
#[test]
#[ignore = "it writes into the source tree"]
fn write_the_golden_balloon() {
    let rig = Rig::running(MemoryKind::Private);
    rig.device.run(false);
    std::fs::write(GOLDEN, saved(&rig.device)).unwrap();
}
