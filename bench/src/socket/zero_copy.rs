//! An outlet that uses `sendmsg` with `MSG_ZEROCOPY`. The kernel holds a frame until the socket's
//! error queue reports its completion.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::ops::RangeInclusive;
use std::os::fd::AsFd;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::TIMEOUT;
use super::frame::Frame;
use super::kernel::{allow_zero_copy, completed, send_zero_copy};
use super::outlet::{Notices, Outlet, hear, send_all};

/// The sending end.
pub struct ZeroCopy {
    stream: TcpStream,
    /// Number of calls so far.
    calls: u32,
    held: VecDeque<Held>,
    back: Vec<Frame>,
    notices: Notices,
}

struct Held {
    frame: Frame,
    calls: RangeInclusive<u32>,
    /// Calls that the kernel has not completed.
    left: u32,
}

impl ZeroCopy {
    /// Enables zero copy on this socket.
    ///
    /// # Errors
    /// The kernel does not support it.
    pub fn new(stream: TcpStream) -> anyhow::Result<Self> {
        allow_zero_copy(stream.as_fd()).context("MSG_ZEROCOPY is not available")?;
        Ok(Self {
            stream,
            calls: 0,
            held: VecDeque::new(),
            back: Vec::new(),
            notices: Notices::default(),
        })
    }

    /// Reads the completions in the error queue.
    fn collect(&mut self) -> io::Result<()> {
        while let Some(completed) = completed(&self.stream)? {
            let calls = u64::from(completed.last - completed.first) + 1;
            self.notices.all += calls;
            self.notices.copied += if completed.copied { calls } else { 0 };
            for held in &mut self.held {
                let first = completed.first.max(*held.calls.start());
                let last = completed.last.min(*held.calls.end());
                held.left -= (last + 1).saturating_sub(first);
            }
        }
        while self.held.front().is_some_and(|held| held.left == 0) {
            self.back.extend(self.held.pop_front().map(|held| held.frame));
        }
        Ok(())
    }

    fn wait_for_queue(&self) -> io::Result<()> {
        // `poll` reports the error queue as `POLLERR`, which needs no request.
        let mut polled = [PollFd::new(&self.stream, PollFlags::empty())];
        let timeout = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        match poll(&mut polled, Some(&timeout)) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Outlet for ZeroCopy {
    fn send(&mut self, frame: Frame) -> io::Result<()> {
        let (first, (head, pages)) = (self.calls, frame.parts());
        let mut slices = [head, pages].map(IoSlice::new);
        send_all(&mut slices, |slices| {
            loop {
                match send_zero_copy(&self.stream, slices) {
                    Ok(sent) => {
                        self.calls += 1;
                        return Ok(sent);
                    }
                    // The process has reached its limit of pinned pages.
                    Err(error)
                        if error.raw_os_error() == Some(libc::ENOBUFS) && !self.held.is_empty() =>
                    {
                        self.wait_for_queue()?;
                        self.collect()?;
                    }
                    Err(error) => return Err(error),
                }
            }
        })?;
        let calls = first..=self.calls - 1;
        self.held.push_back(Held { frame, left: self.calls - first, calls });
        Ok(())
    }

    fn give_back(&mut self, back: &mut Vec<Frame>) -> io::Result<()> {
        self.collect()?;
        back.append(&mut self.back);
        Ok(())
    }

    fn wait(&mut self) -> io::Result<bool> {
        if self.held.is_empty() {
            return Ok(!self.back.is_empty());
        }
        self.wait_for_queue()?;
        self.collect()?;
        Ok(true)
    }

    fn hear(&mut self, into: &mut [u8], wait: bool) -> io::Result<usize> {
        hear(&self.stream, into, wait)
    }

    fn notices(&self) -> Option<Notices> {
        Some(self.notices)
    }
}
