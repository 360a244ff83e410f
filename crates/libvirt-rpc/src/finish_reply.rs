//! The reply to a Finish whose own reply was lost.

use crate::calls::FinishCall;
use crate::header::{HEADER_BYTES, PacketHeader, PacketKind, PacketStatus};
use crate::procedures::{REMOTE_PROGRAM, REMOTE_VERSION, procedure};
use crate::refusal::{denial, error_reply};
use crate::xdr::{put_string, put_u32};

/// `VIR_ERR_MIGRATE_FINISH_OK` in `include/libvirt/virterror.h`.
const MIGRATE_FINISH_OK: u32 = 93;

/// `VIR_FROM_QEMU` in `include/libvirt/virterror.h`.
const FROM_QEMU: u32 = 10;

/// The ID of a domain that does not run, or whose ID is not known: what `virDomainGetID` returns
/// for it.
const UNKNOWN_ID: i32 = -1;

/// The packet that replies to a Finish, for a caller that knows what the destination's libvirt did
/// and has lost its reply.
///
/// The source's libvirt removes the guest at the source after a domain, and resumes it there after
/// an error. So `result` must be certain: `Ok` only if the guest runs at the destination, an error
/// only if it can never run there.
///
/// - `Ok` to a Finish that is not canceled is `remote_domain_migrate_finish3_params_ret` of
///   `src/remote/remote_protocol.x`, a domain and an empty cookie.
///   `qemuMigrationSrcPerformPeer2Peer3` in `src/qemu/qemu_migration.c` only asks whether there is
///   a domain and releases it, so its ID may be unknown. `qemuMigrationSrcConfirmPhase` takes
///   statistics of the job from the cookie, if there are any.
/// - `Ok` to a canceled Finish, which has removed the guest, is the error
///   `VIR_ERR_MIGRATE_FINISH_OK`, as in `qemuMigrationDstFinish`. A domain would make the source's
///   libvirt remove the only guest.
/// - `Err` is an error with this message, in the form of a [`refusal`](crate::refusal()) without
///   its prefix.
#[must_use]
pub fn finish_reply(call: &FinishCall, result: Result<(), &str>) -> Vec<u8> {
    let header = PacketHeader {
        bytes: HEADER_BYTES as u32,
        program: REMOTE_PROGRAM,
        version: REMOTE_VERSION,
        procedure: procedure::FINISH3_PARAMS,
        kind: PacketKind::Reply,
        serial: call.serial,
        status: PacketStatus::Ok,
    };
    match result {
        Ok(()) if call.cancelled => {
            let message = "the guest was removed from the destination after the migration failed";
            error_reply(&header, MIGRATE_FINISH_OK, FROM_QEMU, message)
        }
        Ok(()) => {
            let mut payload = Vec::new();
            put_string(&mut payload, &call.guest.name);
            payload.extend_from_slice(call.guest.uuid.as_bytes());
            put_u32(&mut payload, UNKNOWN_ID.cast_unsigned());
            // The cookie.
            put_u32(&mut payload, 0);
            let header = PacketHeader { bytes: header.bytes + payload.len() as u32, ..header };
            [&header.encode()[..], &payload].concat()
        }
        Err(message) => denial(&header, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::Guest;
    use crate::packets::{UUID, opaque, reply, words};
    use crate::refusal::RemoteError;
    use crate::{Call, FinishReply, Heard, MigrateFlags, Reply, ReplyWatch};

    fn call(name: &str, cancelled: bool) -> FinishCall {
        let guest = Guest { name: name.into(), uuid: UUID.parse().unwrap() };
        FinishCall { serial: 10, guest, cancelled, flags: MigrateFlags(3) }
    }

    /// What a source's daemon reads.
    fn heard(call: FinishCall, packet: &[u8]) -> Result<(), RemoteError> {
        let (mut watch, mut out) = (ReplyWatch::new(), Heard::default());
        watch.expect(&Call::Finish(call)).unwrap();
        watch.push(packet, &mut out).unwrap();
        assert!(watch.is_between_packets() && out.bytes == packet);
        let [Reply::Finish(FinishReply { serial: 10, result })] = &out.replies[..] else {
            panic!("{out:?}");
        };
        result.clone()
    }

    /// Frozen: if this test fails, the code is wrong.
    #[test]
    fn finish_reply_has_golden_bytes() {
        let id = words(&[u32::MAX]);
        let uuid = words(&[0xc7a5_fdbd, 0xcdaf_9455, 0x926a_d65c, 0x16db_1809]);
        for name in ["web", "bare"] {
            let payload = [opaque(name.as_bytes()), uuid.clone(), id.clone(), words(&[0])].concat();
            let packet = finish_reply(&call(name, false), Ok(()));
            assert_eq!(packet, reply(306, 10, 0, &payload));
            assert_eq!(heard(call(name, false), &packet), Ok(()));
        }
    }

    #[test]
    fn finish_reply_with_an_error_has_its_message() {
        for cancelled in [false, true] {
            let call = call("web", cancelled);
            let packet = finish_reply(&call, Err("it died"));
            let error = RemoteError { code: 29, domain: 7, message: "it died".into() };
            assert_eq!(heard(call, &packet), Err(error));
        }
    }

    /// A domain would make the source's libvirt remove a guest that runs nowhere else.
    #[test]
    fn finish_reply_to_a_canceled_finish_is_an_error() {
        let call = call("web", true);
        let error = heard(call.clone(), &finish_reply(&call, Ok(()))).unwrap_err();
        assert_eq!((error.code, error.domain), (93, 10));
        assert!(error.message.contains("removed"), "{}", error.message);
    }
}
