//! The outlets without encryption: `write`, `writev`, io_uring and `MSG_ZEROCOPY`.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Write};
use std::net::TcpStream;

use anyhow::Context;

use super::frame::Frame;
use super::kernel::Ring;
use super::outlet::{Notices, Outlet, hear, send_all};
use super::way::{Call, Way};
use super::zero_copy::ZeroCopy;

/// Makes the outlet of a method without encryption.
///
/// # Errors
/// The kernel does not support the method.
pub fn outlet(way: &Way, stream: TcpStream) -> anyhow::Result<Box<dyn Outlet>> {
    Ok(match way.call {
        Call::ZeroCopy => Box::new(ZeroCopy::new(stream)?),
        Call::Ring { zero_copy } => Box::new(Linked {
            stream,
            ring: Ring::new(zero_copy).context("io_uring is not available")?,
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

/// Writes at most `most` bytes of the slices. There are at most two slices.
fn write_up_to(to: &mut impl Write, from: &[IoSlice<'_>], most: usize) -> io::Result<usize> {
    let mut left = most;
    let mut cut = [IoSlice::new(&[]); 2];
    for (cut, from) in cut.iter_mut().zip(from) {
        *cut = IoSlice::new(&from[..from.len().min(left)]);
        left -= cut.len();
    }
    to.write_vectored(&cut)
}

/// An outlet that calls `writev`, or `write` twice.
struct Calls {
    stream: TcpStream,
    at_once: bool,
    /// Maximum bytes per `writev`.
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

/// Frames per chain.
const CHAIN: usize = 4;

/// An outlet that uses io_uring. The frames of a chain are sent in order. The next chain is built
/// meanwhile; two chains in flight would not be ordered.
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

    /// Submits the next chain if the last one is complete.
    fn advance(&mut self) -> io::Result<()> {
        self.ring.collect(&mut self.back)?;
        if self.ring.unsent() == 0 && !self.next.is_empty() {
            self.submit()?;
            // The send may complete at once.
            self.ring.collect(&mut self.back)?;
        }
        Ok(())
    }
}

impl Outlet for Linked {
    fn send(&mut self, frame: Frame) -> io::Result<()> {
        self.next.push_back(frame);
        self.advance()?;
        while self.next.len() >= CHAIN {
            self.ring.wait()?;
            self.advance()?;
        }
        Ok(())
    }

    fn give_back(&mut self, back: &mut Vec<Frame>) -> io::Result<()> {
        self.advance()?;
        back.append(&mut self.back);
        Ok(())
    }

    fn wait(&mut self) -> io::Result<bool> {
        self.advance()?;
        if self.back.is_empty() && self.ring.holds_any() {
            self.ring.wait()?;
            self.advance()?;
            return Ok(true);
        }
        Ok(!self.back.is_empty())
    }

    fn hear(&mut self, into: &mut [u8], wait: bool) -> io::Result<usize> {
        hear(&self.stream, into, wait)
    }

    fn notices(&self) -> Option<Notices> {
        self.has_notices.then_some(self.ring.notices)
    }
}
