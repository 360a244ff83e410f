//! Real QEMUs move a running guest through the recognizers.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;

use super::capture::{Capture, Way, migrate};
use super::{fixtures, samples};
use flate2::Compression;
use flate2::write::ZlibEncoder;
use serde_json::json;
use vmferry::vmm::streamed::Recogniser;
use vmferry_memory::PAGE_SIZE;
use vmferry_qemu::{Blocks, MainStream, MultifdChannel, Qmp};
use vmferry_qemu_lab::{Backend, Machine, Qemu, Version, World};

/// The lab's name for the guest's memory block.
const RAM: &str = "ram";

fn move_there_and_check(version: Version, channels: u8) {
    let machine = Machine {
        mib: 96,
        backend: Backend::Private,
        ..Machine::new(version, "dirty=8").with(&["-device", "VGA"])
    };
    let world = World::new();
    let mut from = machine.start(&world, "from");
    from.wait_for("works", |said| said.get("checked") > 0);
    let to = machine.clone().with(&["-S"]).incoming(&world, "to");
    let capture = migrate(&world, &from, &to, Way { channels, passes: 3, ..Way::default() });
    assert!(capture.passes >= 3, "{} passes", capture.passes);
    assert!(capture.streams.len() == 1 + usize::from(channels));

    marks_are_complete(version, &capture);
    marks_are_the_same_in_other_pieces(&capture);
    contents_are_those_of_the_guest(&capture, &memory(&world, &to, 96));
}

/// Checks that the number of marks equals the number of pages that QEMU reports.
fn marks_are_complete(version: Version, capture: &Capture) {
    let (main, channels) = capture.streams.split_first().unwrap();
    let mut pages = main.marks.pages.len() as u64;
    let mut packets = 0;
    for channel in channels {
        let counts = pages_by_packet(&channel.bytes);
        assert_eq!(channel.marks.pages.len() as u64, counts.iter().sum::<u64>());
        pages += channel.marks.pages.len() as u64;
        packets += counts.len() as u64;
    }
    let zero = capture.streams.iter().map(|stream| stream.marks.zero_pages).sum::<u64>();
    assert_eq!(zero, capture.duplicate);
    if version == Version::V7_2 && packets > 0 {
        // There a race in `multifd_queue_page` often makes the last page of a packet also the first
        // of the next one, and QEMU counts it once.
        let most = capture.normal + packets;
        assert!((capture.normal..=most).contains(&pages), "{pages} of {}", capture.normal);
    } else {
        assert_eq!(pages, capture.normal);
    }
    assert!(pages > 1000 && zero > 1000, "{pages} {zero}");
}

/// The number of pages in each packet of a multifd channel without compression.
fn pages_by_packet(mut channel: &[u8]) -> Vec<u64> {
    let mut counts = Vec::new();
    channel = &channel[64..];
    while !channel.is_empty() {
        let normal = u32::from_be_bytes(channel[16..20].try_into().unwrap()) as usize;
        counts.push(normal as u64);
        channel = &channel[64 + 256 + 128 * 8 + normal * PAGE_SIZE..];
    }
    counts
}

fn marks_are_the_same_in_other_pieces(capture: &Capture) {
    let blocks = Arc::new(Blocks::new(capture.layout.iter().map(|(name, pages)| (name, *pages))));
    for (number, stream) in capture.streams.iter().enumerate() {
        for pieces in [&[usize::MAX >> 1][..], &[4097, 8, 70_001, 1]] {
            let mut recogniser: Box<dyn Recogniser> = match number {
                0 => Box::new(MainStream::new(Arc::clone(&blocks))),
                _ => Box::new(MultifdChannel::new(Arc::clone(&blocks))),
            };
            let found = samples::look_in_pieces(&mut *recogniser, &stream.bytes, pieces).0;
            assert!(found == stream.marks, "stream {number} in pieces of {pieces:?}");
        }
    }
}

/// Checks that the last marked content of each page equals the guest's memory now, and that every
/// page with content was marked.
fn contents_are_those_of_the_guest(capture: &Capture, memory: &[u8]) {
    let slot = capture.layout.iter().position(|(name, _)| name == RAM).unwrap();
    let mut sent: BTreeMap<u64, Vec<&[u8]>> = BTreeMap::new();
    for stream in &capture.streams {
        for mark in stream.marks.pages.iter().filter(|mark| usize::from(mark.slot.0) == slot) {
            let content = &stream.bytes[mark.at..mark.at + PAGE_SIZE];
            sent.entry(mark.page).or_default().push(content);
        }
    }
    let (mut same, mut beside) = (0, 0);
    for (page, now) in memory.chunks_exact(PAGE_SIZE).enumerate() {
        // There the CPU sees ROMs and video memory.
        let hidden = (0xa0..0x100).contains(&page);
        if hidden || now.iter().all(|&byte| byte == 0) {
            continue;
        }
        let versions = sent.get(&(page as u64)).map_or(&[][..], |versions| versions);
        // Channels are not ordered among each other; within one stream the last version counts.
        let candidates = match capture.streams.len() {
            1 => &versions[versions.len().saturating_sub(1)..],
            _ => versions,
        };
        assert!(candidates.contains(&now), "page {page:#x}: {} versions, another", versions.len());
        same += 1;
        let next = sent.get(&(page as u64 + 1)).map_or(&[][..], |versions| versions);
        beside += u32::from(next.contains(&now));
    }
    assert!(same > 1000, "{same} pages compared");
    // Checks that the comparison would detect marks that are off by one page.
    assert!(beside < same / 2, "{beside} of {same} are also the next page");
}

/// The memory of a paused guest.
fn memory(world: &World, qemu: &Qemu, mib: usize) -> Vec<u8> {
    let file = world.path("memory");
    let mut qmp = Qmp::connect(&qemu.qmp).unwrap();
    let all = json!({ "val": 0, "size": mib << 20, "filename": file.display().to_string() });
    qmp.execute("pmemsave", all).unwrap();
    std::fs::read(file).unwrap()
}

#[test]
fn plain_7_2() {
    move_there_and_check(Version::V7_2, 0);
}

#[test]
fn plain_10_0() {
    move_there_and_check(Version::V10_0, 0);
}

#[test]
fn multifd_7_2() {
    move_there_and_check(Version::V7_2, 3);
}

#[test]
fn multifd_10_0() {
    move_there_and_check(Version::V10_0, 3);
}

/// Other settings of a migration do not end the recognition.
#[test]
fn other_migration_settings_keep_the_recognition() {
    let way = Way::default();
    let zlib = Some(("multifd-compression", "zlib"));
    let legacy = Some(("zero-page-detection", "legacy"));
    let both = Version::ALL;
    let ways: [(&[Version], Way, bool); 5] = [
        (&both, Way { capabilities: &["x-ignore-shared"], ..way }, true),
        (&both, Way { capabilities: &["xbzrle"], ..way }, true),
        // Pages that QEMU itself has compressed are not marked.
        (&both, Way { channels: 2, parameter: zlib, ..way }, false),
        (&[Version::V10_0], Way { channels: 2, parameter: legacy, ..way }, true),
        (&both, Way { channels: 1, capabilities: &["x-ignore-shared"], ..way }, true),
    ];
    for (versions, way, whole) in ways {
        for &version in versions {
            let capture = migrate_firmware(version, way);
            let pages: usize = capture.streams.iter().map(|stream| stream.marks.pages.len()).sum();
            let zero: u64 = capture.streams.iter().map(|stream| stream.marks.zero_pages).sum();
            let expected = if whole { capture.normal } else { 0 };
            let what = (way.capabilities, way.parameter);
            assert_eq!((pages as u64, zero), (expected, capture.duplicate), "{version:?} {what:?}");
            assert!(capture.duplicate > 1000);
        }
    }
}

/// QEMU's `compress` capability, which 9.1 removed: it sends the first page of each block
/// uncompressed. QEMU's own count of zero pages includes the compressed ones.
#[test]
fn compressed_by_7_2() {
    let way = Way::default();
    let plain = &migrate_firmware(Version::V7_2, way).streams[0].marks;
    let way = Way { capabilities: &["compress"], ..way };
    let packed = &migrate_firmware(Version::V7_2, way).streams[0].marks;
    assert_eq!(packed.zero_pages, plain.zero_pages);
    assert!((1..plain.pages.len() / 2).contains(&packed.pages.len()));
}

/// Moves only what QEMU itself and the firmware put into memory: no guest runs.
fn migrate_firmware(version: Version, way: Way) -> Capture {
    let machine =
        Machine { mib: 8, backend: Backend::Private, ..Machine::new(version, "").with(&["-S"]) };
    let world = World::new();
    let (from, to) = (machine.start(&world, "from"), machine.incoming(&world, "to"));
    migrate(&world, &from, &to, way)
}

/// Run `cargo test -p vmferry-qemu --test qemus -- --ignored write_the_captures` for a new version
/// of QEMU.
#[test]
#[ignore = "writes fixtures"]
fn write_the_captures() {
    for version in Version::ALL {
        for channels in [0, 2] {
            let capture = migrate_firmware(version, Way { channels, ..Way::default() });
            let found =
                capture.streams.iter().map(|stream| stream.marks.pages.len()).sum::<usize>();
            assert_eq!(found as u64, capture.normal);
            write(version, &capture);
        }
    }
}

/// Writes a capture into the source tree.
fn write(version: Version, capture: &Capture) {
    let mode = if capture.streams.len() > 1 { "multifd" } else { "plain" };
    let name = format!("{version:?}-{mode}").to_lowercase();
    std::fs::create_dir_all(fixtures::directory()).unwrap();
    for (number, stream) in capture.streams.iter().enumerate() {
        let mut bytes = stream.bytes.clone();
        for mark in &stream.marks.pages {
            bytes[mark.at..mark.at + PAGE_SIZE].fill(fixtures::CONTENT);
        }
        let mut packed = ZlibEncoder::new(Vec::new(), Compression::best());
        packed.write_all(&bytes).unwrap();
        let file = fixtures::directory().join(format!("{name}-{number}.zlib"));
        std::fs::write(file, packed.finish().unwrap()).unwrap();
    }
    let about = json!({
        "normal": capture.normal,
        "duplicate": capture.duplicate,
        "streams": capture.streams.len(),
        "layout": capture.layout,
    });
    let file = fixtures::directory().join(format!("{name}.json"));
    std::fs::write(file, format!("{about:#}\n")).unwrap();
}
