//! What one handler thread waits for.

use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::{Fault, FaultDescriptor, FaultError, FaultRanges};

/// The descriptors of one share of a guest's memory.
pub struct FaultShare<'a> {
    descriptors: Vec<&'a FaultDescriptor>,
    /// The same, and the descriptor that ends the wait.
    polled: Vec<PollFd<'a>>,
}

/// Why a wait has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// Faults were read, unless another reader was faster.
    Faults,
    /// The descriptor that ends the wait is readable, or its other end is closed. No faults were
    /// read.
    Stopped,
}

impl FaultRanges {
    /// The descriptors of a share, for one thread. `stop` ends its wait: an eventfd, a pipe, or a
    /// pidfd of the process that owns the memory, whose end a userfaultfd does not report.
    #[must_use]
    pub fn share<'a>(&'a self, share: usize, stop: BorrowedFd<'a>) -> FaultShare<'a> {
        let of_share = self.ranges().iter().filter(|range| range.share == share);
        let descriptors: Vec<_> = of_share.map(|range| &range.descriptor).collect();
        let polled = descriptors.iter().map(|descriptor| PollFd::new(*descriptor, PollFlags::IN));
        let stop = PollFd::from_borrowed_fd(stop, PollFlags::IN);
        let polled = polled.chain([stop]).collect();
        FaultShare { descriptors, polled }
    }
}

impl FaultShare<'_> {
    /// Waits until a thread faults or the wait is ended, and appends all pending faults to `into`.
    ///
    /// # Errors
    /// [`FaultError::Read`], or as [`FaultDescriptor::read_faults`].
    pub fn wait(&mut self, into: &mut Vec<Fault>) -> Result<Waited, FaultError> {
        while let Err(errno) = poll(&mut self.polled, None) {
            if errno != Errno::INTR {
                let action = "poll the userfaultfds";
                return Err(FaultError::Read { action, source: errno.into() });
            }
        }
        let (stop, polled) = self.polled.split_last().expect("the stop is always in it");
        if !stop.revents().is_empty() {
            return Ok(Waited::Stopped);
        }
        for (descriptor, polled) in self.descriptors.iter().zip(polled) {
            if !polled.revents().is_empty() {
                descriptor.read_faults(into)?;
            }
        }
        Ok(Waited::Faults)
    }
}
