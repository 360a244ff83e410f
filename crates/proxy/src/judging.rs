//! Another host asks beforehand whether this one permits a guest's definition (`vmferry doctor`).
//!
//! ```text
//!  host with the guest                 daemon
//!    Opening: judge GUEST             ->   policy
//!    the definition, with its length  ->   judges
//!         <-  Answer: judged; the objections as JSON, with their length
//! ```
//! The answer promises nothing: the definition of the migration is judged again.

use std::io::{self, Read, Write};
use std::time::Duration;

use vmferry::MigrateError;
use vmferry_handover::GuestIdentity;
use vmferry_transport::{
    Channel, ChannelCloser, ChannelReader, ChannelWriter, Dialer, PeerIdentity, TransportError,
};
use vmferry_wire::{Reason, ReasonCode, Token};

use crate::definition::{Definition, Judgment, Objection};
use crate::event::ProxyEvent;
use crate::proxy::Shared;
use crate::records::{Answer, Target, ask};
use crate::time_limit::TimeLimit;

/// The longest definition, in bytes: as in a Prepare.
const MAX_DEFINITION_BYTES: u32 = 4 << 20;

/// The longest answer, in bytes.
const MAX_ANSWER_BYTES: u32 = 1 << 20;

/// The longest time from the question to the end of the answer, on both hosts. `virsh` there may
/// take its time.
const TIME: Duration = Duration::from_secs(60);

/// Asks the daemon that `dialer` reaches what its policy does not permit in a guest's definition.
/// `None` if the daemon is of a release that judges no definitions.
///
/// # Errors
/// The host can't be reached, or refuses this host or the guest.
pub fn ask_to_judge(
    dialer: &Dialer,
    guest: &GuestIdentity,
    xml: &str,
) -> Result<Option<Vec<Objection>>, MigrateError> {
    let address = dialer.address.to_string();
    let lost = |error| MigrateError::from(TransportError::from_io(error, &address));
    let channel = dialer.connect()?;
    let limit = TimeLimit::start(channel.closer(), TIME).map_err(lost)?;
    let asked = ask_on(channel, dialer.connect_timeout, guest, xml);
    match asked {
        // The end of the channel is no answer then.
        Ok(None) | Err(_) if limit.is_over() => {
            let what = "an answer about the guest's definition";
            Err(TransportError::TimedOut { peer: dialer.address.to_string(), what }.into())
        }
        asked => asked,
    }
}

fn ask_on(
    channel: Channel,
    write_timeout: Duration,
    guest: &GuestIdentity,
    xml: &str,
) -> Result<Option<Vec<Objection>>, MigrateError> {
    let refused = |code, text: &str| {
        let reason = Reason::new(code, text);
        MigrateError::Refused { peer: "destination", reason }
    };
    let address = channel.peer().address.clone();
    let lost = |error| MigrateError::from(TransportError::from_io(error, &address));
    let (mut reader, mut writer) = channel.split();
    writer.set_timeout(Some(write_timeout))?;
    reader.set_timeout(Some(TIME))?;
    ask(&mut writer, Token([0; 16]), Target::Judge(guest.clone())).map_err(lost)?;
    // A daemon that does not know the question closes the connection.
    let sent = write_text(&mut writer, xml.as_bytes());
    match Answer::read(&mut reader) {
        Ok(Answer::Judged) => {
            let text = read_text(&mut reader, MAX_ANSWER_BYTES).map_err(lost)?;
            let bad = |_| refused(ReasonCode::Protocol, "its answer can't be read");
            serde_json::from_slice(&text).map(Some).map_err(bad)
        }
        Ok(Answer::Refused { reason }) => Err(refused(ReasonCode::Unauthorized, &reason)),
        Ok(answer) => {
            Err(refused(ReasonCode::Protocol, &format!("it answers another question: {answer:?}")))
        }
        Err(_) if sent.is_err() => Ok(None),
        Err(crate::records::RecordError::Io(error))
            if matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(refused(ReasonCode::Protocol, &vmferry::chain(&error))),
    }
}

/// Judges the definition that a peer sends, and answers.
pub(crate) fn answer(
    shared: &Shared,
    peer: &PeerIdentity,
    guest: &GuestIdentity,
    (mut reader, mut writer): (ChannelReader, ChannelWriter),
    closer: ChannelCloser,
) {
    // Kept until the answer is written.
    let limit = TimeLimit::start(closer, TIME);
    let judged = match &limit {
        Ok(_) => judge(shared, peer, guest, &mut reader),
        Err(error) => Err(format!("the system can't create a thread: {error}")),
    };
    // The peer may have gone.
    let _ = match judged {
        Ok(objections) => {
            let text = serde_json::to_vec(&objections).unwrap_or_default();
            let answered = Answer::Judged.write(&mut writer);
            answered.and_then(|()| write_text(&mut writer, &text))
        }
        Err(reason) => {
            let (peer, wanted) = (peer.to_string(), format!("ask about {}", guest.name));
            shared.tell(ProxyEvent::Refused { peer, wanted, reason: reason.clone() });
            Answer::Refused { reason }.write(&mut writer)
        }
    };
    let _ = writer.finish();
}

fn judge(
    shared: &Shared,
    peer: &PeerIdentity,
    guest: &GuestIdentity,
    reader: &mut ChannelReader,
) -> Result<Vec<Objection>, String> {
    let config = shared.config();
    if let Some(policy) = &config.policy {
        policy.check_source(peer).and_then(|()| policy.check_guest(peer, guest))?;
    }
    let text = read_text(reader, MAX_DEFINITION_BYTES).map_err(|error| {
        format!("its definition was not received whole within {} s: {error}", TIME.as_secs())
    })?;
    let xml = String::from_utf8(text).map_err(|_| "the definition is no text".to_owned())?;
    let judged = Definition { guest: &guest.name, xml: Some(&xml), cookie: None };
    let judgment = Judgment::new(shared, peer, guest)?;
    judgment.objections(judged).map_err(|error| vmferry::chain(&error))
}

/// Writes a text after its length in four bytes.
fn write_text(writer: &mut impl Write, text: &[u8]) -> io::Result<()> {
    let length = u32::try_from(text.len()).map_err(io::Error::other)?;
    writer.write_all(&length.to_le_bytes())?;
    writer.write_all(text)?;
    writer.flush()
}

/// Reads a text after its length. Memory grows with what arrives.
fn read_text(reader: &mut impl Read, most: u32) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    reader.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > most {
        return Err(io::Error::other(format!("a text of {length} bytes is longer than {most}")));
    }
    let mut text = Vec::new();
    reader.take(length.into()).read_to_end(&mut text)?;
    if text.len() < length as usize { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use vmferry_transport::Listener;

    use super::*;

    #[test]
    fn texts_are_read_as_written_and_bounded() {
        let mut bytes = Vec::new();
        write_text(&mut bytes, b"<domain/>").unwrap();
        assert_eq!(read_text(&mut &bytes[..], 9).unwrap(), b"<domain/>");
        assert!(read_text(&mut &bytes[..], 8).is_err());
        assert!(read_text(&mut &bytes[..bytes.len() - 1], 9).is_err());
        assert!(read_text(&mut &[255; 4][..], MAX_DEFINITION_BYTES).is_err());
    }

    /// Each byte comes in time, and never the last one.
    #[test]
    fn text_that_comes_byte_by_byte_ends_with_the_time_limit() {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), None).unwrap();
        let dialer = Dialer::new(listener.local_address().clone(), None);
        let sending = std::thread::spawn(move || {
            let (_reader, mut writer) = dialer.connect().unwrap().split();
            writer.write_all(&MAX_DEFINITION_BYTES.to_le_bytes()).unwrap();
            let mut sent = 0u32;
            while writer.write_all(b"x").and_then(|()| writer.flush()).is_ok() {
                sent += 1;
                // A slow peer: at this pace the text is not whole within hours.
                std::thread::sleep(Duration::from_millis(10));
            }
            sent
        });
        let pending = listener.accept().unwrap().unwrap();
        let channel = pending.handshake(TIME).unwrap();
        let limit = TimeLimit::start(channel.closer(), Duration::from_millis(200)).unwrap();
        let (mut reader, _writer) = channel.split();
        reader.set_timeout(Some(TIME)).unwrap();
        assert!(read_text(&mut reader, MAX_DEFINITION_BYTES).is_err());
        assert!(limit.is_over());
        assert!(sending.join().unwrap() < MAX_DEFINITION_BYTES);
    }
}
