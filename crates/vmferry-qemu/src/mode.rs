//! How a QEMU's guest is moved: by attaching to it, or by carrying QEMU's own migration.

use std::path::Path;

use crate::carried::CarriedSource;
use crate::error::QemuError;
use crate::source::QemuSource;

/// Which of the two ways is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Attached if that is possible, and carried otherwise.
    #[default]
    Auto,
    /// Attached, or not at all.
    Attached,
    /// Carried, whatever is possible.
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
        /// Why it is not attached, and what change would allow it; `None` if nobody has tried.
        why: Option<QemuError>,
    },
}

impl Reached {
    /// Takes the QEMU whose QMP socket this is. One that is carried uses so many channels beside its main stream.
    ///
    /// # Errors
    /// What stands against that mode; with [`Mode::Auto`], against any.
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
}
