//! QEMU's own post-copy, carried: what is needed beside the stream.
//!
//! * QEMU connects a further channel for pages that threads wait for (`postcopy-preempt`) when it
//!   is told to start post-copy, to the same socket as the main stream.
//! * The main stream has a return path, on which the destination requests pages. Until the guest is
//!   stopped nothing needs it, so vmferry itself writes the few messages that QEMU waits for.
//!
//! Source: QEMU 10.0 `migration/migration.c`, `migration/postcopy-ram.c`.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use super::place::Place;
use super::protocol::{PONG, SHUT, write_answer};
use crate::error::QemuError;
use crate::qmp::{Qmp, Version};

/// The first release whose post-copy was tried.
const FIRST: Version = Version { major: 10, minor: 0, micro: 0 };

/// Where QEMU connects its further channel, and all channels once its post-copy was interrupted.
pub struct FurtherChannel {
    listener: UnixListener,
    place: Arc<Place>,
}

impl FurtherChannel {
    /// A new socket.
    ///
    /// # Errors
    /// System call errors.
    pub fn new(qmp: &Qmp) -> Result<Self, QemuError> {
        let place = Place::new(qmp)?;
        Ok(Self::at(place.listen()?, place))
    }

    /// Keeps the socket that QEMU has connected the main stream to.
    pub fn at(listener: UnixListener, place: Place) -> Self {
        Self { listener, place: Arc::new(place) }
    }

    /// What QEMU is told to connect to.
    pub fn uri(&self) -> String {
        self.place.our_uri()
    }

    /// The directory of the socket.
    pub fn place(&self) -> Arc<Place> {
        Arc::clone(&self.place)
    }

    /// Listens with a new socket, to which nothing has connected yet. It does not block.
    ///
    /// # Errors
    /// System call errors.
    pub fn listen_again(&self) -> Result<UnixListener, QemuError> {
        let failed = |source| QemuError::Local { action: "listen for QEMU", source };
        let listener = self.place.listen()?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(listener)
    }

    /// The channel, if QEMU has connected it, which it does before it stops the guest.
    ///
    /// # Errors
    /// System call errors.
    pub fn accept(&self) -> Result<Option<UnixStream>, QemuError> {
        let failed = |source| QemuError::Local { action: "let QEMU connect", source };
        self.listener.set_nonblocking(true).map_err(failed)?;
        match self.listener.accept() {
            Ok((channel, _)) => {
                channel.set_nonblocking(false).map_err(failed)?;
                Ok(Some(channel))
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }
}

/// Why post-copy can't be carried between QEMUs of this version, if it can't.
///
/// # Errors
/// The reason.
pub fn must_be_known(version: Version) -> Result<(), QemuError> {
    if version >= FIRST {
        return Ok(());
    }
    Err(QemuError::Unsupported(format!(
        "QEMU {version} has post-copy, but not as vmferry carries it: QEMU {FIRST} or later, or a \
         guest that can be attached"
    )))
}

/// Tells a QEMU that its destination hears it: it waits for that before it connects its further
/// channel.
pub fn say_heard(main: &UnixStream) -> Result<(), QemuError> {
    say(main, PONG, [0, 0, 0, 1])
}

/// Tells a QEMU that its destination needs nothing more of it, so that it completes its migration.
pub fn say_done(main: &UnixStream) -> Result<(), QemuError> {
    say(main, SHUT, [0; 4])
}

fn say(main: &UnixStream, kind: u16, body: [u8; 4]) -> Result<(), QemuError> {
    let action = "answer QEMU on its migration stream";
    write_answer(main, kind, &body).map_err(|source| QemuError::Local { action, source })
}
