//! The four ends of an RPC connection: calls and replies, at the source and at the destination.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::Mutex;
use vmferry_libvirt_rpc::{Admit, CallGate, Heard};

use super::session::{ReadCalls, Replies, Session};
use crate::proxy::Ends;
use crate::stream::{Output, OutputError, Tap, Waker};

impl Session {
    /// The ends of a stream whose local program is the client.
    pub fn source_ends(self: Arc<Self>, admit: Admit) -> io::Result<Ends> {
        let (socket, shelter) = (self.socket()?, self.shelter());
        let calls = SourceCalls { session: Arc::clone(&self), gate: CallGate::new(admit) };
        let waker = Arc::new(Waker::new()?);
        let (tap, output) = (Some(Box::new(calls) as _), Box::new(SourceReplies(self)));
        Ok(Ends { socket, tap, output, waker, compress: false, shelter })
    }

    /// The ends of a stream whose local program is libvirt.
    pub fn destination_ends(self: Arc<Self>, admit: Admit) -> io::Result<Ends> {
        let (socket, waker) = (self.socket()?, Arc::new(Waker::new()?));
        let (pongs, shelter) = (Mutex::new(Vec::new()), self.shelter());
        let libvirt = LibvirtInput { gate: CallGate::new(admit), socket: self.socket()? };
        let input = Arc::new(SharedInput { libvirt: Mutex::new(libvirt), pongs });
        let replies = DestinationReplies { session: Arc::clone(&self), input: Arc::clone(&input) };
        let calls = DestinationCalls { session: self, input, waker: Arc::clone(&waker) };
        let (tap, output) = (Some(Box::new(replies) as _), Box::new(calls));
        Ok(Ends { socket, tap, output, waker, compress: false, shelter })
    }
}

/// Calls that the source's libvirt makes.
struct SourceCalls {
    session: Arc<Session>,
    gate: CallGate,
}

impl Tap for SourceCalls {
    fn pass(&mut self, bytes: &[u8], into: &mut Vec<u8>) -> Result<(), String> {
        // The destination's libvirt must not see this end, either.
        if bytes.is_empty() && self.session.is_deserted() {
            return Err("libvirt has closed its connection before the answer to its Finish".into());
        }
        let read = self.session.read_calls(&mut self.gate, bytes)?;
        into.extend(read.bytes);
        self.session.tell(read.finishing);
        if read.refusals.is_empty() && read.pongs.is_empty() {
            return Ok(());
        }
        let mut replies = self.session.replies.lock();
        replies.pending.extend(read.refusals);
        replies.pending.extend(read.pongs);
        // A client that has gone is noticed by its reader.
        let _ = replies.write_pending();
        Ok(())
    }
}

/// Replies for the source's libvirt.
struct SourceReplies(Arc<Session>);

impl Output for SourceReplies {
    fn write(&mut self, bytes: &[u8]) -> Result<(), OutputError> {
        // The destination's daemon has answered its libvirt's pings.
        let mut heard = Heard::default();
        let mut replies = self.0.replies.lock();
        let read = replies.watch.push(bytes, &mut heard);
        read.map_err(|error| OutputError::Wrong { problem: vmferry::chain(&error) })?;
        // libvirt acts on a reply as soon as it has it, so it is journaled before.
        let noted = self.0.hear(&heard.replies);
        noted.map_err(|problem| OutputError::Wrong { problem })?;
        replies.socket.write_all(&heard.bytes)?;
        replies.write_pending()?;
        drop(replies);
        self.0.replied(&heard.replies);
        Ok(())
    }
}

impl Replies {
    /// Writes what is pending if the client is between two packets.
    fn write_pending(&mut self) -> io::Result<()> {
        if self.watch.is_between_packets() {
            self.socket.write_all(&std::mem::take(&mut self.pending))?;
        }
        Ok(())
    }
}

/// What the destination's libvirt reads: calls of the client, and answers to its own pings.
struct SharedInput {
    libvirt: Mutex<LibvirtInput>,
    /// Answers that wait for the end of the packet that is being written.
    pongs: Mutex<Vec<u8>>,
}

struct LibvirtInput {
    gate: CallGate,
    socket: UnixStream,
}

impl SharedInput {
    /// Answers libvirt's pings. While calls are written, their writer does it, or the next ping:
    /// libvirt may read calls only after its replies have been read, so this must not wait.
    fn answer(&self, pongs: Vec<u8>) {
        self.pongs.lock().extend(pongs);
        if let Some(mut libvirt) = self.libvirt.try_lock() {
            // A libvirt that has gone is noticed by its reader.
            let _ = self.write_pongs(&mut libvirt);
        }
    }

    fn write_pongs(&self, libvirt: &mut LibvirtInput) -> io::Result<()> {
        if libvirt.gate.is_between_packets() {
            let pongs = std::mem::take(&mut *self.pongs.lock());
            libvirt.socket.write_all(&pongs)?;
        }
        Ok(())
    }
}

/// Calls for the destination's libvirt.
struct DestinationCalls {
    session: Arc<Session>,
    input: Arc<SharedInput>,
    waker: Arc<Waker>,
}

impl Output for DestinationCalls {
    fn write(&mut self, bytes: &[u8]) -> Result<(), OutputError> {
        let mut libvirt = self.input.libvirt.lock();
        // The source's daemon has answered the client's pings.
        let read = self.session.read_calls(&mut libvirt.gate, bytes);
        let ReadCalls { bytes, refusals, finishing, .. } =
            read.map_err(|problem| OutputError::Wrong { problem })?;
        if !refusals.is_empty() {
            self.session.replies.lock().pending.extend(refusals);
            self.waker.wake();
        }
        if let Err(error) = libvirt.socket.write_all(&bytes) {
            // The call is not whole, so libvirt can't act on it.
            if !finishing.is_empty() {
                self.session.not_written();
            }
            return Err(error.into());
        }
        self.session.tell(finishing);
        Ok(self.input.write_pongs(&mut libvirt)?)
    }
}

/// Replies of the destination's libvirt.
struct DestinationReplies {
    session: Arc<Session>,
    input: Arc<SharedInput>,
}

impl Tap for DestinationReplies {
    fn pass(&mut self, bytes: &[u8], into: &mut Vec<u8>) -> Result<(), String> {
        let mut heard = Heard::default();
        let mut replies = self.session.replies.lock();
        let read = replies.watch.push(bytes, &mut heard);
        read.map_err(|error| vmferry::chain(&error))?;
        self.session.hear(&heard.replies)?;
        self.session.replied(&heard.replies);
        into.extend(heard.bytes);
        if replies.watch.is_between_packets() {
            into.append(&mut replies.pending);
        }
        drop(replies);
        if !heard.pongs.is_empty() {
            self.input.answer(heard.pongs);
        }
        Ok(())
    }
}
