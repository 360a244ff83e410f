//! What the kernel reports about Unix sockets: which socket is at the other end, and which
//! processes are connected to a listener.
//!
//! This uses `NETLINK_SOCK_DIAG` (Linux `include/uapi/linux/unix_diag.h`), which describes the
//! sockets of one network namespace to any user. If it is missing or forbidden, nothing is known,
//! which is never an error.

use std::collections::BTreeSet;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::error::Client;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SHOW_VFS: u32 = 1 << 1;
const SHOW_PEER: u32 = 1 << 2;
const ATTRIBUTE_VFS: u16 = 1;
const ATTRIBUTE_PEER: u16 = 2;
const TCP_ESTABLISHED: u8 = 1;
const HEADER_BYTES: usize = 16;
const MESSAGE_BYTES: usize = 16;
/// The kernel sends at most this much at a time.
const BUFFER_BYTES: usize = 32 << 10;

/// A socket, as the kernel describes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Described {
    state: u8,
    inode: u32,
    /// The inode of the file that it is bound to.
    file: Option<u32>,
    /// The socket at the other end; 0 until the listener accepts it.
    peer: Option<u32>,
}

/// The credentials of the process that listens at the other end: its PID, which is 0 if its
/// namespace is not visible from here, and its user.
///
/// # Errors
/// System call errors.
pub fn credentials(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointers are to locals of the type and length that this option expects.
    let done = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if done == 0 { Ok(found) } else { Err(io::Error::last_os_error()) }
}

/// The process that listens at the other end, if it is visible from here: by a pidfd, which can't
/// refer to a later process, or before Linux 6.5 by its PID.
pub fn listener(stream: &UnixStream) -> Option<u32> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut number: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: as in `credentials`.
    let done = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut number).cast(),
            &raw mut length,
        )
    };
    let pid = if done == 0 && number >= 0 {
        // SAFETY: the kernel has just created this descriptor for this process.
        let process = unsafe { OwnedFd::from_raw_fd(number) };
        let about =
            std::fs::read_to_string(format!("/proc/self/fdinfo/{}", process.as_raw_fd())).ok()?;
        // -1 if the process has ended, 0 if it is in another namespace.
        about.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse::<i32>().ok())?
    } else {
        credentials(stream).ok()?.pid
    };
    u32::try_from(pid).ok().filter(|pid| *pid != 0)
}

/// The inode of the socket at the other end, once it was accepted.
pub fn peer(stream: &UnixStream) -> Option<u32> {
    let own = inode(stream)?;
    let described = ask(own, u32::MAX, false)?;
    described.into_iter().find(|socket| socket.inode == own)?.peer.filter(|peer| *peer != 0)
}

/// The clients that are connected to the listener at `path`, if it has not accepted `stream`.
/// `None` if it has, or if this is not known.
pub fn others_at(path: &Path, stream: Option<&UnixStream>) -> Option<Vec<Client>> {
    if stream.is_some_and(|stream| peer(stream).is_some()) {
        return None;
    }
    let file = std::fs::metadata(path).ok()?.ino() as u32;
    let own = stream.and_then(inode);
    let accepted = ask(0, 1 << TCP_ESTABLISHED, true)?;
    let clients: BTreeSet<u32> = accepted
        .into_iter()
        .filter(|socket| socket.file == Some(file) && socket.inode != 0)
        .filter_map(|socket| socket.peer)
        .filter(|peer| *peer != 0 && Some(*peer) != own)
        .collect();
    if clients.is_empty() {
        return None;
    }
    let mut found: Vec<Client> = Vec::new();
    for pid in processes() {
        let has = |inode: &u32| holds(pid, *inode) == Some(true);
        if clients.iter().any(has) {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            found.push(Client { pid, name: name.trim().to_owned() });
        }
    }
    Some(found)
}

/// Whether a process has a socket open; `None` if its descriptors can't be listed.
pub fn holds(pid: u32, inode: u32) -> Option<bool> {
    let wanted = format!("socket:[{inode}]");
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let is_it = |entry: std::fs::DirEntry| {
        std::fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == wanted.as_str())
    };
    Some(entries.flatten().any(is_it))
}

/// All visible processes.
pub fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn inode(stream: &UnixStream) -> Option<u32> {
    Some(rustix::fs::fstat(stream).ok()?.st_ino as u32)
}

/// Requests one socket, or all sockets in these states.
fn ask(inode: u32, states: u32, all: bool) -> Option<Vec<Described>> {
    // SAFETY: a plain system call; its result is checked and owned at once.
    let netlink = unsafe {
        let flags = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        let number = libc::socket(libc::AF_NETLINK, flags, libc::NETLINK_SOCK_DIAG);
        if number < 0 {
            return None;
        }
        OwnedFd::from_raw_fd(number)
    };
    let flags = libc::NLM_F_REQUEST | if all { libc::NLM_F_DUMP } else { 0 };
    let mut request = Vec::with_capacity(40);
    request.extend(40_u32.to_ne_bytes());
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend((flags as u16).to_ne_bytes());
    request.extend([0; 8]);
    request.extend([libc::AF_UNIX as u8, 0, 0, 0]);
    request.extend(states.to_ne_bytes());
    request.extend(inode.to_ne_bytes());
    request.extend((SHOW_VFS | SHOW_PEER).to_ne_bytes());
    request.extend([0xff; 8]);
    rustix::net::send(netlink.as_fd(), &request, rustix::net::SendFlags::empty()).ok()?;
    let mut found = Vec::new();
    let mut buffer = vec![MaybeUninit::<u8>::uninit(); BUFFER_BYTES];
    loop {
        let flags = rustix::net::RecvFlags::empty();
        let ((bytes, _), _) = rustix::net::recv(netlink.as_fd(), &mut buffer[..], flags).ok()?;
        match parse(bytes, &mut found)? {
            More::Expected if all => {}
            _ => return Some(found),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum More {
    Expected,
    None,
}

/// Parses the messages of one answer; `None` if the kernel refuses.
fn parse(mut bytes: &[u8], found: &mut Vec<Described>) -> Option<More> {
    while bytes.len() >= HEADER_BYTES {
        let length = u32_at(bytes, 0)? as usize;
        let message = bytes.get(HEADER_BYTES..length)?;
        match i32::from(u16_at(bytes, 4)?) {
            libc::NLMSG_DONE => return Some(More::None),
            libc::NLMSG_ERROR => return None,
            _ => found.push(described(message)?),
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(More::Expected)
}

fn described(message: &[u8]) -> Option<Described> {
    let mut socket =
        Described { state: *message.get(2)?, inode: u32_at(message, 4)?, ..Described::default() };
    let mut attributes = message.get(MESSAGE_BYTES..)?;
    while attributes.len() >= 4 {
        let length = usize::from(u16_at(attributes, 0)?).max(4);
        match u16_at(attributes, 2)? {
            ATTRIBUTE_VFS => socket.file = u32_at(attributes, 4),
            ATTRIBUTE_PEER => socket.peer = u32_at(attributes, 4),
            _ => {}
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(socket)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn peer_socket_is_known_once_it_was_accepted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let stream = UnixStream::connect(&path).unwrap();
        assert_eq!(peer(&stream), None);
        assert_eq!(others_at(&path, Some(&stream)), None, "no other client is there");
        let (theirs, _) = listener.accept().unwrap();
        assert_eq!(peer(&stream), inode(&theirs));
        let own = std::process::id();
        assert_eq!(super::listener(&stream), Some(own));
        assert_eq!(holds(own, inode(&theirs).unwrap()), Some(true));

        // The next client gets the holders; the first one does not get itself.
        let next = UnixStream::connect(&path).unwrap();
        let holders = others_at(&path, Some(&next)).unwrap();
        assert_eq!(holders.iter().map(|client| client.pid).collect::<Vec<_>>(), [own]);
        assert_eq!(others_at(&path, Some(&stream)), None);
    }
}
