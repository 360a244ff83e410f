//! What is wrong with bytes or with a call.

/// Why a connection ends, or why a call is refused.
///
/// The gate and the watch return an error when the connection cannot continue: the bytes are not
/// libvirt's protocol, or a packet can neither pass nor be answered. An error in the arguments of a
/// call is the message of its refusal, and the connection continues.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RpcError {
    /// A length word below the header's length or above libvirt's limit.
    #[error(
        "this is not libvirt's RPC: a packet of {bytes} bytes, allowed are {} to {}",
        crate::HEADER_BYTES,
        crate::MAX_PACKET_BYTES
    )]
    BadLength {
        /// The length word.
        bytes: u32,
    },
    /// A packet kind that does not exist.
    #[error("this is not libvirt's RPC: a packet of the unknown kind {found}")]
    UnknownKind {
        /// The number in the header.
        found: u32,
    },
    /// A packet status that does not exist.
    #[error("this is not libvirt's RPC: a packet with the unknown status {found}")]
    UnknownStatus {
        /// The number in the header.
        found: u32,
    },
    /// A packet that a client of a migration does not send and that nobody answers.
    #[error(
        "the client sent a packet of kind {kind:?} (program {program:#x}, procedure {procedure}), \
        which a migration does not need and which cannot be answered"
    )]
    Unanswerable {
        /// The packet's kind.
        kind: crate::PacketKind,
        /// The packet's program.
        program: u32,
        /// The packet's procedure.
        procedure: i32,
    },
    /// A message of the keep-alive program that is neither a ping nor a pong.
    #[error("a keep-alive message of version {version}, procedure {procedure} and {bytes} bytes")]
    BadKeepAlive {
        /// The program's version.
        version: u32,
        /// The procedure.
        procedure: i32,
        /// The packet's length.
        bytes: u32,
    },
    /// A call's payload is longer than the call's limit.
    #[error("{call} has {bytes} bytes of arguments, the limit is {limit}")]
    TooLarge {
        /// The procedure's name.
        call: &'static str,
        /// Bytes of the payload.
        bytes: u32,
        /// The limit for this procedure.
        limit: u32,
    },
    /// A payload ends inside a field.
    #[error("the packet ends inside {what}: {needed} bytes needed, {left} left")]
    Truncated {
        /// The field.
        what: &'static str,
        /// Bytes of the field, or of what follows of it.
        needed: u64,
        /// Bytes left in the packet.
        left: u64,
    },
    /// A payload continues after its last field.
    #[error("{bytes} bytes follow the arguments")]
    Leftover {
        /// Their number.
        bytes: u64,
    },
    /// A string, a list or an opaque field exceeds its limit.
    #[error("{what} has a length of {found}, the limit is {limit}")]
    TooLong {
        /// The field.
        what: &'static str,
        /// The length in the packet: bytes, or elements of a list.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A field has a value that libvirt's protocol does not allow.
    #[error("{what} has the value {found}")]
    BadValue {
        /// The field.
        what: &'static str,
        /// The value.
        found: u64,
    },
    /// A string that libvirt would read differently: a NUL ends it early, or it is not UTF-8.
    #[error("{what} is not plain text: it contains {found}")]
    NotText {
        /// The field.
        what: &'static str,
        /// What it contains.
        found: &'static str,
    },
    /// A migration parameter that the gate does not know and that may name anything.
    #[error("the migration parameter {name:?} is not supported by vmferry")]
    UnknownParameter {
        /// The parameter's name.
        name: String,
    },
    /// A migration parameter of another type than libvirt's.
    #[error("the migration parameter {name:?} must be {expected}")]
    ParameterType {
        /// The parameter's name.
        name: String,
        /// The type that libvirt demands.
        expected: &'static str,
    },
    /// A migration parameter that is given twice.
    #[error("the migration parameter {name:?} is given twice")]
    RepeatedParameter {
        /// The parameter's name.
        name: String,
    },
    /// A migration parameter that is missing.
    #[error("the migration parameter {name:?} is missing")]
    MissingParameter {
        /// The parameter's name.
        name: &'static str,
    },
    /// XML that is not well-formed, or that two parsers could read differently.
    #[error("bad {document}: {detail}")]
    BadXml {
        /// The document.
        document: &'static str,
        /// What is wrong.
        detail: String,
    },
    /// A guest name that is empty, too long, or no file name.
    #[error("the guest name {name:?} is not usable: {detail}")]
    BadName {
        /// The name.
        name: String,
        /// What is wrong.
        detail: &'static str,
    },
    /// The cookie is of another guest than the definition.
    #[error("the cookie's {what} is {found:?}, the definition's is {expected:?}")]
    OtherGuest {
        /// The field.
        what: &'static str,
        /// The value in the cookie.
        found: String,
        /// The value in the definition.
        expected: String,
    },
    /// A connection to another driver than the system's QEMU.
    #[error("a connection to {uri:?} is not allowed, only to {:?}", crate::OPEN_URI)]
    OtherUri {
        /// The URI, or nothing for the daemon's default.
        uri: Option<String>,
    },
    /// A tunnelled migration, which sends the guest's memory through this connection.
    #[error(
        "a tunnelled migration cannot pass through vmferry: migrate without tunnelling, and name a \
        Unix socket in `migrate_uri`"
    )]
    Tunnelled,
    /// A Finish for a guest without a Prepare on this connection.
    #[error("no Prepare for the guest {name:?} has passed on this connection")]
    NotPrepared {
        /// The guest's name.
        name: String,
    },
    /// More guests are prepared on one connection than the gate allows.
    #[error("{} guests are prepared on this connection already", crate::MAX_PREPARED_GUESTS)]
    TooManyPrepared,
    /// More calls without a reply than a migration makes.
    #[error("the replies to {calls} calls are still missing")]
    TooManyAwaited {
        /// The limit.
        calls: usize,
    },
    /// A URI that is not a plain Unix socket.
    #[error("{uri:?} does not name a Unix socket as unix:///PATH: {detail}")]
    NotASocket {
        /// The URI.
        uri: String,
        /// What is wrong.
        detail: &'static str,
    },
}
