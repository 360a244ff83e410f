//! Descriptors that go with a request: `fd:` names sockets of the client, and the VMM uses them; the files of an identity
//! are opened by the client, and the VMM reads them.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Descriptors that may go with a request: a control channel, 16 lanes, and as many spare ones.
pub const MAX_DESCRIPTORS: usize = 34;

/// Sends a request's line, and its descriptors with the first byte.
///
/// # Errors
/// The system's.
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

/// Reads a stream and keeps the descriptors that come with it.
pub struct Receiver<'a> {
    stream: &'a UnixStream,
    /// What came.
    pub descriptors: Vec<OwnedFd>,
}

impl<'a> Receiver<'a> {
    /// From the stream's next byte on.
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
        // A client that keeps sending some is not honest; what is dropped is closed.
        self.descriptors.truncate(MAX_DESCRIPTORS);
        Ok(received.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_brings_its_descriptors() {
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
