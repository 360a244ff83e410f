//! Runs the seeds of the fuzz target of libvirt's RPC.

use vmferry_fuzz_targets::libvirt_rpc;

seed_tests!(libvirt_rpc, places: 60, differs: |_| false);

const REMOTE: u32 = 0x2000_8086;
const KEEPALIVE: u32 = 0x6b65_6570;
const UUID: &str = "c7a5fdbd-cdaf-9455-926a-d65c16db1809";

/// A migration, and connections that the gate refuses or ends. The first byte is the size of the
/// pieces.
fn seeds() -> Vec<(String, Vec<u8>)> {
    let begun = [call(66, 0, &[]), call(60, 1, &words(&[10])), open(2, "qemu:///system")].concat();
    let ping = packet([KEEPALIVE, 1, 1, 2, 0, 0], &[]);
    let end = [call(361, 8, &[]), call(2, 9, &[])].concat();
    let web = cookie("web");
    let whole = [
        begun.clone(),
        call(360, 3, &[]),
        prepare(4, "web", &[], &web, 0x43),
        ping,
        finish(5, "web", &web, 0),
        end,
    ];
    let renamed = [
        prepare(1, "web", &[("destination_name", "db")], &web, 3),
        finish(2, "db", b"", 1),
        prepare(3, "web", &[("destination_name", "../db")], &web, 3),
    ];
    let refused = [
        open(1, "qemu+ext:///system?command=x"),
        prepare(2, "secret", &[], b"", 3),
        prepare(3, "web", &[("migrate_uri", "tcp:a:1")], b"", 3),
        prepare(4, "web", &[("persistent_xml", "x")], b"", 3),
        prepare(5, "web", &[], &cookie("db"), 3),
        prepare(6, "web", &[], b"", 7),
        finish(7, "db", b"", 0),
        call(11, 8, b"define"),
    ];
    let replies = [
        prepare(4, "web", &[], &web, 3),
        finish(5, "web", &web, 0),
        packet([REMOTE, 1, 303, 1, 4, 0], &words(&[0, 0])),
        packet([KEEPALIVE, 1, 1, 2, 0, 0], &[]),
        packet([REMOTE, 1, 306, 1, 5, 1], &words(&[29, 7, 1, 2, 0x6e6f_0000, 2])),
    ];
    let numbers = [words(&[2]), number("bandwidth", 4, &[0, 9]), number("disks_port", 1, &[7])];
    let numbers = [numbers.concat(), words(&[0, 3])].concat();
    let dtd = "<domain><!DOCTYPE a [<!ENTITY b 'c'>]><name>&b;</name></domain>";
    [
        ("migration", 255, whole.concat()),
        ("migration-in-bytes", 0, whole.concat()),
        ("renamed", 30, renamed.concat()),
        ("refused", 70, refused.concat()),
        ("replies", 255, replies.concat()),
        ("numbers", 255, call(303, 1, &numbers)),
        ("dtd", 255, call(303, 1, &args(&[("destination_xml", dtd)], b"", 3))),
        ("stream", 255, [begun, packet([REMOTE, 1, 303, 3, 4, 2], b"memory")].concat()),
        ("too-long", 255, words(&[28 + (4 << 20) + 1, REMOTE, 1, 303, 0, 1, 0])),
        ("http", 255, b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("uri", 255, b"unix:///run/a%20b/c.sock".to_vec()),
    ]
    .map(|(name, size, bytes)| (name.to_owned(), [vec![size], bytes].concat()))
    .into()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn opaque(data: &[u8]) -> Vec<u8> {
    let mut bytes = [&words(&[data.len() as u32]), data].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn packet(header: [u32; 6], payload: &[u8]) -> Vec<u8> {
    [&words(&[payload.len() as u32 + 28])[..], &words(&header), payload].concat()
}

fn call(procedure: u32, serial: u32, payload: &[u8]) -> Vec<u8> {
    packet([REMOTE, 1, procedure, 0, serial, 0], payload)
}

fn open(serial: u32, uri: &str) -> Vec<u8> {
    call(1, serial, &[words(&[1]), opaque(uri.as_bytes()), words(&[0])].concat())
}

fn number(name: &str, kind: u32, value: &[u32]) -> Vec<u8> {
    [opaque(name.as_bytes()), words(&[kind]), words(value)].concat()
}

/// Strings as typed parameters, the cookie and the flags.
fn args(strings: &[(&str, &str)], cookie: &[u8], flags: u32) -> Vec<u8> {
    let mut bytes = words(&[strings.len() as u32]);
    for (name, text) in strings {
        bytes.extend([opaque(name.as_bytes()), words(&[7]), opaque(text.as_bytes())].concat());
    }
    [bytes, opaque(cookie), words(&[flags])].concat()
}

fn definition(name: &str) -> String {
    format!("<domain type='kvm'>\n  <name>{name}</name>\n  <uuid>{UUID}</uuid>\n</domain>\n")
}

fn cookie(name: &str) -> Vec<u8> {
    format!("<qemu-migration>\n<name>{name}</name>\n<uuid>{UUID}</uuid>\n</qemu-migration>\n\0")
        .into_bytes()
}

fn prepare(serial: u32, name: &str, more: &[(&str, &str)], cookie: &[u8], flags: u32) -> Vec<u8> {
    let definition = definition(name);
    let usual =
        [("destination_xml", definition.as_str()), ("disks_uri", "unix:///run/vmferry/d.sock")];
    call(303, serial, &args(&[&usual, more].concat(), cookie, flags))
}

fn finish(serial: u32, name: &str, cookie: &[u8], cancelled: u32) -> Vec<u8> {
    let usual = [("migrate_uri", "unix:///run/vmferry/m.sock"), ("destination_name", name)];
    call(306, serial, &[args(&usual, cookie, 3), words(&[cancelled])].concat())
}
