//! Tickets: which receiver behind a shared port a connection is for.
//!
//! A host with one port for several receivers can't tell from a TLS connection which of them it is
//! for. So a dialer with a ticket first sends these bytes, in plain text:
//!
//! ```text
//!  0                8              24
//!  +----------------+---------------+
//!  | "TICKET\r\n"   | ticket        |
//!  +----------------+---------------+
//! ```
//! The process that accepts the connection reads exactly these bytes, and passes the socket to the
//! receiver, which authenticates the peer. A ticket is an address and gives no rights.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::error::TransportError;
use crate::listen::Pending;
use crate::stream::Stream;

/// Neither a TLS record nor a greeting begins with its first byte.
const MAGIC: [u8; 8] = *b"TICKET\r\n";

/// Length of what is sent for a ticket.
pub const TICKET_BYTES: usize = MAGIC.len() + 16;

/// The number of a receiver. A source uses the number of its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub [u8; 16]);

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Ticket {
    fn encode(self) -> [u8; TICKET_BYTES] {
        let mut bytes = [0; TICKET_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        bytes[MAGIC.len()..].copy_from_slice(&self.0);
        bytes
    }

    fn parse(bytes: &[u8; TICKET_BYTES]) -> Option<Self> {
        let ticket = bytes.strip_prefix(&MAGIC)?;
        ticket.try_into().ok().map(Self)
    }

    /// Sends it on a new connection, whose buffer is empty.
    ///
    /// # Errors
    /// The operating system's error.
    pub(crate) fn send(self, stream: &Stream) -> io::Result<()> {
        (&mut &*stream).write_all(&self.encode())
    }
}

impl Pending {
    /// Reads the connection's ticket; `None` if it begins with something else, which is not read.
    /// Waits at most `timeout` for the peer's bytes, and reads none that follow the ticket.
    ///
    /// # Errors
    /// [`TransportError::TimedOut`], [`TransportError::NotTls`] for bytes that only begin like a
    /// ticket, or the operating system's error.
    pub fn ticket(&self, timeout: Duration) -> Result<Option<Ticket>, TransportError> {
        let deadline = Instant::now() + timeout;
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::TimedOut => {
                TransportError::TimedOut { peer: self.peer_address(), what: "its first bytes" }
            }
            _ => TransportError::Io { peer: self.peer_address(), source: error },
        };
        await_bytes(self.stream(), deadline).map_err(failed)?;
        let mut first = [0];
        let (length, _) = recv(self.stream(), &mut first, RecvFlags::PEEK | RecvFlags::DONTWAIT)
            .map_err(|errno| failed(errno.into()))?;
        if length == 0 {
            return Err(failed(io::ErrorKind::UnexpectedEof.into()));
        }
        if first[0] != MAGIC[0] {
            return Ok(None);
        }
        let (mut bytes, mut at) = ([0; TICKET_BYTES], 0);
        while at < TICKET_BYTES {
            await_bytes(self.stream(), deadline).map_err(failed)?;
            match (&mut &**self.stream()).read(&mut bytes[at..]) {
                Ok(0) => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
                Ok(length) => at += length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
            let known = at.min(MAGIC.len());
            if bytes[..known] != MAGIC[..known] {
                let what = format!(
                    "an unknown protocol that begins with `{}`",
                    bytes[..known].escape_ascii()
                );
                return Err(TransportError::NotTls { peer: self.peer_address(), what });
            }
        }
        Ok(Ticket::parse(&bytes))
    }

    /// A copy of the socket's descriptor, to pass it to another process.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn socket(&self) -> io::Result<OwnedFd> {
        std::os::fd::AsFd::as_fd(self.stream()).try_clone_to_owned()
    }
}

/// Waits until a socket has bytes, or was closed.
fn await_bytes(stream: &Arc<Stream>, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&**stream, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;
    use crate::{Address, Listener};

    const LIMIT: Duration = Duration::from_secs(20);

    fn accepted(sent: &[u8]) -> (Pending, TcpStream) {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), None).unwrap();
        let Address::Tcp { port, .. } = *listener.local_address() else { unreachable!() };
        let mut peer = TcpStream::connect(("127.0.0.1", port)).unwrap();
        peer.write_all(sent).unwrap();
        (listener.accept().unwrap().unwrap(), peer)
    }

    #[test]
    fn ticket_on_the_wire_is_as_documented() {
        let mut expected = b"TICKET\r\n".to_vec();
        expected.extend([7; 16]);
        assert_eq!(Ticket([7; 16]).encode().to_vec(), expected);
    }

    #[test]
    fn ticket_is_read_and_nothing_after_it() {
        let mut sent = Ticket([7; 16]).encode().to_vec();
        sent.extend(b"\x16after");
        let (pending, _peer) = accepted(&sent);
        assert_eq!(pending.ticket(LIMIT).unwrap(), Some(Ticket([7; 16])));
        let mut rest = [0; 6];
        (&mut &**pending.stream()).read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"\x16after");
    }

    #[test]
    fn other_first_bytes_stay_unread() {
        for sent in [&b"\x16\x03\x01"[..], b"VMFERRY\n"] {
            let (pending, _peer) = accepted(sent);
            assert_eq!(pending.ticket(LIMIT).unwrap(), None);
            let mut read = vec![0; sent.len()];
            (&mut &**pending.stream()).read_exact(&mut read).unwrap();
            assert_eq!(read, sent);
        }
    }

    #[test]
    fn bytes_that_only_begin_like_a_ticket_are_refused_without_waiting_for_more() {
        let (pending, _peer) = accepted(b"TRACE / HTTP/1.1\r\n\r\nand so on");
        let error = pending.ticket(LIMIT).unwrap_err().to_string();
        assert!(error.contains("begins with `TRACE / `"), "{error}");
    }

    #[test]
    fn silent_and_slow_peers_run_out_of_time() {
        for sent in [&b""[..], b"TICK"] {
            let (pending, _peer) = accepted(sent);
            let error = pending.ticket(Duration::from_millis(20)).unwrap_err();
            assert!(matches!(error, TransportError::TimedOut { .. }), "{error}");
        }
        let (pending, peer) = accepted(b"TICKET");
        drop(peer);
        assert!(matches!(pending.ticket(LIMIT), Err(TransportError::Io { .. })));
    }
}
