//! rustls at both ends, as in the engine. The reading half receives as much ciphertext as is
//! available in one call. The methods differ in the batch length of the writing half.

use std::io::{self, BufRead, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use anyhow::anyhow;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection};

use super::frame::Frame;
use super::outlet::{Outlet, hear};
use super::receive::Inlet;
use crate::raw::Tls;

/// Bytes per receive call: as in the engine.
const RECEIVE_BYTES: usize = 256 << 10;

/// Makes both ends of a channel and completes the handshake.
///
/// # Errors
/// A socket or rustls failed.
pub fn channel(
    tls: &Tls,
    batch: usize,
    (mut out, mut into): (TcpStream, TcpStream),
) -> anyhow::Result<(Outgoing, Incoming)> {
    let name = ServerName::IpAddress(out.peer_addr()?.ip().into());
    let mut client = ClientConnection::new(Arc::clone(&tls.client), name)?;
    let mut server = ServerConnection::new(Arc::clone(&tls.server))?;
    client.set_buffer_limit(None);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| server.complete_io(&mut into));
        client.complete_io(&mut out)?;
        server.join().map_err(|_| anyhow!("a thread panicked"))??;
        anyhow::Ok(())
    })?;
    let outgoing = Outgoing { stream: out, connection: client, batch, kept: 0, back: Vec::new() };
    let received = vec![0; RECEIVE_BYTES];
    let incoming = Incoming { stream: into, connection: server, received, fresh: 0..0, plain: 0 };
    Ok((outgoing, incoming))
}

/// The sending end.
pub struct Outgoing {
    stream: TcpStream,
    connection: ClientConnection,
    batch: usize,
    /// Encrypted plaintext bytes that were not written yet.
    kept: usize,
    back: Vec<Frame>,
}

impl Outgoing {
    /// Writes all records with as few calls as rustls allows.
    fn write(&mut self) -> io::Result<()> {
        while self.connection.wants_write() {
            self.connection.write_tls(&mut self.stream)?;
        }
        self.kept = 0;
        Ok(())
    }
}

impl Outlet for Outgoing {
    /// Encrypts the frame and writes whenever a batch is full.
    fn send(&mut self, frame: Frame) -> io::Result<()> {
        let mut bytes = frame.whole();
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(self.batch - self.kept));
            self.connection.writer().write_all(now)?;
            self.kept += now.len();
            if self.kept == self.batch {
                self.write()?;
            }
            bytes = later;
        }
        self.back.push(frame);
        Ok(())
    }

    fn give_back(&mut self, back: &mut Vec<Frame>) -> io::Result<()> {
        back.append(&mut self.back);
        Ok(())
    }

    fn wait(&mut self) -> io::Result<bool> {
        let has_kept = self.kept > 0;
        self.write()?;
        Ok(has_kept)
    }

    fn hear(&mut self, into: &mut [u8], wait: bool) -> io::Result<usize> {
        loop {
            match self.connection.reader().read(into) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                heard => return heard,
            }
            let mut received = [0; 4096];
            let length = hear(&self.stream, &mut received, wait)?;
            if length == 0 {
                return Ok(0);
            }
            let mut fresh = &received[..length];
            while !fresh.is_empty() {
                self.connection.read_tls(&mut fresh)?;
                self.connection.process_new_packets().map_err(io::Error::other)?;
            }
        }
    }
}

/// The receiving end.
pub struct Incoming {
    stream: TcpStream,
    connection: ServerConnection,
    received: Vec<u8>,
    /// The part of `received` that rustls has not consumed.
    fresh: Range<usize>,
    /// Decrypted bytes that were not read yet.
    plain: usize,
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(into)?;
        self.consume(read);
        Ok(read)
    }
}

impl BufRead for Incoming {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.plain == 0 {
            if self.fresh.is_empty() {
                let received = self.stream.read(&mut self.received)?;
                if received == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                self.fresh = 0..received;
            }
            let mut fresh = &self.received[self.fresh.clone()];
            self.fresh.start += self.connection.read_tls(&mut fresh)?;
            let state = self.connection.process_new_packets().map_err(io::Error::other)?;
            self.plain = state.plaintext_bytes_to_read();
        }
        self.connection.reader().into_first_chunk()
    }

    fn consume(&mut self, bytes: usize) {
        self.plain -= bytes;
        self.connection.reader().consume(bytes);
    }
}

impl Inlet for Incoming {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn acknowledge(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.connection.writer().write_all(bytes)?;
        while self.connection.wants_write() {
            self.connection.write_tls(&mut self.stream)?;
        }
        Ok(())
    }
}
