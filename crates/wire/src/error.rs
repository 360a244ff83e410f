//! What a peer can get wrong.

/// Bytes that are not this protocol, with what was found and what was allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The first bytes of a channel are not a greeting.
    #[error(
        "this is not vmferry's protocol: the peer speaks {what}; check the port and whether one side uses tls: and the other tcp:"
    )]
    NotVmferry {
        /// What the bytes look like.
        what: String,
    },
    /// A control message of a type that does not exist.
    #[error("unknown control message type {0}")]
    UnknownMessage(u16),
    /// A control message longer than its type may be.
    #[error("{message} of {bytes} bytes is longer than the {limit} that it may have")]
    TooLong {
        /// The message's name.
        message: &'static str,
        /// The announced length.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Reserved bits that are not zero.
    #[error("reserved bits of {0} are set")]
    Reserved(&'static str),
    /// A checksum that does not fit its bytes.
    #[error("the checksum of {what} is {found:#010x}, its bytes give {expected:#010x}")]
    Checksum {
        /// What was damaged.
        what: &'static str,
        /// What the bytes give.
        expected: u32,
        /// What was sent.
        found: u32,
    },
    /// A message whose body can't be read.
    #[error("bad {message}: {detail}")]
    BadBody {
        /// The message's name.
        message: &'static str,
        /// What is wrong.
        detail: String,
    },
    /// A field of a newer release that its sender says must not be ignored.
    #[error(
        "{message} has the mandatory field {field}, which vmferry {} does not know and must not ignore: upgrade vmferry \
         on the host that refuses it, or leave out the option that asks for it",
        env!("CARGO_PKG_VERSION")
    )]
    UnknownField {
        /// The message's name.
        message: &'static str,
        /// The field's number.
        field: u16,
    },
    /// A frame that does not begin like one.
    #[error("no frame begins here: found {0:#010x}")]
    BadMagic(u32),
    /// A frame header that makes no sense.
    #[error("bad frame: {0}")]
    BadFrame(String),
}
