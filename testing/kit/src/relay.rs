//! Parts of the relays that tests put between a source and a destination.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// A stream socket whose sending direction can end alone.
pub trait Socket: Read + Write {
    /// Shuts the socket down for writing.
    fn end(&self);
}

impl Socket for UnixStream {
    fn end(&self) {
        let _ = self.shutdown(Shutdown::Write);
    }
}

impl Socket for TcpStream {
    fn end(&self) {
        let _ = self.shutdown(Shutdown::Write);
    }
}

/// Forwards bytes and then the end of the stream. An error of either socket counts as the end.
pub fn copy<S: Socket>(mut from: S, mut to: S) {
    let _ = std::io::copy(&mut from, &mut to);
    to.end();
}

/// Accepts connections at a Unix socket until it is dropped.
#[derive(Debug)]
pub struct UnixAcceptor {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl UnixAcceptor {
    /// Listens at `path`, and calls `serve` in a thread of its own for each connection.
    ///
    /// # Panics
    /// If it can't listen there.
    pub fn start(path: PathBuf, serve: impl Fn(UnixStream) + Send + Sync + 'static) -> Self {
        let listener = UnixListener::bind(&path).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, serve) = (Arc::clone(&stop), Arc::new(serve));
        let thread = std::thread::spawn(move || {
            for accepted in listener.incoming() {
                if stopped.load(Ordering::Acquire) {
                    return;
                }
                let (accepted, serve) = (accepted.unwrap(), Arc::clone(&serve));
                std::thread::spawn(move || serve(accepted));
            }
        });
        Self { path, stop, thread: Some(thread) }
    }

    /// The path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for UnixAcceptor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = UnixStream::connect(&self.path);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
