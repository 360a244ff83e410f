//! Protocol errors that a peer can cause.

/// Bytes that violate the protocol, with the value found and the value allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The first bytes of a channel are not a greeting.
    #[error(
        "this is not vmferry's protocol: the peer speaks {what}; check the port and whether one \
        side uses tls: and the other tcp:"
    )]
    NotVmferry {
        /// What the first bytes look like.
        what: String,
    },
    /// A control message of a type that does not exist.
    #[error("unknown control message type {0}")]
    UnknownMessage(u16),
    /// A control message longer than its type may be.
    #[error("{message} of {bytes} bytes exceeds the limit of {limit} bytes")]
    TooLong {
        /// The message's name.
        message: &'static str,
        /// The length in the header.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Reserved bits that are not zero.
    #[error("reserved bits of {0} are set")]
    Reserved(&'static str),
    /// A checksum that does not match its bytes.
    #[error("the checksum of {what} is {found:#010x}, its bytes give {expected:#010x}")]
    Checksum {
        /// What was damaged.
        what: &'static str,
        /// The checksum computed over the bytes.
        expected: u32,
        /// The checksum that was sent.
        found: u32,
    },
    /// A message whose body cannot be decoded.
    #[error("bad {message}: {detail}")]
    BadBody {
        /// The message's name.
        message: &'static str,
        /// What is wrong.
        detail: String,
    },
    /// A mandatory field that this release does not know. A newer release sends it.
    #[error(
        "{message} has the mandatory field {field}, which vmferry {} does not know and must not \
        ignore: upgrade vmferry on the host that refuses it, or leave out the option that asks \
        for it",
        env!("CARGO_PKG_VERSION")
    )]
    UnknownField {
        /// The message's name.
        message: &'static str,
        /// The field's number.
        field: u16,
    },
    /// A frame that does not begin with the magic number.
    #[error("no frame begins here: found {0:#010x}")]
    BadMagic(u32),
    /// A frame header or table that violates a rule.
    #[error("bad frame: {0}")]
    BadFrame(String),
    /// A request for pages that violates a rule.
    #[error("bad request for pages: {0}")]
    BadRequest(String),
    /// A part of a tunnel's streams that violates a rule.
    #[error("bad part of a tunnel's stream: {0}")]
    BadTunnel(String),
}
