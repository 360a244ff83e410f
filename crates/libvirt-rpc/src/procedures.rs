//! Programs and procedures of libvirt's RPC, and those that a migration needs.

/// The program of libvirt's public API: `REMOTE_PROGRAM` in `src/remote/remote_protocol.x`.
pub const REMOTE_PROGRAM: u32 = 0x2000_8086;

/// The version of [`REMOTE_PROGRAM`]: `REMOTE_PROTOCOL_VERSION`.
pub const REMOTE_VERSION: u32 = 1;

/// The program of keep-alive messages: `KEEPALIVE_PROGRAM` in `src/rpc/virkeepaliveprotocol.x`.
pub const KEEPALIVE_PROGRAM: u32 = 0x6b65_6570;

/// The version of [`KEEPALIVE_PROGRAM`]: `KEEPALIVE_PROTOCOL_VERSION`.
pub const KEEPALIVE_VERSION: u32 = 1;

/// The most bytes of arguments that are buffered: those of a Prepare or a Finish. libvirt allows
/// 4 MiB for each string and for the cookie. Real definitions have 5 to 50 KiB, so a longer call is
/// an attack, and the limit bounds what one connection can make a daemon store.
pub const MAX_BUFFERED_BYTES: u32 = 4 << 20;

/// The most bytes of arguments of an Open: a URI and two words.
const MAX_OPEN_BYTES: u32 = 4 << 10;

/// Numbers of [`REMOTE_PROGRAM`]'s procedures: `enum remote_procedure` in
/// `src/remote/remote_protocol.x`.
pub mod procedure {
    /// `REMOTE_PROC_CONNECT_OPEN`.
    pub const OPEN: i32 = 1;
    /// `REMOTE_PROC_CONNECT_CLOSE`.
    pub const CLOSE: i32 = 2;
    /// `REMOTE_PROC_CONNECT_SUPPORTS_FEATURE`.
    pub const SUPPORTS_FEATURE: i32 = 60;
    /// `REMOTE_PROC_AUTH_LIST`.
    pub const AUTH_LIST: i32 = 66;
    /// `REMOTE_PROC_AUTH_POLKIT`.
    pub const AUTH_POLKIT: i32 = 70;
    /// `REMOTE_PROC_DOMAIN_MIGRATE_PREPARE3_PARAMS`.
    pub const PREPARE3_PARAMS: i32 = 303;
    /// `REMOTE_PROC_DOMAIN_MIGRATE_FINISH3_PARAMS`.
    pub const FINISH3_PARAMS: i32 = 306;
    /// `REMOTE_PROC_CONNECT_REGISTER_CLOSE_CALLBACK`.
    pub const REGISTER_CLOSE_CALLBACK: i32 = 360;
    /// `REMOTE_PROC_CONNECT_UNREGISTER_CLOSE_CALLBACK`.
    pub const UNREGISTER_CLOSE_CALLBACK: i32 = 361;
}

/// How much of a call is read before it passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Only the header. The arguments have no effect on the host.
    Header,
    /// The whole call, because its arguments decide.
    Whole,
}

/// A procedure that a migration needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllowedProcedure {
    /// Its number in [`REMOTE_PROGRAM`].
    pub procedure: i32,
    /// Its name in messages.
    pub name: &'static str,
    /// How much of a call is read.
    pub reading: Reading,
    /// The most bytes of its arguments.
    pub max_bytes: u32,
    /// Why a migration needs it.
    pub reason: &'static str,
}

const fn header_only(
    procedure: i32,
    name: &'static str,
    max_bytes: u32,
    reason: &'static str,
) -> AllowedProcedure {
    AllowedProcedure { procedure, name, reading: Reading::Header, max_bytes, reason }
}

const fn whole(
    procedure: i32,
    name: &'static str,
    max_bytes: u32,
    reason: &'static str,
) -> AllowedProcedure {
    AllowedProcedure { procedure, name, reading: Reading::Whole, max_bytes, reason }
}

/// All procedures that may pass.
///
/// `qemuMigrationSrcPerformPeer2Peer` and `…Peer2Peer3` in `src/qemu/qemu_migration.c` make these
/// calls, partly through `doRemoteOpen` in `src/remote/remote_driver.c`. Recorded migrations of
/// libvirt 9.0 and 11.3 (`tests/recorded`) made all of them but `AUTH_POLKIT`.
///
/// Procedures of older migration protocols are not here: every libvirt since 1.1 has the feature
/// `MIGRATION_PARAMS`, so none of them is called. `CONNECT_GET_URI` is called only by a client that
/// gave no URI.
pub const ALLOWED_PROCEDURES: [AllowedProcedure; 9] = [
    whole(
        procedure::OPEN,
        "CONNECT_OPEN",
        MAX_OPEN_BYTES,
        "opens the QEMU driver; its URI is checked, because another one could make the daemon run \
        a command (qemu+ext) or connect elsewhere",
    ),
    header_only(procedure::CLOSE, "CONNECT_CLOSE", 0, "ends the connection in order"),
    header_only(
        procedure::SUPPORTS_FEATURE,
        "CONNECT_SUPPORTS_FEATURE",
        4,
        "asks for keep-alive, events, close callbacks and the migration protocol's version",
    ),
    header_only(procedure::AUTH_LIST, "AUTH_LIST", 0, "asks how to authenticate, before all else"),
    header_only(
        procedure::AUTH_POLKIT,
        "AUTH_POLKIT",
        0,
        "follows AUTH_LIST if libvirt demands polkit of the daemon, which is the socket's client",
    ),
    whole(
        procedure::PREPARE3_PARAMS,
        "DOMAIN_MIGRATE_PREPARE3_PARAMS",
        MAX_BUFFERED_BYTES,
        "starts the guest's QEMU, which waits for the migration; the caller admits it",
    ),
    whole(
        procedure::FINISH3_PARAMS,
        "DOMAIN_MIGRATE_FINISH3_PARAMS",
        MAX_BUFFERED_BYTES,
        "runs the guest, or removes it after a failure; only after its Prepare",
    ),
    header_only(
        procedure::REGISTER_CLOSE_CALLBACK,
        "CONNECT_REGISTER_CLOSE_CALLBACK",
        0,
        "asks for a message when the daemon closes the connection",
    ),
    header_only(
        procedure::UNREGISTER_CLOSE_CALLBACK,
        "CONNECT_UNREGISTER_CLOSE_CALLBACK",
        0,
        "withdraws the close callback after the migration",
    ),
];

/// The table's row of a procedure of [`REMOTE_PROGRAM`].
pub(crate) fn allowed(procedure: i32) -> Option<&'static AllowedProcedure> {
    ALLOWED_PROCEDURES.iter().find(|allowed| allowed.procedure == procedure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allowed_procedures_are_in_order_and_unique() {
        assert!(ALLOWED_PROCEDURES.is_sorted_by(|a, b| a.procedure < b.procedure));
    }

    #[test]
    fn allowed_procedures_that_are_not_read_have_no_large_arguments() {
        for allowed in &ALLOWED_PROCEDURES {
            assert!(allowed.reading == Reading::Whole || allowed.max_bytes <= 4, "{allowed:?}");
        }
    }
}
