//! The two ways to move a QEMU's guest: attach to it, or carry QEMU's own migration.

use std::path::Path;

use crate::carried::CarriedSource;
use crate::error::QemuError;
use crate::inventory::Allowed;
use crate::source::QemuSource;

/// The requested way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Attached if that is possible, and carried otherwise.
    #[default]
    Auto,
    /// Attached, or refused.
    Attached,
    /// Carried, even if it could be attached.
    Carried,
}

/// A QEMU whose guest can be moved.
pub enum Reached {
    /// It is attached.
    Attached(Box<QemuSource>),
    /// It is carried.
    Carried {
        /// The guest.
        source: Box<CarriedSource>,
        /// Why it is not attached, and what change would allow it; `None` if it was not tried.
        why: Option<QemuError>,
    },
}

impl Reached {
    /// Reaches the QEMU at this QMP socket. If it is carried, it uses `channels` multifd channels
    /// in addition to its main stream.
    ///
    /// # Errors
    /// What prevents the requested mode; with [`Mode::Auto`], what prevents both.
    pub fn by(socket: &Path, mode: Mode, channels: u8) -> Result<Self, QemuError> {
        let carried = |why| {
            let source = Box::new(CarriedSource::attach(socket, channels)?);
            Ok(Self::Carried { source, why })
        };
        if mode == Mode::Carried {
            return carried(None);
        }
        match QemuSource::attach(socket) {
            Ok(source) => Ok(Self::Attached(Box::new(source))),
            Err(why) if mode == Mode::Auto && why.is_of_attaching() => carried(Some(why)),
            Err(error) => Err(error),
        }
    }

    /// Allows the machine at the destination to differ.
    pub fn allow_to_differ(&mut self, allowed: Allowed) {
        match self {
            Self::Attached(source) => source.allow_to_differ(allowed),
            Self::Carried { source, .. } => source.allow_to_differ(allowed),
        }
    }
}
