//! The process that answers.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};
use vmferry::witness::{Register, Witness};
use vmferry_handover::VmError;
use vmferry_transport::{SocketFile, listen_unix};

use super::{MAX_LINE_BYTES, Question, Reply};

/// How long a client may take for its question, and to read the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// The most clients at once: each has a thread, and asks once a second at most.
const MAX_CLIENTS: usize = 256;

/// Provides a witness at a socket. Dropping this removes the socket's file.
#[derive(Debug)]
pub struct WitnessServer {
    listener: Arc<UnixListener>,
    file: Option<SocketFile>,
    closing: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl WitnessServer {
    /// Listens on `path`, for processes of the same user. Replaces the socket of a process that
    /// died, but never one that is in use.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] if the path is taken, or the operating system's error.
    pub fn bind(path: &Path, witness: Arc<dyn Witness>) -> io::Result<Self> {
        let (listener, file) = listen_unix(path)?;
        let listener = Arc::new(listener);
        let closing = Arc::new(AtomicBool::new(false));
        let (accepting, closed) = (Arc::clone(&listener), Arc::clone(&closing));
        let acceptor = std::thread::Builder::new()
            .name("witness-socket".into())
            .spawn(move || accept(&accepting, &witness, &closed))?;
        Ok(Self { listener, file: Some(file), closing, acceptor: Some(acceptor) })
    }
}

impl Drop for WitnessServer {
    fn drop(&mut self) {
        // Remove the file while the socket still listens: the name is another process's afterwards.
        self.file = None;
        self.closing.store(true, Ordering::Release);
        // Wakes the acceptor, which then sees `closing`.
        let woken = shutdown(&self.listener, Shutdown::Both).is_ok();
        if let Some(acceptor) = self.acceptor.take().filter(|_| woken) {
            let _ = acceptor.join();
        }
    }
}

/// The place of one client.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn accept(listener: &UnixListener, witness: &Arc<dyn Witness>, closing: &AtomicBool) {
    let clients = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        if closing.load(Ordering::Acquire) {
            return;
        }
        let Ok(stream) = stream else { continue };
        let before = clients.fetch_add(1, Ordering::AcqRel);
        let place = Place(Arc::clone(&clients));
        if before >= MAX_CLIENTS {
            continue;
        }
        let witness = Arc::clone(witness);
        let serves = move || {
            // A client that has gone asks again.
            let _ = serve(&stream, witness.as_ref());
            drop(place);
        };
        let spawned = std::thread::Builder::new().name("witness-client".into()).spawn(serves);
        // Without a thread the connection is closed, and the client asks again.
        drop(spawned);
    }
}

fn serve(mut stream: &UnixStream, witness: &dyn Witness) -> io::Result<()> {
    stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    stream.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let mut line = Vec::new();
    BufReader::new(stream.take(MAX_LINE_BYTES)).read_until(b'\n', &mut line)?;
    let reply = match serde_json::from_slice::<Question>(&line) {
        Ok(question) => answer(question, witness),
        Err(error) => Reply::Error(format!("this question can't be read: {error}")),
    };
    let mut line = serde_json::to_vec(&reply)?;
    line.push(b'\n');
    stream.write_all(&line)
}

fn answer(question: Question, witness: &dyn Witness) -> Reply {
    let own = witness.id();
    let register = |asked: Result<Register, VmError>| match asked {
        Ok(register) => Reply::Register(register),
        Err(error) => Reply::Error(vmferry::chain(error.as_ref())),
    };
    match question {
        Question::Name => Reply::Name(own),
        Question::Open { witness: meant, .. } | Question::Register { witness: meant, .. }
            if meant != own =>
        {
            Reply::Error(format!(
                "the session's witness is {meant}, and this one is {own}: the fleet's data was \
                 restored, or the host has joined another fleet"
            ))
        }
        Question::Open { session, guest, .. } => register(witness.open(session, &guest)),
        Question::Register { session, request, .. } => {
            register(witness.ask(session, request.map(Into::into)))
        }
    }
}
