//! Keepalives while a side's thread is blocked in its VMM or its disk and answers no messages.
//!
//! A VMM may take longer to prepare a machine, to harvest, or to save or load its state than the
//! peer tolerates silence ([`Timeouts::silence`](crate::config::Timeouts::silence)), and so may a
//! disk that writes a promise. Such a step is bounded by the peer's own timeout for it (`accept`,
//! `ready`, `commit`, `running`), so PINGs are sent to the peer meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender};
use vmferry_wire::ControlMessage;

use crate::link::ControlSlot;

/// The nonce of these PINGs. No answer to them is awaited.
const NONCE: u64 = 0;

/// Interval of the PINGs.
const INTERVAL: Duration = Duration::from_secs(1);

/// The keepalive thread. It ends when this is dropped.
pub struct Life {
    /// Odd while an action is being carried out.
    steps: Arc<AtomicU64>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Life {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn begin(control: Arc<ControlSlot>) -> std::io::Result<Self> {
        let steps = Arc::new(AtomicU64::new(0));
        let (end, ended) = crossbeam_channel::bounded(0);
        let seen = Arc::clone(&steps);
        let thread = std::thread::Builder::new().name("life".into()).spawn(move || {
            let mut last = 0;
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let step = seen.load(Ordering::Relaxed);
                if step % 2 == 1 && step == last {
                    control.send(&ControlMessage::Ping { nonce: NONCE });
                }
                last = step;
            }
        })?;
        Ok(Self { steps, end: Some(end), thread: Some(thread) })
    }

    /// Marks the beginning or the end of an action.
    pub fn step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // It is at most in a send on a closed channel.
            let _ = thread.join();
        }
    }
}
