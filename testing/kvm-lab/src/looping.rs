//! A vCPU that writes until it is stopped.

use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::LabError;
use crate::guest::Entry;
use crate::vcpu::{Lease, Left, Vcpu, install_signal_handler, kick_signal};

/// A vCPU that writes its pages over and over. Dropping it stops it.
pub struct WriteLoop {
    vcpu: Arc<Vcpu>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), LabError>>>,
}

impl WriteLoop {
    pub(crate) fn start(mut lease: Lease, entry: Entry) -> Result<Self, LabError> {
        install_signal_handler()?;
        lease.enter(entry)?;
        let vcpu = Arc::clone(lease.vcpu());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let body = move || {
            while !stopped.load(Ordering::Acquire) {
                let left = lease.run()?;
                debug_assert_eq!(left, Left::Interrupted, "a loop has no end");
            }
            Ok(())
        };
        let thread = std::thread::Builder::new()
            .name(format!("lab{}", vcpu.index()))
            .spawn(body)
            .map_err(|source| LabError::System { what: "a thread", source })?;
        Ok(Self { vcpu, stop, thread: Some(thread) })
    }

    /// The number of pages that this vCPU's loops have written so far, including repeats. A page
    /// counts when it is written.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.vcpu.shared.written(self.vcpu.index())
    }

    /// Waits until this number of further pages is written.
    ///
    /// # Panics
    /// If the guest has stopped by itself.
    pub fn wait_for(&self, pages: u64) {
        let until = self.written() + pages;
        while self.written() < until {
            let running = self.thread.as_ref().is_some_and(|thread| !thread.is_finished());
            assert!(running, "vCPU {} has stopped by itself", self.vcpu.index());
            std::thread::yield_now();
        }
    }

    /// Stops it. On return the vCPU is out of the guest and nothing is pending.
    ///
    /// # Errors
    /// The reason, if the guest has stopped by itself.
    ///
    /// # Panics
    /// If the hook for full rings has panicked.
    pub fn stop(mut self) -> Result<(), LabError> {
        match self.end() {
            None => Ok(()),
            Some(Ok(ended)) => ended,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }

    fn end(&mut self) -> Option<std::thread::Result<Result<(), LabError>>> {
        let thread = self.thread.take()?;
        self.stop.store(true, Ordering::Release);
        // If the signal arrives just before KVM_RUN, this makes KVM_RUN return at once.
        self.vcpu.set_immediate_exit(true);
        // SAFETY: the thread is not joined yet, so its handle is valid even if it has ended. The
        // signal has a handler that does nothing.
        unsafe { libc::pthread_kill(thread.as_pthread_t(), kick_signal()) };
        let ended = thread.join();
        self.vcpu.set_immediate_exit(false);
        Some(ended)
    }
}

impl Drop for WriteLoop {
    fn drop(&mut self) {
        // `stop` reports why the guest stopped by itself.
        let _ = self.end();
    }
}
