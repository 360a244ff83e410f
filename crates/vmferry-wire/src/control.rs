//! The header of a control message, and the two ways through it.

use crate::error::WireError;
use crate::message::{ControlMessage, name_of};
use crate::{crc32c, field};

/// Length of the header before every control message.
pub const CONTROL_HEADER_BYTES: usize = 12;
/// Longest body of any message but FINAL.
pub const MAX_BODY_BYTES: u32 = 64 << 10;
/// Longest body of FINAL, which carries the device state: QEMU's is under 1 MiB, and a machine
/// with 1024 vCPUs and AMX state stays under this.
pub const MAX_FINAL_BYTES: u32 = 64 << 20;

const FINAL: u16 = 5;

/// A checked header.
///
/// ```text
///  0            4      6   8                 12
///  +------------+------+---+-----------------+
///  | body bytes | type | 0 | CRC-32C of body |
///  +------------+------+---+-----------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlHeader {
    body_bytes: u32,
    number: u16,
    checksum: u32,
}

impl ControlHeader {
    /// Reads a header and checks the length against the limit of its type, before anything is
    /// allocated for the body.
    ///
    /// # Errors
    /// An unknown type, reserved bits, or a body that is too long.
    pub fn parse(bytes: &[u8; CONTROL_HEADER_BYTES]) -> Result<Self, WireError> {
        let header = Self {
            body_bytes: u32::from_le_bytes(field(bytes, 0)),
            number: u16::from_le_bytes(field(bytes, 4)),
            checksum: u32::from_le_bytes(field(bytes, 8)),
        };
        let message = name_of(header.number).ok_or(WireError::UnknownMessage(header.number))?;
        if bytes[6..8] != [0, 0] {
            return Err(WireError::Reserved("a control header"));
        }
        let limit = if header.number == FINAL { MAX_FINAL_BYTES } else { MAX_BODY_BYTES };
        if header.body_bytes > limit {
            return Err(WireError::TooLong {
                message,
                bytes: header.body_bytes.into(),
                limit: limit.into(),
            });
        }
        Ok(header)
    }

    /// Length of the body in bytes.
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.body_bytes as usize
    }

    /// The message, from its whole body.
    ///
    /// # Errors
    /// A checksum that does not fit, or a body that is not exactly this message.
    pub fn decode(&self, body: &[u8]) -> Result<ControlMessage, WireError> {
        let expected = crc32c(body);
        if body.len() != self.body_bytes() || expected != self.checksum {
            return Err(WireError::Checksum {
                what: name_of(self.number).unwrap_or("a message"),
                expected,
                found: self.checksum,
            });
        }
        ControlMessage::decode_body(self.number, body)
    }
}

impl ControlMessage {
    /// Appends the message with its header.
    pub fn encode(&self, into: &mut Vec<u8>) {
        let start = into.len();
        into.extend_from_slice(&[0; CONTROL_HEADER_BYTES]);
        self.encode_body(into);
        let (header, body) = into[start..].split_at_mut(CONTROL_HEADER_BYTES);
        // A longer body than a header can tell is refused by the peer's limit anyway.
        let body_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
        header[0..4].copy_from_slice(&body_bytes.to_le_bytes());
        header[4..6].copy_from_slice(&self.number().to_le_bytes());
        header[8..12].copy_from_slice(&crc32c(body).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;
    use vmferry_memory::{SlotId, SlotLayout};

    use super::*;
    use crate::{GuestIdentity, Reason, ReasonCode, SessionId, SessionWord, Token};

    fn encoded(message: &ControlMessage) -> Vec<u8> {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        bytes
    }

    fn decoded(bytes: &[u8]) -> Result<ControlMessage, WireError> {
        let (header, body) = bytes.split_at(CONTROL_HEADER_BYTES);
        ControlHeader::parse(header.try_into().unwrap())?.decode(body)
    }

    fn examples() -> Vec<(ControlMessage, &'static str)> {
        let session = SessionId([1; 16]);
        let reason = Reason::new(ReasonCode::Busy, "no");
        let guest = GuestIdentity { uuid: Uuid::from_bytes([2; 16]), name: "web".into() };
        let layout = vec![SlotLayout { slot: SlotId(0), gpa: 0, pages: 300 }];
        vec![
            (
                ControlMessage::Begin {
                    session,
                    guest,
                    vmm: "x/y".into(),
                    config: vec![9, 9],
                    layout,
                    lanes: 2,
                    verify: true,
                    reconnect_ms: 300,
                },
                "01010101010101010101010101010101020202020202020202020202020202020377656203782f7902\
                 090901\
                 0000ac020201ac02",
            ),
            (ControlMessage::Accept { token: Token([3; 16]) }, "03030303030303030303030303030303"),
            (ControlMessage::Refuse { reason: reason.clone() }, "05026e6f"),
            (ControlMessage::Placed { lane: 1, sequence: 300 }, "01ac02"),
            (
                ControlMessage::Final { lane_sequences: vec![7], digest: 1, state: vec![0xee] },
                "01070101ee",
            ),
            (ControlMessage::Ready { digest: 5, load_us: 6 }, "0506"),
            (ControlMessage::Verify {}, ""),
            (ControlMessage::Verified { hash: 1, pages: 2, elapsed_us: 3 }, "010203"),
            (ControlMessage::Commit { session }, "01010101010101010101010101010101"),
            (
                ControlMessage::Running { session, start_us: 4 },
                "0101010101010101010101010101010104",
            ),
            (
                ControlMessage::Aborted { session, reason: reason.clone() },
                "0101010101010101010101010101010105026e6f",
            ),
            (ControlMessage::Abort { reason }, "05026e6f"),
            (ControlMessage::Ping { nonce: 1 }, "01"),
            (ControlMessage::Pong { nonce: 1 }, "01"),
            (ControlMessage::Query { session }, "01010101010101010101010101010101"),
            (
                ControlMessage::Answer { session, word: SessionWord::Owns },
                "0101010101010101010101010101010103",
            ),
            (ControlMessage::Withdraw {}, ""),
            (
                ControlMessage::Free { slot: SlotId(1), runs: vec![(2, 300), (512, 1)] },
                "010202ac02800401",
            ),
        ]
    }

    /// The wire of version 1: if this test fails, the version must change.
    #[test]
    fn golden_bytes() {
        for (index, (message, body)) in examples().into_iter().enumerate() {
            assert_eq!(usize::from(message.number()), index + 1);
            let bytes = encoded(&message);
            let hex: String =
                bytes[CONTROL_HEADER_BYTES..].iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, body, "{}", message.name());
            assert_eq!(bytes[4..8], [index as u8 + 1, 0, 0, 0]);
            assert_eq!(decoded(&bytes), Ok(message));
        }
    }

    #[test]
    fn every_damaged_byte_is_noticed() {
        for (message, _) in examples() {
            let good = encoded(&message);
            for at in 0..good.len() {
                let mut bad = good.clone();
                bad[at] ^= 0x40;
                assert_ne!(decoded(&bad), Ok(message.clone()), "{} byte {at}", message.name());
            }
        }
    }

    #[test]
    fn lengths_are_refused_before_the_body_is_read() {
        let header = |bytes: u32, number: u16| {
            let mut header = [0; CONTROL_HEADER_BYTES];
            header[0..4].copy_from_slice(&bytes.to_le_bytes());
            header[4..6].copy_from_slice(&number.to_le_bytes());
            ControlHeader::parse(&header)
        };
        assert!(header(MAX_BODY_BYTES, 1).is_ok());
        assert!(matches!(header(MAX_BODY_BYTES + 1, 1), Err(WireError::TooLong { .. })));
        assert!(header(MAX_FINAL_BYTES, FINAL).is_ok());
        assert!(matches!(header(u32::MAX, FINAL), Err(WireError::TooLong { .. })));
        assert_eq!(header(0, 99), Err(WireError::UnknownMessage(99)));
    }

    #[test]
    fn what_is_left_over_is_an_error() {
        let mut bytes = encoded(&ControlMessage::Ping { nonce: 1 });
        bytes.push(0);
        let body = bytes[CONTROL_HEADER_BYTES..].to_vec();
        bytes[0] = body.len() as u8;
        bytes[8..12].copy_from_slice(&crc32c(&body).to_le_bytes());
        let error = decoded(&bytes).unwrap_err();
        assert_eq!(error.to_string(), "bad PING: 1 bytes are left over");
    }

    #[test]
    fn a_begin_outside_its_limits_is_refused() {
        let (begin, _) = examples().swap_remove(0);
        let ControlMessage::Begin { session, guest, vmm, config, layout, .. } = begin else {
            unreachable!()
        };
        let zero_lanes = ControlMessage::Begin {
            session,
            guest: guest.clone(),
            vmm: vmm.clone(),
            config: config.clone(),
            layout,
            lanes: 0,
            verify: false,
            reconnect_ms: 0,
        };
        assert!(matches!(decoded(&encoded(&zero_lanes)), Err(WireError::BadBody { .. })));
        let no_slots = ControlMessage::Begin {
            session,
            guest,
            vmm,
            config,
            layout: vec![],
            lanes: 1,
            verify: false,
            reconnect_ms: 0,
        };
        assert!(matches!(decoded(&encoded(&no_slots)), Err(WireError::BadBody { .. })));
    }

    /// Numbers take eight times the bytes in memory that they take on the wire: of 64 MiB only the first few are read.
    #[test]
    fn lanes_beyond_the_limit_are_not_even_read() {
        let lanes = MAX_FINAL_BYTES as usize - 8;
        let mut body = Vec::new();
        let mut length = lanes;
        while length >= 0x80 {
            body.push(length as u8 | 0x80);
            length >>= 7;
        }
        body.push(length as u8);
        // Behind the 17th number there is none, so whoever reads on says so.
        body.extend_from_slice(&[1; 17]);
        body.extend_from_slice(&[0xff; 16]);
        let error = ControlMessage::decode_body(FINAL, &body).unwrap_err();
        let WireError::BadBody { message: "FINAL", detail } = error else { panic!("{error}") };
        let of_the_seventeenth = postcard::from_bytes::<Vec<u64>>(&body).unwrap_err().to_string();
        assert_ne!(detail, of_the_seventeenth, "it was read on");
    }

    proptest! {
        #[test]
        fn any_bytes_never_panic(number in 0_u16..20, body in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut header = [0; CONTROL_HEADER_BYTES];
            header[0..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
            header[4..6].copy_from_slice(&number.to_le_bytes());
            header[8..12].copy_from_slice(&crc32c(&body).to_le_bytes());
            if let Ok(header) = ControlHeader::parse(&header)
                && let Ok(message) = header.decode(&body)
            {
                // Whatever is read can be said again.
                prop_assert_eq!(decoded(&encoded(&message)), Ok(message));
            }
        }
    }
}
