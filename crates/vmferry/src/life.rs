//! Signs of life while a side's thread is inside its VMM or its disk, and answers nobody.
//!
//! A VMM may take longer to make a machine, to harvest, to save or to load its state than the other
//! side bears silence ([`Timeouts::silence`](crate::config::Timeouts::silence)), and a disk to
//! write a promise. What bounds such a step is the other side's own limit for it (`accept`,
//! `ready`, `commit`, `running`), so that meanwhile it hears PINGs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender};
use vmferry_wire::ControlMessage;

use crate::link::ControlSlot;

/// The number of its PINGs: none that is waited for.
const NONCE: u64 = 0;

/// How often a sign of life is given.
const INTERVAL: Duration = Duration::from_secs(1);

/// The thread that gives signs of life; it ends with this.
pub struct Life {
    /// Odd while an action is carried out.
    steps: Arc<AtomicU64>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Life {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system has no thread.
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

    /// Says that an action begins, or that it has ended.
    pub fn step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // It is at most in a send on a channel that was closed.
            let _ = thread.join();
        }
    }
}
