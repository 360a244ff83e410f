//! The messages between a process and its starter: one line of JSON in each direction. An answer
//! about a file carries a descriptor.

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

use crate::identity::ProcessIdentity;
use crate::inventory::OpenImage;
use crate::memory_file::Sharing;
use crate::process::Mapping;
use crate::sample::{Block, ImageBlocks};

/// Longest line. QEMU has a few dozen shared mappings.
const MAX_LINE_BYTES: usize = 1 << 20;

/// A request to a starter.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Ask {
    /// Start QEMU.
    Start,
    /// Has it ended?
    TryWait,
    /// Wait until it has ended.
    Wait,
    /// Kill it.
    End,
    /// The shared file mappings of a process.
    SharedMappings(u32),
    /// The images and other files that a process has open.
    OpenImages(u32),
    /// Hashes of blocks of images that a process has open.
    ReadBlocks(u32, Vec<ImageBlocks>),
    /// The page table of a process.
    Pagemap(u32),
    /// The file behind a mapping of a process. Only mappings that may hold guest memory are
    /// allowed.
    OpenFile(u32, Mapping),
    /// Is the process stopped?
    IsStopped(u32),
    /// Identify the process.
    Identify(u32),
    /// Can a later process take descriptors from the process?
    GivesDescriptors(u32),
    /// Whether QEMU has a guest, so that it outlives the receiver.
    KeepQemu(bool),
    /// Which processes use the file behind a mapping?
    Examine(u32, Mapping),
    /// Open the device that creates userfaultfds.
    OpenFaultDevice,
    /// Have the process create a userfaultfd for missing pages.
    CreateFaults(u32),
    /// Close that userfaultfd in the process.
    CloseFaults,
    /// What has QEMU printed last?
    LastWords,
}

/// A starter's answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// QEMU was started, with this PID.
    Started(u32),
    /// Its status as `wait(2)` returns it; `None` while it runs.
    Ended(Option<i32>),
    /// The request was carried out. A file comes with the answer if one was requested.
    Done,
    /// The mappings.
    Mappings(Vec<Mapping>),
    /// The files.
    Images(Vec<OpenImage>),
    /// The blocks of each image.
    Blocks(Vec<Option<Vec<Block>>>),
    /// Whether it is stopped.
    Stopped(bool),
    /// Whether descriptors can be taken from it.
    GivesDescriptors(bool),
    /// The identity of the process.
    Identity(ProcessIdentity),
    /// Who uses the file.
    Examined(Sharing),
    /// The last lines, if there are any.
    Words(Option<String>),
    /// The request failed: the reason, and the error number if it was a system call.
    Failed(String, Option<i32>),
}

/// Sends a message.
///
/// # Errors
/// System call errors.
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

/// Receives a message, and the descriptor that came with it. Returns `None` if the peer has closed
/// the socket.
///
/// # Errors
/// System call errors, or a message that can't be parsed.
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
