//! A small encoder of libvirt's packets, for tests. It shares no code with the decoder.

pub const UUID: &str = "c7a5fdbd-cdaf-9455-926a-d65c16db1809";
pub const OTHER_UUID: &str = "11111111-2222-3333-4444-555555555555";
pub const REMOTE: u32 = 0x2000_8086;
pub const KEEPALIVE: u32 = 0x6b65_6570;

/// A typed parameter's value.
#[derive(Clone, Copy, Debug)]
pub enum Value<'a> {
    Int(i32),
    Long(u64),
    Bool(bool),
    Text(&'a str),
}

pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

pub fn opaque(data: &[u8]) -> Vec<u8> {
    let padding = [0; 3];
    let missing = (4 - data.len() % 4) % 4;
    [&words(&[data.len() as u32]), data, &padding[..missing]].concat()
}

pub fn params(list: &[(&str, Value<'_>)]) -> Vec<u8> {
    let mut bytes = words(&[list.len() as u32]);
    for (name, value) in list {
        bytes.extend(opaque(name.as_bytes()));
        bytes.extend(match value {
            Value::Int(number) => words(&[1, *number as u32]),
            Value::Long(number) => words(&[4, (number >> 32) as u32, *number as u32]),
            Value::Bool(flag) => words(&[6, u32::from(*flag)]),
            Value::Text(text) => [words(&[7]), opaque(text.as_bytes())].concat(),
        });
    }
    bytes
}

/// A packet of any kind.
pub fn packet(header: [u32; 6], payload: &[u8]) -> Vec<u8> {
    [&words(&[payload.len() as u32 + 28])[..], &words(&header), payload].concat()
}

/// A call of libvirt's own program.
pub fn call(procedure: u32, serial: u32, payload: &[u8]) -> Vec<u8> {
    packet([REMOTE, 1, procedure, 0, serial, 0], payload)
}

pub fn reply(procedure: u32, serial: u32, status: u32, payload: &[u8]) -> Vec<u8> {
    packet([REMOTE, 1, procedure, 1, serial, status], payload)
}

pub fn ping() -> Vec<u8> {
    packet([KEEPALIVE, 1, 1, 2, 0, 0], &[])
}

pub fn pong() -> Vec<u8> {
    packet([KEEPALIVE, 1, 2, 2, 0, 0], &[])
}

pub fn open(uri: Option<&str>) -> Vec<u8> {
    match uri {
        Some(uri) => [words(&[1]), opaque(uri.as_bytes()), words(&[0])].concat(),
        None => words(&[0, 0]),
    }
}

pub fn definition(name: &str, uuid: &str) -> String {
    format!("<domain type='kvm'>\n  <name>{name}</name>\n  <uuid>{uuid}</uuid>\n</domain>\n")
}

pub fn cookie(name: &str, uuid: &str) -> Vec<u8> {
    format!(
        "<qemu-migration>\n  <name>{name}</name>\n  <uuid>{uuid}</uuid>\n  \
        <hostname>a</hostname>\n  <hostuuid>{OTHER_UUID}</hostuuid>\n</qemu-migration>\n\0"
    )
    .into_bytes()
}

/// The arguments of a Prepare.
pub fn prepare_args(list: &[(&str, Value<'_>)], cookie: &[u8], flags: u32) -> Vec<u8> {
    [params(list), opaque(cookie), words(&[flags])].concat()
}

/// A usual Prepare of a guest.
pub fn prepare(serial: u32, name: &str) -> Vec<u8> {
    let definition = definition(name, UUID);
    let list = [
        ("destination_xml", Value::Text(&definition)),
        ("migrate_uri", Value::Text("unix:///run/m.sock")),
        ("disks_uri", Value::Text("unix:///run/d.sock")),
        ("bandwidth", Value::Long(100)),
    ];
    call(303, serial, &prepare_args(&list, &cookie(name, UUID), 0x43))
}

/// A usual Finish of a guest.
pub fn finish(serial: u32, name: &str, cancelled: u32) -> Vec<u8> {
    let definition = definition(name, UUID);
    let list = [
        ("destination_xml", Value::Text(&definition)),
        ("migrate_uri", Value::Text("unix:///run/m.sock")),
        ("destination_name", Value::Text(name)),
    ];
    let args = [prepare_args(&list, &cookie(name, UUID), 0x43), words(&[cancelled])].concat();
    call(306, serial, &args)
}
