//! The outlets of ways that do not encrypt: calls, io_uring, `MSG_ZEROCOPY`.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Write};
use std::net::TcpStream;

use anyhow::Context;

use super::frame::Frame;
use super::kernel::Ring;
use super::outlet::{Outlet, hear, send_all};
use super::way::{Call, Way};
use super::zero_copy::ZeroCopy;

/// The outlet of a way that does not encrypt.
///
/// # Errors
/// What the kernel does not have.
pub fn outlet(way: &Way, stream: TcpStream) -> anyhow::Result<Box<dyn Outlet>> {
    Ok(match way.call {
        Call::ZeroCopy => Box::new(ZeroCopy::new(stream)?),
        Call::Ring { zero_copy } => Box::new(Linked {
            stream,
            ring: Ring::new(zero_copy).context("no io_uring")?,
            next: VecDeque::new(),
            back: Vec::new(),
            has_notices: zero_copy,
        }),
        call => {
            let most = match call {
                Call::Pieces(bytes) => bytes,
                _ => usize::MAX,
            };
            Box::new(Calls { stream, at_once: call != Call::Write, most, back: Vec::new() })
        }
    })
}

/// Writes no more than so many bytes of the slices, which are two at most.
fn write_up_to(to: &mut impl Write, from: &[IoSlice<'_>], most: usize) -> io::Result<usize> {
    let mut left = most;
    let mut cut = [IoSlice::new(&[]); 2];
    for (cut, from) in cut.iter_mut().zip(from) {
        *cut = IoSlice::new(&from[..from.len().min(left)]);
        left -= cut.len();
    }
    to.write_vectored(&cut)
}

/// `writev`, or `write` twice.
struct Calls {
    stream: TcpStream,
    at_once: bool,
    /// Bytes of a call of `writev`.
    most: usize,
    back: Vec<Frame>,
}

impl Outlet for Calls {
    fn send(&mut self, frame: Frame) -> io::Result<()> {
        let ((head, pages), mut stream) = (frame.parts(), &self.stream);
        if self.at_once {
            let mut slices = [head, pages].map(IoSlice::new);
            send_all(&mut slices, |slices| write_up_to(&mut stream, slices, self.most))?;
        } else {
            stream.write_all(head)?;
            stream.write_all(pages)?;
        }
        self.back.push(frame);
        Ok(())
    }

    fn give_back(&mut self, back: &mut Vec<Frame>) -> io::Result<()> {
        back.append(&mut self.back);
        Ok(())
    }

    fn wait(&mut self) -> io::Result<bool> {
        Ok(false)
    }

    fn hear(&mut self, into: &mut [u8], wait: bool) -> io::Result<usize> {
        hear(&self.stream, into, wait)
    }
}

/// Frames of a chain.
const CHAIN: usize = 4;

/// io_uring: the frames of a chain go one after the other, and while they go the next chain is made. Two chains
/// at a time would have no order.
struct Linked {
    stream: TcpStream,
    ring: Ring,
    next: VecDeque<Frame>,
    back: Vec<Frame>,
    has_notices: bool,
}

impl Linked {
    fn submit(&mut self) -> io::Result<()> {
        let frames = self.next.len().min(CHAIN);
        self.ring.submit(&self.stream, self.next.drain(..frames))
    }

    /// Begins the next chain if the last one has gone.
    fn turn(&mut self) -> io::Result<()> {
        self.ring.collect(&mut self.back)?;
        if self.ring.unsent() == 0 && !self.next.is_empty() {
            self.submit()?;
            // Without waiting, if there was room for it.
            self.ring.collect(&mut self.back)?;
        }
        Ok(())
    }
}

impl Outlet for Linked {
    fn send(&mut self, frame: Frame) -> io::Result<()> {
        self.next.push_back(frame);
        self.turn()?;
        while self.next.len() >= CHAIN {
            self.ring.wait()?;
            self.turn()?;
        }
        Ok(())
    }

    fn give_back(&mut self, back: &mut Vec<Frame>) -> io::Result<()> {
        self.turn()?;
        back.append(&mut self.back);
        Ok(())
    }

    fn wait(&mut self) -> io::Result<bool> {
        self.turn()?;
        if self.back.is_empty() && self.ring.holds_any() {
            self.ring.wait()?;
            self.turn()?;
            return Ok(true);
        }
        Ok(!self.back.is_empty())
    }

    fn hear(&mut self, into: &mut [u8], wait: bool) -> io::Result<usize> {
        hear(&self.stream, into, wait)
    }

    fn notices(&self) -> Option<(u64, u64)> {
        self.has_notices.then_some(self.ring.notices)
    }
}
