//! The sockets that a QEMU's migration uses.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};
use serde_json::{Value, json};

use super::late::FurtherChannel;
use super::place::Place;
use crate::error::QemuError;
use crate::qmp::{Qmp, Version};
use crate::state;

/// The name of the descriptor within QEMU.
const DESCRIPTOR: &str = "vmferry-stream";

/// How long QEMU may take to connect all its channels, which it does at once.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// A `multifd` channel begins with these bytes, in network byte order (`migration/multifd.c`).
const MULTIFD_MAGIC: u32 = 0x1122_3344;

/// The channel's number follows magic, version and the guest's UUID.
const MULTIFD_ID_AT: usize = 24;

/// Bytes that are discarded per read.
const DRAINED: usize = 256 << 10;

/// From this version on, a QEMU that could not take a guest can be told to keep running and report
/// the error.
const STAYS_AFTER_FAILURE: Version = Version { major: 9, minor: 1, micro: 0 };

/// Tells QEMU to migrate into sockets of this host, and puts their other ends into `opened`: the
/// main stream, then the channels in the order of their numbers. With `post_copy` QEMU connects a
/// further channel later, to what is returned.
///
/// # Errors
/// QMP errors and system call errors. The guest keeps running; QEMU keeps what was opened until
/// then.
pub fn open_outgoing(
    qmp: &mut Qmp,
    channels: u8,
    post_copy: bool,
    opened: &mut Vec<UnixStream>,
) -> Result<Option<FurtherChannel>, QemuError> {
    qmp.forget_events();
    if channels == 0 && !post_copy {
        opened.push(give(qmp)?);
        qmp.execute("migrate", json!({ "uri": format!("fd:{DESCRIPTOR}") }))?;
        return Ok(None);
    }
    let place = Place::new(qmp)?;
    let failed = |action| move |source| QemuError::Local { action, source };
    let listener = place.listen()?;
    listener.set_nonblocking(true).map_err(failed("listen for QEMU"))?;
    qmp.execute("migrate", json!({ "uri": place.our_uri() }))?;
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    // The main stream always connects first; the others connect in the order in which QEMU's
    // threads start.
    let mut numbers: Vec<u8> = Vec::new();
    while opened.len() <= usize::from(channels) {
        opened.push(accept(qmp, &listener, deadline)?);
        if let [_, .., channel] = opened.as_slice() {
            numbers.push(number_of(channel, deadline)?);
        }
    }
    let mut in_order: Vec<_> = numbers.into_iter().zip(opened.drain(1..)).collect();
    in_order.sort_by_key(|(number, _)| *number);
    let are_all = in_order.iter().map(|(number, _)| *number).eq(0..channels);
    opened.extend(in_order.into_iter().map(|(_, channel)| channel));
    if !are_all {
        return Err(unknown_channel());
    }
    Ok(post_copy.then(|| FurtherChannel::at(listener, place)))
}

/// Reads streams to their ends and discards the bytes, in threads of their own, so that QEMU can
/// end its migration in its usual way. If its sockets are cut instead, QEMU 10.0 may wait for its
/// own channels forever, and the guest with it.
pub fn drain(streams: Vec<UnixStream>) {
    for stream in streams {
        // Without a thread the stream is cut, which works nearly always.
        let _ = std::thread::Builder::new().name("qemu-drain".into()).spawn(move || {
            let mut bytes = vec![0; DRAINED];
            // The socket may be non-blocking, or may have other readers.
            while wait_readable(&[stream.as_fd()], None).is_ok() {
                match recv(&stream, &mut bytes[..], RecvFlags::DONTWAIT) {
                    Ok((0, _)) => return,
                    Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                    Err(_) => return,
                }
            }
        });
    }
}

/// Tells a QEMU that waits for a guest to take it from sockets of this host, and returns their
/// other ends, in the same order. With several streams, they use a socket in `place`. With
/// `post_copy` the last one is QEMU's further channel.
///
/// # Errors
/// QMP errors and system call errors.
pub fn open_incoming(
    qmp: &mut Qmp,
    channels: u8,
    post_copy: bool,
    place: Option<&Place>,
) -> Result<Vec<UnixStream>, QemuError> {
    qmp.forget_events();
    let order = |uri: String| {
        let mut order = json!({ "uri": uri });
        if qmp.version() >= STAYS_AFTER_FAILURE {
            order["exit-on-error"] = json!(false);
        }
        order
    };
    if channels == 0 && !post_copy {
        let order = order(format!("fd:{DESCRIPTOR}"));
        let ours = give(qmp)?;
        qmp.execute("migrate-incoming", order)?;
        return Ok(vec![ours]);
    }
    let mut made = None;
    let place = Place::given_or_new(place, &mut made, qmp)?;
    // A socket of an earlier QEMU would be mistaken for the new one's.
    place.clear();
    let order = order(place.their_uri());
    qmp.execute("migrate-incoming", order)?;
    // QEMU 7.2 takes the first connection for the main stream, whatever it carries.
    let count = 1 + channels + u8::from(post_copy);
    let connected: Result<_, _> = (0..count).map(|_| place.connect()).collect();
    place.clear();
    connected.map_err(|source| QemuError::Local { action: "connect to QEMU", source })
}

/// Gives QEMU one end of a socket pair.
fn give(qmp: &mut Qmp) -> Result<UnixStream, QemuError> {
    let (ours, theirs) = state::pair()?;
    qmp.give_descriptor(DESCRIPTOR, &theirs)?;
    Ok(ours)
}

/// The next connection of a QEMU that was told to migrate, to a listener that does not block.
///
/// # Errors
/// QMP errors and system call errors; that QEMU has given up, or does not connect.
pub fn accept(
    qmp: &mut Qmp,
    listener: &UnixListener,
    deadline: Instant,
) -> Result<UnixStream, QemuError> {
    let failed = |source| QemuError::Local { action: "let QEMU connect", source };
    let monitor = qmp.descriptor()?;
    loop {
        match listener.accept() {
            Ok((socket, _)) => {
                socket.set_nonblocking(false).map_err(failed)?;
                return Ok(socket);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(failed(error)),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(qmp.timed_out("connect its channels", CONNECT_TIMEOUT).into());
        }
        wait_readable(&[listener.as_fd(), monitor.as_fd()], Some(left)).map_err(failed)?;
        let over = |event: &Value| {
            let status = event["data"]["status"].as_str();
            event["event"] == "MIGRATION" && matches!(status, Some("failed" | "cancelled"))
        };
        if qmp.look_at_events()?.any(over) {
            return Err(state::given_up(qmp)?);
        }
    }
}

/// The channel's number, which is in its first bytes. They are peeked, not consumed.
fn number_of(channel: &UnixStream, deadline: Instant) -> Result<u8, QemuError> {
    let failed = |source| QemuError::Local { action: "read a channel of QEMU", source };
    let left = deadline.saturating_duration_since(Instant::now());
    wait_readable(&[channel.as_fd()], Some(left)).map_err(failed)?;
    // QEMU writes these bytes in one call, and a Unix stream socket delivers one write together.
    let mut first = [0; MULTIFD_ID_AT + 1];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let (read, _) = recv(channel, &mut first[..], flags).map_err(|errno| failed(errno.into()))?;
    match first {
        [a, b, c, d, .., number]
            if read == first.len() && u32::from_be_bytes([a, b, c, d]) == MULTIFD_MAGIC =>
        {
            Ok(number)
        }
        _ => Err(unknown_channel()),
    }
}

fn unknown_channel() -> QemuError {
    QemuError::Unsupported(
        "its multifd channels are none that vmferry knows: carry it over one stream".into(),
    )
}

fn wait_readable(
    descriptors: &[std::os::fd::BorrowedFd<'_>],
    left: Option<Duration>,
) -> std::io::Result<()> {
    let mut polled: Vec<PollFd<'_>> =
        descriptors.iter().map(|descriptor| PollFd::new(descriptor, PollFlags::IN)).collect();
    let timeout = left.map(Timespec::try_from).transpose();
    let timeout = timeout.map_err(|_| std::io::ErrorKind::InvalidInput)?;
    match poll(&mut polled, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
