//! The threads that read the guest's faults.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmferry_faults::Waited;
use vmferry_memory::PageRun;

use super::FetchContext;
use crate::data::destination::missing::MissingPages;
use crate::error::MigrateError;
use crate::machine::destination::io::Input;

/// How long a page that could not be placed waits for the next attempt: memory may be short for a
/// moment.
const RETRY: Duration = Duration::from_millis(200);

/// A thread for each share of the memory. Dropping it ends them.
pub struct FaultHandlers {
    stop: Option<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

impl FaultHandlers {
    /// Starts a thread for each share of the memory. `request` is called with the runs to request,
    /// and with the share's number.
    ///
    /// # Errors
    /// The system can't create a pipe or a thread.
    pub fn start(
        context: &FetchContext,
        request: impl Fn(usize, &[PageRun]) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let (stopped, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let mut handlers = Self { stop: Some(stop), threads: Vec::new() };
        for share in 0..context.missing.ranges().shares() {
            let (context, request) = (context.clone(), request.clone());
            let stopped = stopped.try_clone()?;
            let thread =
                std::thread::Builder::new().name(format!("faults{share}")).spawn(move || {
                    let _cpu = context.cpu.count_this_thread();
                    let fail = |error| {
                        let _ = context.results.send(Input::Failed(error));
                    };
                    let request = |runs: &[PageRun]| request(share, runs);
                    let handled = handle(&context.missing, share, &stopped, request, fail);
                    if let Err(error) = handled {
                        let _ = context.results.send(Input::Failed(error));
                    }
                })?;
            handlers.threads.push(thread);
        }
        Ok(handlers)
    }
}

impl Drop for FaultHandlers {
    fn drop(&mut self) {
        // The threads see the end of the pipe.
        self.stop = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Handles the faults of a share until the pipe ends. Faults that can't be handled are reported to
/// `fail`, and tried again.
fn handle(
    missing: &MissingPages,
    share: usize,
    stopped: &OwnedFd,
    mut request: impl FnMut(&[PageRun]),
    mut fail: impl FnMut(MigrateError),
) -> Result<(), MigrateError> {
    let mut waiting = missing.ranges().share(share, stopped.as_fd());
    let (mut faults, mut runs) = (Vec::new(), Vec::new());
    while waiting.wait(&mut faults)? == Waited::Faults {
        for fault in faults.drain(..) {
            // A fault is read once: its thread waits until the page is there.
            while let Err(error) = missing.fault(fault.address, &mut runs) {
                fail(error);
                if ends_within(stopped, RETRY) {
                    return Ok(());
                }
            }
        }
        if !runs.is_empty() {
            request(&runs);
            runs.clear();
        }
    }
    Ok(())
}

/// Waits until the pipe has ended, at most this long. Returns whether it has.
fn ends_within(pipe: &OwnedFd, most: Duration) -> bool {
    let mut fds = [PollFd::new(pipe, PollFlags::IN)];
    let most = Timespec { tv_sec: 0, tv_nsec: most.subsec_nanos().into() };
    // An interrupted wait is a short one.
    poll(&mut fds, Some(&most)).is_ok_and(|ready| ready > 0)
}
