//! Any bytes, read as greetings, control messages and messages of a probe.

use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlHeader, ControlMessage, HELLO_BYTES, HELLO_REPLY_BYTES, Hello,
    HelloReply, MAX_BODY_BYTES, MAX_CONFIG_BYTES, MAX_FREE_RUNS, MAX_LACKING_BYTES, MAX_LANES,
    MAX_NAME_BYTES, MAX_REASON_BYTES, MAX_SLOTS, PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN,
    ProbeHeader, ProbeMessage, Reason, WireError, table_checksum,
};

use super::input::Input;

/// With an even first byte the rest is read as is. With an odd first byte the rest contains message
/// bodies, each preceded by its type and a length of two bytes, and this target builds their
/// headers.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    if input.byte().is_multiple_of(2) {
        plain(input.0);
    } else {
        sealed(input);
    }
}

fn plain(mut data: &[u8]) {
    if let Some(bytes) = data.first_chunk::<HELLO_BYTES>()
        && let Ok(hello) = Hello::parse(bytes)
    {
        assert_eq!(Hello::parse(&hello.encode()), Ok(hello));
        data = &data[HELLO_BYTES..];
    } else if let Some(bytes) = data.first_chunk::<HELLO_REPLY_BYTES>()
        && let Ok(reply) = HelloReply::parse(bytes)
    {
        assert_eq!(HelloReply::parse(&reply.encode()), Ok(reply));
        data = &data[HELLO_REPLY_BYTES..];
    }
    for version in PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION_MAX {
        messages(version, data);
    }
    probes(data);
}

/// Reads messages of a probe until one is invalid.
fn probes(mut data: &[u8]) {
    while let Some((head, rest)) = data.split_first_chunk::<CONTROL_HEADER_BYTES>() {
        let Ok(header) = ProbeHeader::parse(head) else { return };
        let Some((body, rest)) = rest.split_at_checked(header.body_bytes()) else { return };
        let Ok(message) = header.decode(body) else { return };
        check_probe(&message);
        data = rest;
    }
}

/// Checks that a decoded message can be encoded again.
fn check_probe(message: &ProbeMessage) {
    let mut again = Vec::new();
    message.encode(&mut again);
    let (head, body) = again.split_first_chunk().unwrap();
    assert_eq!(ProbeHeader::parse(head).unwrap().decode(body).as_ref(), Ok(message));
}

/// Decodes a probe's message with this number and body, using a matching header.
pub fn decode_probe(number: u16, body: &[u8]) -> Result<ProbeMessage, WireError> {
    ProbeHeader::parse(&head_of(number, body))?.decode(body)
}

/// Reads messages of a protocol version until one is invalid.
fn messages(version: u16, mut data: &[u8]) {
    while let Some((head, rest)) = data.split_first_chunk::<CONTROL_HEADER_BYTES>() {
        let Ok(header) = ControlHeader::parse(head) else { return };
        let Some((body, rest)) = rest.split_at_checked(header.body_bytes()) else { return };
        let Ok(read) = header.decode(version, body) else { return };
        check(&read.message, body);
        data = rest;
    }
}

fn sealed(mut input: Input<'_>) {
    while !input.is_empty() {
        let number = u16::from(input.byte());
        let length = usize::from(input.word());
        let body = input.bytes(length);
        match decode_probe(number, body) {
            Ok(message) => check_probe(&message),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        let read = (PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION_MAX).map(|version| {
            let read = decode(version, number, body);
            match &read {
                Ok(message) => {
                    assert_eq!(message.number(), number);
                    check(message, body);
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
            read
        });
        // Later versions accept the messages of a version unchanged.
        let read: Vec<_> = read.collect();
        assert!(read.is_sorted_by(|older, newer| older.is_err() || older == newer), "{read:?}");
    }
}

/// Decodes a body in a protocol version, using a matching header.
pub fn decode(version: u16, number: u16, body: &[u8]) -> Result<ControlMessage, WireError> {
    Ok(ControlHeader::parse(&head_of(number, body))?.decode(version, body)?.message)
}

fn head_of(number: u16, body: &[u8]) -> [u8; CONTROL_HEADER_BYTES] {
    let mut head = [0; CONTROL_HEADER_BYTES];
    head[..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
    head[4..6].copy_from_slice(&number.to_le_bytes());
    head[8..].copy_from_slice(&table_checksum(body).to_le_bytes());
    head
}

/// Checks that a decoded message is within its limits and can be encoded again.
fn check(message: &ControlMessage, body: &[u8]) {
    assert!(!message.name().is_empty());
    assert!(body.len() <= MAX_BODY_BYTES as usize || message.name() == "FINAL");
    limits(message);
    let mut again = Vec::new();
    message.encode(PROTOCOL_VERSION_MAX, &mut again);
    let (head, again) = again.split_first_chunk().unwrap();
    // A number may be encoded in more bytes than it needs.
    assert!(
        again.len() <= body.len(),
        "{} grew from {} to {}",
        message.name(),
        body.len(),
        again.len()
    );
    let header = ControlHeader::parse(head).unwrap();
    let read = header.decode(PROTOCOL_VERSION_MAX, again).map(|read| read.message);
    assert_eq!(read.as_ref(), Ok(message));
}

fn limits(message: &ControlMessage) {
    let printable = |text: &str| !text.chars().any(char::is_control);
    let is_line = |reason: &Reason| {
        assert!(reason.text.len() <= MAX_REASON_BYTES && printable(&reason.text));
    };
    match message {
        ControlMessage::Begin { guest, vmm, config, layout, lanes, .. } => {
            assert!(guest.name.len() <= MAX_NAME_BYTES && printable(&guest.name));
            assert!(printable(vmm) && config.len() <= MAX_CONFIG_BYTES);
            assert!((1..=MAX_SLOTS).contains(&layout.len()) && (1..=MAX_LANES).contains(lanes));
        }
        ControlMessage::Final { lane_sequences, .. } => {
            assert!((1..=usize::from(MAX_LANES)).contains(&lane_sequences.len()));
            assert!(lane_sequences.capacity() <= 4 * usize::from(MAX_LANES));
        }
        ControlMessage::Free { runs, .. } => assert!(runs.len() <= MAX_FREE_RUNS),
        ControlMessage::Lacking { bits, .. } => assert!(bits.len() <= MAX_LACKING_BYTES),
        ControlMessage::Refuse { reason, .. }
        | ControlMessage::Abort { reason }
        | ControlMessage::Aborted { reason, .. } => is_line(reason),
        _ => {}
    }
}
