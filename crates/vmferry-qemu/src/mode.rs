//! How the guest of a running QEMU is moved: vmferry attaches to it, or carries QEMU's own migration.

use std::path::Path;

use crate::carried::CarriedSource;
use crate::error::QemuError;
use crate::source::QemuSource;

/// What the user wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Attach if that can be done, and carry otherwise.
    #[default]
    Auto,
    /// Attach, or don't move it.
    Attached,
    /// Carry.
    Carried,
}

/// A running QEMU whose guest is to be moved.
pub enum Source {
    /// vmferry reads the guest's memory itself.
    Attached(Box<QemuSource>),
    /// QEMU streams it. With it comes why it was not attached, and what would allow that, if it was tried.
    Carried(Box<CarriedSource>, Option<QemuError>),
}

impl Source {
    /// Attaches to the QEMU whose QMP socket this is, or prepares to carry its guest, over so many `channels`. The guest is
    /// not touched.
    ///
    /// # Errors
    /// Why it can't be moved at all, or in this way, and what to change.
    pub fn find(socket: &Path, mode: Mode, channels: u8) -> Result<Self, QemuError> {
        let why = match mode {
            Mode::Carried => None,
            Mode::Attached | Mode::Auto => match QemuSource::attach(socket) {
                Ok(attached) => return Ok(Self::Attached(Box::new(attached))),
                // These are against any migration.
                Err(error @ (QemuError::Qmp(_) | QemuError::State { .. })) => return Err(error),
                Err(error) if mode == Mode::Attached => return Err(error),
                Err(error) => Some(error),
            },
        };
        let mut carried = CarriedSource::attach(socket, 0)?;
        if channels > 1 {
            carried.use_multifd(channels);
        }
        Ok(Self::Carried(Box::new(carried), why))
    }
}
