//! The keeper: a process beside the daemon that holds connections of libvirt which must not close
//! if the daemon dies.
//!
//! Between a Finish and its reply, the source's libvirt resumes its guest as soon as it sees its
//! connection fail, even if the guest runs at the destination. So the daemon gives the keeper a
//! duplicate of the connection before it sends the Finish. While no daemon is connected, the keeper
//! answers libvirt's keep-alive messages. The next daemon takes the connections over. A keeper that
//! dies is started again by the daemon, which gives it all connections once more.
//!
//! ```text
//!  daemon -> keeper     HOLD session, serial, descriptor | DROP session | TAKE | CHECK
//!  keeper -> daemon     DONE | for each connection HELD session, serial, descriptor, then DONE
//! ```
//! Each message is one packet of a `SOCK_SEQPACKET` connection.

mod client;
mod server;

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use vmferry_handover::SessionId;

pub use client::{HeldConnection, Keeper, KeeperProgram, connect};
pub use server::serve;

/// Length of a message: kind, session, serial number of the Finish.
const MESSAGE_BYTES: usize = 1 + 16 + 4;

const HOLD: u8 = 1;
const DROP: u8 = 2;
const TAKE: u8 = 3;
const DONE: u8 = 4;
const HELD: u8 = 5;
const CHECK: u8 = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Message {
    kind: u8,
    session: SessionId,
    serial: u32,
}

impl Message {
    fn of(kind: u8) -> Self {
        Self { kind, session: SessionId([0; 16]), serial: 0 }
    }
}

fn send(socket: impl AsFd, message: Message, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut bytes = [message.kind; MESSAGE_BYTES];
    bytes[1..17].copy_from_slice(&message.session.0);
    bytes[17..].copy_from_slice(&message.serial.to_le_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|descriptor| [descriptor]);
    if let Some(descriptors) = &descriptors {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let flags = SendFlags::NOSIGNAL;
    match sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, flags)? {
        MESSAGE_BYTES => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Receives a message; `None` at the end of the connection.
fn receive(socket: impl AsFd) -> io::Result<Option<(Message, Option<OwnedFd>)>> {
    let mut bytes = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
            Err(rustix::io::Errno::INTR) => {}
            received => break received?.bytes,
        }
    };
    let mut descriptor = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            descriptor = descriptors.into_iter().next().or(descriptor);
        }
    }
    if received == 0 {
        return Ok(None);
    }
    if received != MESSAGE_BYTES {
        return Err(io::Error::other("a message of the keeper has the wrong length"));
    }
    let mut session = SessionId([0; 16]);
    session.0.copy_from_slice(&bytes[1..17]);
    let serial = u32::from_le_bytes([bytes[17], bytes[18], bytes[19], bytes[20]]);
    Ok(Some((Message { kind: bytes[0], session, serial }, descriptor)))
}

#[cfg(test)]
mod tests;
