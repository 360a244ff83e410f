//! The pages that the recognizers find in hand-made streams, for each kind of record and each
//! version of QEMU, and in streams of real QEMUs.

use std::sync::Arc;
use std::time::Instant;

use super::fixtures;
use super::samples::{
    OTHER, OTHER_SECTION, Packet, RAM, RAM_SECTION, ROM, Sample, blocks, look, look_in_pieces,
    recogniser,
};
use vmferry::vmm::streamed::{Marks, Recogniser};
use vmferry_memory::PAGE_SIZE;
use vmferry_qemu::{Blocks, MainStream, MultifdChannel};

/// Asserts that exactly the expected marks are found, that all bytes are taken, and that the result
/// does not depend on how the stream is cut.
#[track_caller]
fn assert_found(multifd: bool, sample: &Sample) {
    let (marks, taken) = look(multifd, &sample.bytes);
    assert_eq!(marks, sample.marks);
    assert_eq!(taken, sample.bytes.len(), "all bytes are taken");
    for pieces in [&[1_usize][..], &[4096], &[4104, 7], &[256 << 10], &[13, 5000, 1]] {
        let found = look_in_pieces(&mut *recogniser(multifd), &sample.bytes, pieces);
        assert_eq!(found.0, sample.marks, "in pieces of {pieces:?}");
        assert_eq!(found.1, taken, "in pieces of {pieces:?}");
    }
}

/// A migration with two passes, followed by devices.
pub fn whole() -> Sample {
    let mut sample = Sample::default();
    sample.beginning();
    sample.part().page(Some(RAM.0), 0, 0).page(None, 0, 1).zero(None, 2).zero(None, 3).end();
    // The block is the same in the next section.
    sample.part().page(None, 0, 4).page(Some(ROM.0), 1, 31).page(Some(RAM.0), 0, 17).end();
    sample.last().page(None, 0, 4).zero(Some(ROM.0), 31).end();
    // The state of devices is not searched for pages, whatever it contains.
    let mut lie = Sample::default();
    lie.footer(RAM_SECTION).part().page(Some(RAM.0), 0, 4).end();
    sample.section(4, 5, "timer", 2).put(&[1; 3000]).put(&lie.bytes).footer(5);
    sample.put(&[0, 6, 0, 0, 0, 2]).put(b"{}");
    sample
}

#[test]
fn main_stream_of_a_whole_migration() {
    assert_found(false, &whole());
}

/// The paused state that a stream reports, however it is cut.
fn paused(bytes: &[u8]) -> Option<bool> {
    let mut told = [1, 7, 4096, 256 << 10].map(|piece| {
        let (tell, paused) = std::sync::mpsc::channel();
        let mut stream = MainStream::new(blocks()).telling_paused(tell);
        let (_, taken) = look_in_pieces(&mut stream, bytes, &[piece]);
        // At the end of a stream, bytes that may begin a match are left.
        assert!(bytes.len() - taken < 200);
        drop(stream);
        paused.iter().collect::<Vec<bool>>()
    });
    let first = told[0].clone();
    told.iter_mut().for_each(|told| assert_eq!(*told, first));
    assert!(first.len() < 2);
    first.first().copied()
}

#[test]
fn run_state_is_reported_once_wherever_it_is_among_devices() {
    let of = |name: &[u8], length: u32| {
        let mut sample = Sample::default();
        sample.beginning().last().page(Some(RAM.0), 0, 4).end();
        sample.section(4, 5, "timer", 2).put(&[4; 3000]).footer(5);
        sample.section(4, 6, "globalstate", 1).put(&length.to_be_bytes()).put(name);
        sample.put(&vec![0; 100 - name.len()]).footer(6);
        sample.section(4, 7, "globalstate", 1).put(&[0, 0, 0, 8]).put(b"running\0").footer(7);
        paused(&sample.put(&[0]).bytes)
    };
    assert_eq!(of(b"running\0", 8), Some(false));
    assert_eq!(of(b"suspended\0", 10), Some(false));
    for name in ["paused", "io-error", "watchdog", "guest-panicked", "prelaunch"] {
        assert_eq!(of(&[name.as_bytes(), b"\0"].concat(), name.len() as u32 + 1), Some(true));
    }
    // A section of impossible length is ignored.
    assert_eq!(of(b"paused\0", 101), Some(false));
    assert_eq!(paused(&whole().bytes), None);
    for fixture in fixtures::read() {
        assert_eq!(paused(&fixture.streams[0]), Some(true), "{}: prelaunch", fixture.name);
    }
}

#[test]
fn block_table_with_and_without_capabilities() {
    for extra in [&[][..], &[0], &[2 << 20], &[u64::MAX << 12], &[2 << 20, 0xc000_0000]] {
        let mut sample = Sample::default();
        sample.header().start(extra).end().part().page(Some(RAM.0), 0, 5).end();
        assert_found(false, &sample);
        // And with the multifd mark after it, as 8.1 to 9.2 write it.
        let mut sample = Sample::default();
        sample.header().start(extra).word(0x200).end();
        sample.part().zero(Some(RAM.0), 5).word(0x200).end();
        assert_found(false, &sample);
        // Without a footer after it, only its length says where it ends.
        let mut sample = Sample::default();
        sample.header().start(extra).word(0x10).part().zero(Some(RAM.0), 5).word(0x10);
        assert_found(false, &sample);
    }
}

#[test]
fn sections_without_footers_of_old_machine_types() {
    let mut sample = Sample::default();
    sample.header().start(&[]).word(0x10);
    sample.part().page(Some(RAM.0), 0, 5).word(0x10).part().zero(None, 6).word(0x10);
    assert_found(false, &sample);
}

#[test]
fn pages_in_other_forms_are_skipped() {
    let mut sample = Sample::default();
    sample.beginning().part();
    sample.record(0x40, Some(RAM.0), 9).put(&[1, 0x0f, 0xff]).put(&[8; 0xfff]);
    sample.record(0x40, None, 9).put(&[1, 0, 0]).page(None, 0, 10);
    sample.record(0x100, Some(ROM.0), 2).put(&[0, 0, 0x10, 0x0d]).put(&[0x7e; 0x100d]);
    sample.record(0x100, None, 3).put(&[0, 0, 0, 1, 9]).page(None, 1, 4);
    sample.word(0x80).word(0x200).end();
    assert_found(false, &sample);
}

#[test]
fn pages_outside_the_layout_are_not_marked() {
    let mut sample = Sample::default();
    sample.beginning().part();
    sample.lost_page(Some(OTHER.0), 3).lost_page(None, 4).zero(None, 5);
    // A page after the block's end, as the block may have grown.
    sample.lost_page(Some(ROM.0), ROM.1).page(Some(RAM.0), 0, RAM.1 - 1).end();
    assert_found(false, &sample);
}

#[test]
fn sections_of_other_live_devices_are_skipped() {
    let mut sample = Sample::default();
    sample.header().section(4, 9, "virtio-mem-early", 1).put(&[1; 70]).footer(9);
    sample.start(&[]).end();
    let junk: Vec<u8> =
        (0..70_000_u32).flat_map(|n| (n.wrapping_mul(2_654_435_761)).to_le_bytes()).collect();
    sample.section(1, OTHER_SECTION, "0000:00:05.0/vfio", 2).put(&junk).footer(OTHER_SECTION);
    sample.part().page(Some(RAM.0), 0, 7).end();
    for first in 0..5 {
        sample.put(&[2]).put(&OTHER_SECTION.to_be_bytes()).put(&junk).footer(OTHER_SECTION);
        sample.put(&[2]).put(&[0, 0, 0, 0x33]).put(&junk).footer(0x33);
        sample.part();
        match first {
            0 => sample.page(None, 0, 8),
            1 => sample.zero(Some(ROM.0), 1).page(Some(RAM.0), 0, 9),
            2 => sample.lost_page(Some(OTHER.0), 1).page(Some(RAM.0), 0, 9),
            3 => sample.word(0x200),
            _ => &mut sample,
        };
        sample.end();
    }
    // 10.0 sends the switchover command right before the last section.
    sample.put(&[2]).put(&OTHER_SECTION.to_be_bytes()).put(&junk).footer(OTHER_SECTION);
    sample.put(&[8, 0, 11, 0, 0]).last().page(None, 0, 10).end().put(&junk);
    assert_found(false, &sample);
}

#[test]
fn commands_between_sections_are_skipped() {
    let mut sample = Sample::default();
    sample.beginning().put(&[8, 0, 2, 0, 4, 1, 2, 3, 4]).part().page(Some(RAM.0), 0, 7).end();
    sample.put(&[8, 0, 11, 0, 0]).last().page(None, 0, 8).end();
    assert_found(false, &sample);
}

#[test]
fn unknown_flag_ends_the_section_and_not_the_recognition() {
    let mut sample = Sample::default();
    sample.beginning().part().page(Some(RAM.0), 0, 7);
    // A flag of a future QEMU. It may have switched to another block.
    sample.word(0x7000 | 0x400).put(&[8; 300]).record(0x08, None, 8).put(&[0x7e; PAGE_SIZE]);
    sample.end().part().lost_page(None, 9).zero(None, 3).page(Some(RAM.0), 0, 11).end();
    assert_found(false, &sample);
}

#[test]
fn stream_that_is_no_migration_has_no_pages() {
    for start in [&b"QEVM\0\0\0\x02"[..], b"Q", b"GET / HTTP/1.1\r\n\r\n"] {
        let mut sample = Sample::default();
        sample.put(start);
        if start.len() > 7 {
            sample.bytes.extend_from_slice(&whole().bytes);
            assert_found(false, &sample);
            assert_found(true, &sample);
        } else {
            assert_eq!(look(false, &sample.bytes).1, 0, "it may still become one");
        }
    }
}

/// Without the header of RAM's section no page is found, whatever looks like one.
#[test]
fn pages_before_their_section_are_not_found() {
    let mut sample = Sample::default();
    sample.header();
    let mut pages = Sample::default();
    pages.part().page(Some(RAM.0), 0, 0).end();
    sample.put(&pages.bytes);
    assert_found(false, &sample);
}

#[test]
fn packets_of_7_2_to_8_2() {
    let mut sample = Sample::default();
    sample.greeting();
    let pages: Vec<u64> = (100..228).collect();
    sample.packet_with_pages(0, &Packet { normal: &pages, ..Packet::default() });
    sample.packet_with_pages(0, &Packet { normal: &[5, 3, 9], ..Packet::default() });
    sample.packet_with_pages(1, &Packet { normal: &[31], block: ROM.0, ..Packet::default() });
    // A sync packet still has the size of the previous packet.
    sample.packet(&Packet { flags: 1, size: 4096, ..Packet::default() });
    sample.packet_with_pages(0, &Packet { flags: 1, normal: &[5], ..Packet::default() });
    assert_found(true, &sample);
}

#[test]
fn packets_of_9_0_and_later() {
    let mut sample = Sample::default();
    sample.greeting();
    sample.packet_with_pages(0, &Packet { normal: &[5, 3, 9], zero: &[6, 7], ..Packet::default() });
    let zero: Vec<u64> = (0..128).collect();
    sample.packet(&Packet { zero: &zero, ..Packet::default() });
    sample.packet(&Packet { flags: 1, allocated: 0, block: "", ..Packet::default() });
    sample.packet_with_pages(0, &Packet { normal: &[5], ..Packet::default() });
    // The state of a device, since 10.0.
    for length in [0_usize, 1, 5000, 1 << 20] {
        sample.put(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1, 0, 0, 0, 0x40]).put(&[b'v'; 256]);
        sample.put(&[0; 4]).put(&(length as u32).to_be_bytes()).put(&vec![0x11; length]);
        sample.packet_with_pages(0, &Packet { normal: &[5], ..Packet::default() });
    }
    assert_found(true, &sample);
}

#[test]
fn packets_with_each_compression_method() {
    let mut sample = Sample::default();
    sample.greeting();
    for method in [1, 2, 4, 8, 16] {
        let flags = method << 1;
        let packed = Packet { flags, size: 777, normal: &[1, 2], zero: &[3], ..Packet::default() };
        sample.packet(&packed).put(&[0x11; 777]);
        sample.packet(&Packet { flags, size: 777, zero: &[3], ..Packet::default() });
        sample.packet(&Packet { flags: flags | 1, ..Packet::default() });
        sample.packet_with_pages(0, &Packet { normal: &[8], ..Packet::default() });
    }
    assert_found(true, &sample);
}

#[test]
fn packets_outside_the_layout_are_not_marked() {
    let mut sample = Sample::default();
    sample.greeting();
    let other = Packet { normal: &[1, 2], size: 8192, block: OTHER.0, ..Packet::default() };
    sample.packet(&other).put(&[0x11; 8192]);
    let beyond = Packet { normal: &[ROM.1], size: 4096, block: ROM.0, ..Packet::default() };
    sample.packet(&beyond).put(&[0x11; PAGE_SIZE]);
    sample.packet_with_pages(0, &Packet { normal: &[8], ..Packet::default() });
    assert_found(true, &sample);
}

/// After anything that is not a packet, no more pages are found.
#[test]
fn packets_end_at_invalid_data() {
    let good = Packet { normal: &[1, 2], ..Packet::default() };
    let bad = [
        Packet { flags: 1 << 7, ..good },
        Packet { allocated: 129, ..good },
        Packet { allocated: 1, ..good },
        Packet { size: 4096, ..good },
    ];
    for bad in bad {
        let mut sample = Sample::default();
        sample.greeting().packet_with_pages(0, &good).packet(&bad);
        let mut rest = Sample::default();
        rest.packet_with_pages(0, &good);
        sample.put(&rest.bytes);
        assert_found(true, &sample);
    }
    let mut sample = Sample::default();
    sample.greeting().packet_with_pages(0, &good).put(&[0x11, 0x22, 0x33, 0x45]);
    assert_found(true, &sample);
}

/// QEMU 7.2 and 10.0, with and without multifd: all pages that QEMU reports, with the same result
/// in any pieces.
#[test]
fn streams_of_real_qemus() {
    let fixtures = fixtures::read();
    assert_eq!(fixtures.len(), 4);
    for fixture in fixtures {
        let (mut pages, mut zero) = (0, 0);
        let layout = fixture.layout.iter().map(|(name, pages)| (name, *pages));
        let blocks = Arc::new(Blocks::new(layout));
        for (number, stream) in fixture.streams.iter().enumerate() {
            let recogniser = || -> Box<dyn Recogniser> {
                match number {
                    0 => Box::new(MainStream::new(Arc::clone(&blocks))),
                    _ => Box::new(MultifdChannel::new(Arc::clone(&blocks))),
                }
            };
            let whole = look_in_pieces(&mut *recogniser(), stream, &[stream.len()]);
            assert_eq!(whole.1, stream.len(), "{}: all bytes are taken", fixture.name);
            for pieces in [&[4096][..], &[1, 5000, 333], &[256 << 10]] {
                assert_eq!(look_in_pieces(&mut *recogniser(), stream, pieces), whole);
            }
            for mark in &whole.0.pages {
                let content = &stream[mark.at..mark.at + PAGE_SIZE];
                assert!(content.iter().all(|&byte| byte == fixtures::CONTENT), "{mark:?}");
            }
            pages += whole.0.pages.len() as u64;
            zero += whole.0.zero_pages;
        }
        let qemu = (fixture.normal, fixture.duplicate);
        assert_eq!((pages, zero), qemu, "{}", fixture.name);
    }
}

/// `cargo test --release -p vmferry-qemu --test qemus -- --ignored --nocapture speed`
#[test]
#[ignore = "measures"]
fn speed_of_recognition() {
    const PAGES: u64 = 100_000;
    let mut main = Sample::default();
    main.beginning().part();
    (0..PAGES).for_each(|page| {
        main.page((page == 0).then_some(RAM.0), 0, page);
    });
    let mut channel = Sample::default();
    channel.greeting();
    (0..PAGES / 128).for_each(|packet| {
        let pages: Vec<u64> = (packet * 128..(packet + 1) * 128).collect();
        channel.packet_with_pages(0, &Packet { normal: &pages, ..Packet::default() });
    });
    for (multifd, sample) in [(false, &main), (true, &channel)] {
        let mut fastest = f64::INFINITY;
        for _ in 0..5 {
            let mut recogniser = recogniser(multifd);
            let mut marks = Marks::default();
            let (mut taken, mut found) = (0, 0);
            let begun = Instant::now();
            // The amount that the engine reads at once, with room in the marks.
            for come in (256 << 10..sample.bytes.len()).step_by(256 << 10) {
                marks.clear();
                taken += recogniser.look(&sample.bytes[taken..come], &mut marks);
                found += marks.pages.len();
            }
            fastest = fastest.min(begun.elapsed().as_secs_f64());
            assert!(found > PAGES as usize * 9 / 10);
        }
        println!("multifd {multifd}: {:.1} GB/s", sample.bytes.len() as f64 / fastest / 1e9);
    }
}
