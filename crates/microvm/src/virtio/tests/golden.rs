//! The state of a balloon, as a host of another release sends it.

use super::rig::Rig;
use super::*;

/// `golden/balloon.json` was saved by this VMM with a driver that had initialized the device. It is
/// never changed. A changed state gets a new version (`SectionKind::since`) and a new golden file.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/virtio/golden/balloon.json");

fn saved(device: &BalloonDevice) -> String {
    let mut out = StateWriter::new();
    device.save(&mut out).unwrap();
    let state = out.finish();
    let reader = StateReader::parse(&state).unwrap();
    String::from_utf8(reader.sections()[0].payload().to_vec()).unwrap()
}

#[test]
fn device_loads_and_saves_its_golden_state() {
    let golden = std::fs::read_to_string(GOLDEN).unwrap();
    let mut out = StateWriter::new();
    out.section(&SECTIONS[0], 0, golden.as_bytes()).unwrap();
    let state = out.finish();
    // The driver's queues are in this memory.
    let rig = Rig::running(MemoryKind::Private);
    rig.device.pause();
    let other = Rig::with_memory(Arc::clone(&rig.mapped));
    other.device.load(&StateReader::parse(&state).unwrap()).unwrap();
    assert_eq!(saved(&other.device), golden, "another layout under the same version");
}

/// Writes the file again: `cargo test -p vmferry-microvm -- --ignored write_the_golden_balloon`.
#[test]
#[ignore = "it writes into the source tree"]
fn write_the_golden_balloon() {
    let rig = Rig::running(MemoryKind::Private);
    rig.device.pause();
    std::fs::write(GOLDEN, saved(&rig.device)).unwrap();
}
