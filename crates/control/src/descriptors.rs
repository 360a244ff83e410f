//! Descriptors sent with the bytes of a Unix socket: the client's sockets that `fd:` names, or an
//! identity's files that the client has opened for the VMM.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Maximum number of descriptors in a request: a control channel, 16 lanes, and as many spare ones.
pub const MAX_DESCRIPTORS: usize = 34;

/// Sends the text of a request. Its descriptors accompany the first byte.
///
/// # Errors
/// The operating system's error.
pub fn send(stream: &UnixStream, line: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
    let mut sent = 0;
    if !descriptors.is_empty() {
        let borrowed = descriptors.iter().map(AsFd::as_fd).collect::<Vec<_>>();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            let text = format!("more than {MAX_DESCRIPTORS} descriptors");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        sent = sendmsg(stream, &[IoSlice::new(line)], &mut ancillary, SendFlags::NOSIGNAL)?;
    }
    (&*stream).write_all(&line[sent..])
}

/// A reader that keeps the descriptors that arrive with the bytes.
#[derive(Debug)]
pub struct Receiver<'a> {
    stream: &'a UnixStream,
    /// The descriptors received so far.
    pub descriptors: Vec<OwnedFd>,
}

impl<'a> Receiver<'a> {
    /// Reads from the stream's next byte on.
    pub fn new(stream: &'a UnixStream) -> Self {
        Self { stream, descriptors: Vec::new() }
    }
}

impl Read for Receiver<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(into)];
        let received = recvmsg(self.stream, slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        // No well-behaved client sends more. Dropping the extra descriptors closes them.
        self.descriptors.truncate(MAX_DESCRIPTORS);
        Ok(received.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receiver_keeps_descriptors() {
        let (near, far) = UnixStream::pair().unwrap();
        let (mut kept, given) = UnixStream::pair().unwrap();
        send(&near, b"line\n", &[given.into()]).unwrap();
        let mut receiver = Receiver::new(&far);
        let mut line = [0; 5];
        receiver.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"line\n");
        let mut given = UnixStream::from(receiver.descriptors.pop().unwrap());
        assert!(receiver.descriptors.is_empty());
        given.write_all(b"x").unwrap();
        kept.read_exact(&mut [0]).unwrap();
    }
}
