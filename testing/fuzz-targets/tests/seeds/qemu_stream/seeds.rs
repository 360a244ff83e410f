//! Initial streams: one for each kind of record and packet.

use super::samples::{OTHER, OTHER_SECTION, Packet, RAM, ROM, Sample};

/// Each with a name, and whether it is a multifd channel's.
pub fn samples() -> Vec<(&'static str, bool, Sample)> {
    let main = |name, make: fn(&mut Sample)| {
        let mut sample = Sample::default();
        make(&mut sample);
        (name, false, sample)
    };
    let multifd = |name, make: fn(&mut Sample)| {
        let mut sample = Sample::default();
        make(sample.greeting());
        (name, true, sample)
    };
    vec![
        main("plain", |sample| {
            sample.beginning().part().page(Some(RAM.0), 0, 0).page(None, 0, 1).zero(None, 2).end();
            sample.last().page(None, 0, 1).zero(Some(ROM.0), 31).end();
            sample.section(4, 5, "timer", 2).put(&[1; 30]).footer(5);
        }),
        main("table", |sample| {
            sample.header().start(&[2 << 20, 0xc000_0000]).word(0x200).end();
            sample.part().page(Some(ROM.0), 1, 3).end();
        }),
        main("packed", |sample| {
            sample.beginning().part().record(0x40, Some(RAM.0), 9).put(&[1, 0, 5]).put(&[8; 5]);
            sample.record(0x100, None, 3).put(&[0, 0, 0, 1, 9]).word(0x80).word(0x200);
            sample.page(None, 0, 4).end();
        }),
        main("no_footers", |sample| {
            sample.header().start(&[]).word(0x10).part().page(Some(RAM.0), 0, 5).word(0x10);
            sample.last().zero(None, 6).word(0x10);
        }),
        main("others", |sample| {
            sample.beginning().section(1, OTHER_SECTION, "vfio", 2).put(b"....");
            sample.footer(OTHER_SECTION).part().page(Some(RAM.0), 0, 7).end();
            sample.put(&[2]).put(&OTHER_SECTION.to_be_bytes()).put(b"~~~").footer(OTHER_SECTION);
            sample.put(&[8, 0, 11, 0, 0]).last().page(None, 0, 8).end();
        }),
        main("lost", |sample| {
            sample.beginning().part().page(Some(RAM.0), 0, 7).word(0x7400).put(&[8; 300]).end();
            sample.part().lost_page(Some(OTHER.0), 9).page(Some(RAM.0), 0, 11).end();
        }),
        multifd("multifd", |sample| {
            sample.packet_with_pages(0, &Packet { normal: &[5, 3], ..Packet::default() });
            sample.packet(&Packet { flags: 1, size: 8192, ..Packet::default() });
            sample
                .packet_with_pages(1, &Packet { normal: &[1], block: ROM.0, ..Packet::default() });
        }),
        multifd("multifd_zero", |sample| {
            let packet = Packet { normal: &[5, 3], zero: &[6, 7], ..Packet::default() };
            sample.packet_with_pages(0, &packet);
            sample.packet(&Packet { flags: 1, allocated: 0, block: "", ..Packet::default() });
        }),
        multifd("multifd_packed", |sample| {
            let packed = Packet { flags: 4, size: 77, normal: &[1, 2], ..Packet::default() };
            sample.packet(&packed).put(&[0x11; 77]);
            sample.packet_with_pages(0, &Packet { normal: &[8], ..Packet::default() });
        }),
        multifd("multifd_device", |sample| {
            sample.put(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1, 0, 0, 0, 0x40]).put(&[b'v'; 256]);
            sample.put(&[0, 0, 0, 0, 0, 0, 0, 50]).put(&[0x11; 50]);
            sample.packet_with_pages(0, &Packet { normal: &[8], ..Packet::default() });
        }),
    ]
}
