//! A limit for the time that a whole exchange on a channel may take.
//!
//! A limit for each read is none for all of them: the peer can send one byte after the other, also
//! within one record of TLS.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use vmferry_transport::ChannelCloser;

/// Closes a channel when its time is over, unless it is dropped before.
#[derive(Debug)]
pub(crate) struct TimeLimit {
    is_over: Arc<AtomicBool>,
    /// Dropped, it ends the thread.
    _running: Sender<()>,
}

impl TimeLimit {
    /// Begins to count.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(closer: ChannelCloser, time: Duration) -> io::Result<Self> {
        let (running, ended) = channel::<()>();
        let is_over = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&is_over);
        std::thread::Builder::new().name("time-limit".into()).spawn(move || {
            if ended.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                of_thread.store(true, Ordering::Release);
                closer.close();
            }
        })?;
        Ok(Self { is_over, _running: running })
    }

    /// Whether the channel was closed because its time is over.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }
}
