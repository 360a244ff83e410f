//! Messages of a probe: a channel with role 5, on which a source without a session asks what a
//! destination has, whether it would admit a guest, and how fast the link is.
//!
//! Their form and numbers are the same in every version of the protocol. A probe channel carries no
//! other messages.

use serde::{Deserialize, Serialize};

use crate::body::MAX_VMM_BYTES;
use crate::error::WireError;
use crate::{CONTROL_HEADER_BYTES, MAX_CONFIG_BYTES, MAX_SLOTS, crc32c, field};
use vmferry_handover::{GuestIdentity, MAX_NAME_BYTES};
use vmferry_memory::SlotLayout;

/// Longest body of any message of a probe.
pub const MAX_PROBE_BYTES: u32 = 64 << 10;
/// Maximum length of the facts about a host (JSON).
pub const MAX_FACTS_BYTES: usize = 32 << 10;
/// Maximum length of the reason for not admitting a source or a guest, or for not taking a machine.
pub const MAX_REFUSAL_BYTES: usize = 1024;

/// A message of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeMessage {
    /// 32, source: asks what the destination has, and whether it would admit a guest.
    Ask {
        /// The guest that the question is about, if any.
        guest: Option<GuestIdentity>,
    },
    /// 33, destination: the answer to ASK.
    Tell {
        /// Why the policy would refuse the source or the guest; `None` if it would admit them.
        refusal: Option<String>,
        /// Facts about the host, as JSON. A reader ignores unknown members.
        facts: Vec<u8>,
    },
    /// 34, source: asks for an immediate answer.
    Echo {
        /// Returned in the answer.
        nonce: u64,
    },
    /// 35, destination: the answer to ECHO.
    Echoed {
        /// The nonce of the ECHO.
        nonce: u64,
        /// The destination's clock, in microseconds since 1970.
        clock_us: u64,
    },
    /// 36, source: filler that measures the link's rate.
    Load {
        /// Ignored by the destination.
        filler: Vec<u8>,
    },
    /// 37, source: asks whether the VMM that waits at the destination could take this machine. Only
    /// for a destination whose facts say that it compares.
    Compare {
        /// As in BEGIN.
        vmm: String,
        /// As in BEGIN.
        config: Vec<u8>,
        /// As in BEGIN.
        layout: Vec<SlotLayout>,
    },
    /// 38, destination: the answer to COMPARE.
    Compared(Compared),
}

/// The answer to COMPARE.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Compared {
    /// The VMM could take the machine.
    Fits,
    /// It would refuse the machine, for this reason.
    Differs(String),
    /// The destination could not compare them, for this reason.
    Unknown(String),
}

/// A checked header. It has the form of a control message's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeHeader {
    body_bytes: u32,
    number: u16,
    checksum: u32,
}

/// Numbers below 32 are control messages.
const ASK: u16 = 32;
const TELL: u16 = 33;
const ECHO: u16 = 34;
const ECHOED: u16 = 35;
const LOAD: u16 = 36;
const COMPARE: u16 = 37;
const COMPARED: u16 = 38;

fn name_of(number: u16) -> Option<&'static str> {
    let names = ["ASK", "TELL", "ECHO", "ECHOED", "LOAD", "COMPARE", "COMPARED"];
    names.get(usize::from(number.checked_sub(ASK)?)).copied()
}

impl ProbeHeader {
    /// Parses a header, and checks the body length before anything is allocated for the body.
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
            return Err(WireError::Reserved("a header of a probe"));
        }
        if header.body_bytes > MAX_PROBE_BYTES {
            let (bytes, limit) = (header.body_bytes.into(), MAX_PROBE_BYTES.into());
            return Err(WireError::TooLong { message, bytes, limit });
        }
        Ok(header)
    }

    /// Length of the body in bytes.
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.body_bytes as usize
    }

    /// Decodes the message from its whole body.
    ///
    /// # Errors
    /// A checksum mismatch, or a body that is not exactly this message.
    pub fn decode(&self, body: &[u8]) -> Result<ProbeMessage, WireError> {
        let message = name_of(self.number).unwrap_or("a message");
        let expected = crc32c(body);
        if body.len() != self.body_bytes() || expected != self.checksum {
            let found = self.checksum;
            return Err(WireError::Checksum { what: message, expected, found });
        }
        let bad = |detail: String| WireError::BadBody { message, detail };
        match self.number {
            LOAD => Ok(ProbeMessage::Load { filler: body.to_vec() }),
            number => Body::read(number, body).map_err(bad)?.message().map_err(bad),
        }
    }
}

/// The encoded form of each body. LOAD's body is its filler, without an encoding.
enum Body {
    Ask(Option<(uuid::Bytes, String)>),
    Tell(Option<String>, Vec<u8>),
    Echo(u64),
    Echoed(u64, u64),
    Compare(String, Vec<u8>, Vec<SlotLayout>),
    Compared(Compared),
}

impl Body {
    fn read(number: u16, body: &[u8]) -> Result<Self, String> {
        fn whole<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, String> {
            let (value, left) = postcard::take_from_bytes(body).map_err(|it| it.to_string())?;
            if left.is_empty() { Ok(value) } else { Err(format!("{} bytes left over", left.len())) }
        }
        Ok(match number {
            ASK => Self::Ask(whole(body)?),
            TELL => {
                let (refusal, facts): (_, serde_bytes::ByteBuf) = whole(body)?;
                Self::Tell(refusal, facts.into_vec())
            }
            ECHO => Self::Echo(whole(body)?),
            COMPARE => {
                let (vmm, config, layout): (_, serde_bytes::ByteBuf, _) = whole(body)?;
                Self::Compare(vmm, config.into_vec(), layout)
            }
            COMPARED => Self::Compared(whole(body)?),
            _ => {
                let (nonce, clock_us) = whole(body)?;
                Self::Echoed(nonce, clock_us)
            }
        })
    }

    fn message(self) -> Result<ProbeMessage, String> {
        Ok(match self {
            Self::Ask(guest) => {
                let guest = guest
                    .map(|(uuid, name)| GuestIdentity { uuid: uuid::Uuid::from_bytes(uuid), name });
                let bad = |guest: &GuestIdentity| {
                    guest.name.len() > MAX_NAME_BYTES || guest.name.chars().any(char::is_control)
                };
                if guest.as_ref().is_some_and(bad) {
                    return Err("the guest's name is too long or not printable".into());
                }
                ProbeMessage::Ask { guest }
            }
            Self::Tell(refusal, facts) => {
                let too_long = |text: &String| text.len() > MAX_REFUSAL_BYTES;
                if facts.len() > MAX_FACTS_BYTES || refusal.as_ref().is_some_and(too_long) {
                    return Err("a text is too long".into());
                }
                ProbeMessage::Tell { refusal, facts }
            }
            Self::Echo(nonce) => ProbeMessage::Echo { nonce },
            Self::Echoed(nonce, clock_us) => ProbeMessage::Echoed { nonce, clock_us },
            Self::Compare(vmm, config, layout) => {
                if vmm.len() > MAX_VMM_BYTES || vmm.chars().any(char::is_control) {
                    return Err("the VMM's name is too long or not printable".into());
                }
                if config.len() > MAX_CONFIG_BYTES || layout.len() > MAX_SLOTS {
                    return Err("the configuration is too long".into());
                }
                ProbeMessage::Compare { vmm, config, layout }
            }
            Self::Compared(Compared::Differs(text) | Compared::Unknown(text))
                if text.len() > MAX_REFUSAL_BYTES =>
            {
                return Err("a text is too long".into());
            }
            Self::Compared(compared) => ProbeMessage::Compared(compared),
        })
    }
}

impl ProbeMessage {
    fn number(&self) -> u16 {
        match self {
            Self::Ask { .. } => ASK,
            Self::Tell { .. } => TELL,
            Self::Echo { .. } => ECHO,
            Self::Echoed { .. } => ECHOED,
            Self::Load { .. } => LOAD,
            Self::Compare { .. } => COMPARE,
            Self::Compared(_) => COMPARED,
        }
    }

    /// The message's name in the specification.
    #[must_use]
    pub fn name(&self) -> &'static str {
        name_of(self.number()).unwrap_or("?")
    }

    /// Appends the message with its header.
    pub fn encode(&self, into: &mut Vec<u8>) {
        let start = into.len();
        into.extend_from_slice(&[0; CONTROL_HEADER_BYTES]);
        match self {
            Self::Ask { guest } => {
                let guest = guest.as_ref().map(|it| (*it.uuid.as_bytes(), it.name.as_str()));
                put(&guest, into);
            }
            Self::Tell { refusal, facts } => {
                put(&(refusal, serde_bytes::Bytes::new(facts)), into);
            }
            Self::Echo { nonce } => put(nonce, into),
            Self::Echoed { nonce, clock_us } => put(&(nonce, clock_us), into),
            Self::Load { filler } => into.extend_from_slice(filler),
            Self::Compare { vmm, config, layout } => {
                put(&(vmm, serde_bytes::Bytes::new(config), layout), into);
            }
            Self::Compared(compared) => put(compared, into),
        }
        let (header, body) = into[start..].split_at_mut(CONTROL_HEADER_BYTES);
        // The peer's limit rejects a body whose length does not fit the header.
        let body_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
        header[0..4].copy_from_slice(&body_bytes.to_le_bytes());
        header[4..6].copy_from_slice(&self.number().to_le_bytes());
        header[8..12].copy_from_slice(&crc32c(body).to_le_bytes());
    }
}

/// Appends a value. Serialization into a vector fails only for types that postcard does not
/// support, and these types are supported.
fn put(value: &impl Serialize, into: &mut Vec<u8>) {
    match postcard::to_extend(value, std::mem::take(into)) {
        Ok(longer) => *into = longer,
        Err(error) => debug_assert!(false, "{error}"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vmferry_memory::SlotId;

    use super::*;

    fn decode(bytes: &[u8]) -> Result<ProbeMessage, WireError> {
        let header = ProbeHeader::parse(&field(bytes, 0))?;
        header.decode(&bytes[CONTROL_HEADER_BYTES..])
    }

    /// Frozen: if this test fails, the code is wrong.
    #[test]
    fn golden_bytes() {
        let guest = GuestIdentity { uuid: uuid::Uuid::from_bytes([1; 16]), name: "web".into() };
        let cases = [
            (ProbeMessage::Ask { guest: None }, "010000002000000051537d52", "00"),
            (
                ProbeMessage::Ask { guest: Some(guest) },
                "",
                "010101010101010101010101010101010103776562",
            ),
            (
                ProbeMessage::Tell { refusal: Some("no".into()), facts: b"{}".to_vec() },
                "",
                "01026e6f027b7d",
            ),
            (ProbeMessage::Tell { refusal: None, facts: vec![] }, "", "0000"),
            (ProbeMessage::Echo { nonce: 300 }, "", "ac02"),
            (ProbeMessage::Echoed { nonce: 1, clock_us: 128 }, "", "018001"),
            (ProbeMessage::Load { filler: vec![7, 8] }, "", "0708"),
            (
                ProbeMessage::Compare {
                    vmm: "q".into(),
                    config: b"{}".to_vec(),
                    layout: vec![SlotLayout { slot: SlotId(1), gpa: 4096, pages: 2 }],
                },
                "",
                "0171027b7d0101802002",
            ),
            (ProbeMessage::Compared(Compared::Fits), "", "00"),
            (ProbeMessage::Compared(Compared::Differs("no".into())), "", "01026e6f"),
            (ProbeMessage::Compared(Compared::Unknown("no".into())), "", "02026e6f"),
        ];
        for (message, header, body) in cases {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            let hex = |bytes: &[u8]| bytes.iter().map(|it| format!("{it:02x}")).collect::<String>();
            assert_eq!(hex(&bytes[CONTROL_HEADER_BYTES..]), body, "{}", message.name());
            if !header.is_empty() {
                assert_eq!(hex(&bytes[..CONTROL_HEADER_BYTES]), header);
            }
            assert_eq!(bytes[4..8], [u8::try_from(message.number()).unwrap(), 0, 0, 0]);
            assert_eq!(decode(&bytes), Ok(message));
        }
    }

    #[test]
    fn header_refuses_long_and_unknown_messages_before_the_body_is_read() {
        let header = |bytes: u32, number: u16, reserved: u8| {
            let mut header = [0; CONTROL_HEADER_BYTES];
            header[..4].copy_from_slice(&bytes.to_le_bytes());
            header[4..6].copy_from_slice(&number.to_le_bytes());
            header[6] = reserved;
            ProbeHeader::parse(&header)
        };
        assert!(header(MAX_PROBE_BYTES, LOAD, 0).is_ok());
        assert!(matches!(header(MAX_PROBE_BYTES + 1, LOAD, 0), Err(WireError::TooLong { .. })));
        for number in [0, 1, 18, ASK - 1, COMPARED + 1, u16::MAX] {
            assert_eq!(header(0, number, 0), Err(WireError::UnknownMessage(number)));
        }
        assert!(matches!(header(0, ASK, 1), Err(WireError::Reserved(_))));
    }

    #[test]
    fn decode_refuses_damaged_leftover_and_oversized_bodies() {
        let mut bytes = Vec::new();
        ProbeMessage::Echo { nonce: 9 }.encode(&mut bytes);
        let mut damaged = bytes.clone();
        damaged[CONTROL_HEADER_BYTES] ^= 1;
        assert!(matches!(decode(&damaged), Err(WireError::Checksum { .. })));
        bytes.push(0);
        assert!(matches!(decode(&bytes), Err(WireError::Checksum { .. })));
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        let slot = SlotLayout { slot: SlotId(0), gpa: 0, pages: 1 };
        let compare = |vmm: &str, config, slots| ProbeMessage::Compare {
            vmm: vmm.into(),
            config: vec![0; config],
            layout: vec![slot; slots],
        };
        for message in [
            ProbeMessage::Ask {
                guest: Some(GuestIdentity { uuid: uuid::Uuid::nil(), name: long }),
            },
            ProbeMessage::Ask {
                guest: Some(GuestIdentity { uuid: uuid::Uuid::nil(), name: "a\nb".into() }),
            },
            ProbeMessage::Tell { refusal: None, facts: vec![0; MAX_FACTS_BYTES + 1] },
            ProbeMessage::Tell { refusal: Some("x".repeat(1025)), facts: vec![] },
            compare("a\nb", 2, 1),
            compare(&"v".repeat(MAX_VMM_BYTES + 1), 2, 1),
            compare("v", MAX_CONFIG_BYTES + 1, 1),
            compare("v", 2, MAX_SLOTS + 1),
            ProbeMessage::Compared(Compared::Differs("x".repeat(1025))),
            ProbeMessage::Compared(Compared::Unknown("x".repeat(1025))),
        ] {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            assert!(matches!(decode(&bytes), Err(WireError::BadBody { .. })), "{message:?}");
        }
    }

    proptest! {
        #[test]
        fn decode_accepts_or_refuses_any_bytes(
            number in ASK - 1..COMPARED + 2,
            body in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut bytes = vec![0; CONTROL_HEADER_BYTES];
            bytes[0..4].copy_from_slice(&u32::try_from(body.len()).unwrap().to_le_bytes());
            bytes[4..6].copy_from_slice(&number.to_le_bytes());
            bytes[8..12].copy_from_slice(&crc32c(&body).to_le_bytes());
            bytes.extend(&body);
            if let Ok(message) = decode(&bytes) {
                let mut again = Vec::new();
                message.encode(&mut again);
                prop_assert_eq!(decode(&again), Ok(message));
            }
        }
    }
}
