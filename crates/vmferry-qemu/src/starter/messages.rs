//! What a process and its starter say to each other: a line of JSON each way, an answer with a descriptor if it is about
//! a file.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::memory_file::Sharing;
use crate::process::{Mapping, ProcessIdentity};

/// Longest line: QEMU's shared mappings are a few dozen.
const MAX_LINE_BYTES: usize = 1 << 20;

/// What is asked of a starter.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Ask {
    /// Start QEMU.
    Start,
    /// Has it ended?
    TryWait,
    /// Wait until it has.
    Wait,
    /// End it.
    End,
    /// The mappings of shared files of a process.
    SharedMappings(u32),
    /// The page table of a process.
    Pagemap(u32),
    /// The file behind a mapping of a process, which must be one of those that guest memory may be in.
    OpenFile(u32, Mapping),
    /// Does a process stand still?
    IsStopped(u32),
    /// Which process is it?
    Identify(u32),
    /// Whether QEMU has a guest, so that it outlives the receiver.
    KeepQemu(bool),
    /// Whose is the file behind a mapping of a process?
    Examine(u32, Mapping),
    /// What has QEMU printed last?
    LastWords,
}

/// What a starter answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// It was started: the process.
    Started(u32),
    /// How it has ended, as `wait(2)` says, or that it runs.
    Ended(Option<i32>),
    /// It was done; a file comes with it, if one was asked for.
    Done,
    /// The mappings.
    Mappings(Vec<Mapping>),
    /// Whether it stands still.
    Stopped(bool),
    /// The process.
    Identity(ProcessIdentity),
    /// Whose it is.
    Examined(Sharing),
    /// The last lines, if there are any.
    Words(Option<String>),
    /// It could not be done: why, and the system's error number, if it was the system.
    Failed(String, Option<i32>),
}

/// Sends a message.
///
/// # Errors
/// The system's.
pub fn send(stream: &UnixStream, message: &impl Serialize, file: Option<&File>) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let mut sent = 0;
    if let Some(file) = file {
        let descriptors = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        sent = sendmsg(stream, &[IoSlice::new(&line)], &mut ancillary, SendFlags::NOSIGNAL)?;
    }
    (&*stream).write_all(&line[sent..])
}

/// Receives a message, and the descriptor that came with it; none if the other side has gone.
///
/// # Errors
/// The system's, or a message that can't be read.
pub fn receive<T: DeserializeOwned>(
    stream: &UnixStream,
) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let (mut line, mut descriptor) = (Vec::new(), None);
    while line.last() != Some(&b'\n') {
        let mut part = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut part)];
        let received = match recvmsg(stream, slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?.bytes,
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                descriptor = descriptors.last();
            }
        }
        if received == 0 {
            return Ok(None);
        }
        line.extend_from_slice(&part[..received]);
        if line.len() > MAX_LINE_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    Ok(Some((serde_json::from_slice(&line)?, descriptor)))
}
