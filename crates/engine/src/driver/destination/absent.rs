//! Answers for a receiver that has ended: a source learns that it is gone, and one in doubt gets
//! the word from the journals.

use std::path::Path;
use std::time::Duration;

use vmferry_transport::{ChannelReader, ChannelWriter, PeerIdentity};
use vmferry_wire::{ControlMessage, Hello, HelloStatus, Role, common_version};

use super::arrivals::word_for;
use crate::config::PROTOCOL_VERSIONS;
use crate::driver::greeting::{Versions, answer};
use crate::error::MigrateError;
use crate::link::{ControlReader, ControlWriter, Speaker, lost};

/// Answers a connection whose greeting was read, and for which there is no receiver on this host,
/// with `timeout` for each step. A query is answered from `journals`, as by a
/// [`Responder`](super::receive::Responder).
///
/// # Errors
/// Why the peer did not get what it wants: there is no receiver, or the journals, the link, or the
/// peer's violation of the protocol.
pub fn answer_without_receiver(
    hello: &Hello,
    (mut reader, mut writer): (ChannelReader, ChannelWriter),
    peer: &PeerIdentity,
    journals: &Path,
    timeout: Duration,
) -> Result<(), MigrateError> {
    reader.set_timeout(Some(timeout))?;
    writer.set_timeout(Some(timeout))?;
    let ours = PROTOCOL_VERSIONS;
    let common = common_version(&ours, &hello.versions());
    let versions = Versions { version: common.unwrap_or(*ours.end()), ours };
    let status = match (common, hello.role) {
        (None, _) => HelloStatus::Version,
        (Some(_), Role::Query) => HelloStatus::Ok,
        (Some(_), _) => HelloStatus::NoReceiver,
    };
    let failed = |error| lost("greeting", "answering it", &error);
    answer(&mut writer, &versions, status, 0).map_err(failed)?;
    if status != HelloStatus::Ok {
        writer.finish().map_err(failed)?;
        let role = u8::from(hello.role);
        let reason = format!("there is no receiver for its channel of role {role}");
        return Err(MigrateError::protocol("greeting", 0, reason));
    }
    let asked = ControlReader::new(&mut reader, versions.version, Speaker::Asker)
        .receive("a question about a session")?;
    let ControlMessage::Query { session, .. } = asked else {
        let reason = format!("{} is no question", asked.name());
        return Err(MigrateError::protocol("query", 0, reason));
    };
    let word = word_for(journals, session, peer)?;
    let writer = ControlWriter::new(writer, versions.version);
    writer
        .send(&ControlMessage::Answer { session, word, token: None })
        .and_then(|()| writer.finish())
        .map_err(|error| lost("query", "answering it", &error))
}
