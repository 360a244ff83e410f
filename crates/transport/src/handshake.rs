//! The TLS handshake, and detection of peers that speak another protocol.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use rustls::Connection;

use crate::error::TransportError;
use crate::stream::Stream;

/// Performs the handshake for an application protocol within `timeout`, all steps together. Data
/// that the peer sent after the handshake stays in the connection.
///
/// # Errors
/// The failure as a [`TransportError`].
pub fn shake_hands(
    stream: &Stream,
    mut connection: Connection,
    protocol: &[u8],
    peer: &str,
    timeout: Duration,
) -> Result<Connection, TransportError> {
    let deadline = Instant::now() + timeout;
    let timed_out = || TransportError::TimedOut { peer: peer.into(), what: "the TLS handshake" };
    connection.set_buffer_limit(None);
    let mut first = true;
    while connection.is_handshaking() || connection.wants_write() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(timed_out());
        }
        let stepped = stream
            .set_read_timeout(Some(left))
            .and_then(|()| stream.set_write_timeout(Some(left)))
            .map_err(Failure::Io)
            .and_then(|()| step(stream, &mut connection, &mut first));
        match stepped {
            Ok(()) => {}
            Err(Failure::Foreign(what)) => {
                return Err(TransportError::NotTls { peer: peer.into(), what });
            }
            Err(Failure::Tls(error)) => return Err(TransportError::from_tls(error, peer.into())),
            Err(Failure::Io(error)) => match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => return Err(timed_out()),
                _ => {
                    let peer = peer.into();
                    return Err(TransportError::HandshakeCut { peer, source: error });
                }
            },
        }
    }
    // TLS allows a peer to name no protocol, and other services do so.
    if connection.alpn_protocol() != Some(protocol) {
        return Err(TransportError::other_protocol(peer.into()));
    }
    stream
        .set_read_timeout(None)
        .and_then(|()| stream.set_write_timeout(None))
        .map_err(|error| TransportError::from_io(error, peer))?;
    Ok(connection)
}

enum Failure {
    Io(io::Error),
    Tls(rustls::Error),
    /// The peer does not speak TLS.
    Foreign(String),
}

/// Sends pending records, or receives once.
fn step(stream: &Stream, connection: &mut Connection, first: &mut bool) -> Result<(), Failure> {
    if connection.wants_write() {
        return connection.write_tls(&mut &*stream).map(|_| ()).map_err(Failure::Io);
    }
    let mut received = [0; 4096];
    let length = (&mut &*stream).read(&mut received).map_err(Failure::Io)?;
    if length == 0 {
        return Err(Failure::Io(io::ErrorKind::UnexpectedEof.into()));
    }
    let mut fresh = &received[..length];
    if std::mem::take(first)
        && let Some(what) = foreign(fresh)
    {
        return Err(Failure::Foreign(what));
    }
    // rustls accepts no data after the peer's `close_notify`.
    while !fresh.is_empty() && connection.read_tls(&mut fresh).map_err(Failure::Io)? > 0 {
        if let Err(error) = connection.process_new_packets() {
            // Sends the alert, so that the peer learns why its certificate was rejected.
            while connection.wants_write() && connection.write_tls(&mut &*stream).is_ok() {}
            return Err(Failure::Tls(error));
        }
    }
    Ok(())
}

/// What the peer speaks, if its first bytes do not begin a TLS record.
fn foreign(bytes: &[u8]) -> Option<String> {
    const HTTP: [&[u8]; 8] =
        [b"GET ", b"POST ", b"PUT ", b"HEAD ", b"OPTIONS ", b"CONNECT ", b"PRI * ", b"HTTP/"];
    let opening = &bytes[..bytes.len().min(8)];
    match opening {
        // Change cipher spec, alert, handshake or data, and then the major version.
        [0x14..=0x17] | [0x14..=0x17, 3, ..] => None,
        _ if b"VMFERRY\n".starts_with(opening) || b"VMFERRY\r".starts_with(opening) => {
            Some("plain vmferry".into())
        }
        _ if HTTP.iter().any(|verb| bytes.starts_with(verb)) => Some("plain HTTP".into()),
        _ if bytes.starts_with(b"SSH-") => Some("SSH".into()),
        _ => Some(format!("an unknown protocol that begins with `{}`", opening.escape_ascii())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_recognizes_other_protocols_by_their_first_bytes() {
        for tls in [&b"\x16\x03\x01\x02\x00"[..], b"\x15\x03\x03", b"\x16"] {
            assert_eq!(foreign(tls), None);
        }
        for (bytes, expected) in [
            (&b"VMFERRY\n\x01\x00"[..], "plain vmferry"),
            (b"VMFERRY\r\x00", "plain vmferry"),
            (b"VMF", "plain vmferry"),
            (b"OPTIONS * HTTP/1.1", "plain HTTP"),
            (b"HTTP/1.1 400 Bad Request", "plain HTTP"),
            (b"SSH-2.0-OpenSSH", "SSH"),
            (b"\x16\x99garbage", "an unknown protocol that begins with `\\x16\\x99garbag`"),
        ] {
            assert_eq!(foreign(bytes).as_deref(), Some(expected));
        }
    }
}
