//! The threads between a tunnel's buffers and its VMM.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use vmferry_memory::GuestBytes;

use super::Shared;

/// The most bytes that are written at once.
const PART_BYTES: usize = 256 << 10;

/// The most bytes that are read at once.
const READ_BYTES: usize = 64 << 10;

/// How much is read ahead of what may be in flight, in windows. A VMM can't be connected again
/// after it has written its last page, so what it has written is lost with this process then.
const WINDOWS_AHEAD: usize = 2;

/// How often a thread that waits for the VMM looks whether the tunnel has ended.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Starts the thread that reads what the VMM writes.
pub fn read_from(
    shared: &Arc<Shared>,
    socket: UnixStream,
    first: Option<GuestBytes>,
    on_end: Option<Box<dyn FnOnce() + Send>>,
) -> io::Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new().name(format!("tunnel{}-read", shared.lane)).spawn(move || {
        let cpu = shared.cpu.clone();
        let _cpu = cpu.count_this_thread();
        if first.is_some_and(|bytes| !shared.put_outgoing(&bytes)) {
            return;
        }
        let mut bytes = GuestBytes::new();
        bytes.extend_to(READ_BYTES);
        while shared.await_socket(&socket, PollFlags::IN) {
            match recv(&socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => break,
                Ok((read, _)) => {
                    if !shared.put_outgoing(&bytes[..read]) {
                        return;
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                // The VMM has died, or has closed a socket that it had not read to its end.
                Err(_) => break,
            }
        }
        if let Some(on_end) = on_end.filter(|_| !shared.state.lock().closed) {
            on_end();
        }
    })
}

/// Starts the thread that writes what has arrived for the VMM.
pub fn write_into(shared: &Arc<Shared>, socket: UnixStream) -> io::Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new().name(format!("tunnel{}-write", shared.lane)).spawn(move || {
        let cpu = shared.cpu.clone();
        let _cpu = cpu.count_this_thread();
        let mut part = GuestBytes::new();
        while shared.take_incoming(&mut part) {
            let mut written = 0;
            while written < part.len() {
                if !shared.await_socket(&socket, PollFlags::OUT) {
                    return;
                }
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                match send(&socket, &part[written..], flags) {
                    Ok(sent) => written += sent,
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    // A VMM that needs no more closes its socket. The rest is discarded.
                    Err(_) => written = part.len(),
                }
            }
        }
    })
}

impl Shared {
    /// Blocks until the socket is ready, or has ended. Returns false if the tunnel has ended.
    fn await_socket(&self, socket: &UnixStream, wanted: PollFlags) -> bool {
        loop {
            if self.state.lock().closed {
                return false;
            }
            let mut polled = [PollFd::new(socket, wanted)];
            match poll(&mut polled, Some(&LOOK)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) | Err(_) => return true,
            }
        }
    }

    /// Appends bytes, as soon as they fit. Returns false if the tunnel has ended.
    fn put_outgoing(&self, mut bytes: &[u8]) -> bool {
        let mut state = self.state.lock();
        while !bytes.is_empty() {
            if state.closed {
                return false;
            }
            let most = state.flight.window().saturating_mul(WINDOWS_AHEAD);
            let ahead = most.saturating_sub(state.outgoing.len());
            let fits = state.outgoing.room().min(ahead).min(bytes.len());
            if fits == 0 {
                self.changed.wait(&mut state);
                continue;
            }
            let (now, later) = bytes.split_at(fits);
            state.outgoing.push(now);
            bytes = later;
            self.changed.notify_all();
        }
        true
    }

    /// Moves what has arrived into `part`, as soon as there is something. Returns false if the
    /// tunnel has ended.
    fn take_incoming(&self, part: &mut GuestBytes) -> bool {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return false;
            }
            if state.incoming.len() > 0 {
                break;
            }
            self.changed.wait(&mut state);
        }
        part.clear();
        part.extend_from_slice(state.incoming.peek(0, PART_BYTES));
        state.incoming.consume(part.len());
        drop(state);
        self.changed.notify_all();
        true
    }
}
