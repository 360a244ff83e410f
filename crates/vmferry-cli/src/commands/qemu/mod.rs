//! Guests of QEMU processes: `send --qemu`, `receive --qemu`, `receive --exec` and the process that starts its QEMU, and
//! the guardian of a guest that is being sent.

mod found;
pub mod guard;
pub mod receive;
pub mod send;
mod service;
pub mod starter;

use vmferry_microvm::config::check_name;
use vmferry_qemu::QemuError;
use vmferry_wire::GuestIdentity;

use crate::exit::{Code, Failure};

/// The name that a QEMU guest goes by on this host while it is sent: its own, if it can name a socket.
pub fn socket_name(guest: &GuestIdentity, pid: u32) -> String {
    if check_name(&guest.name).is_ok() { guest.name.clone() } else { format!("qemu-{pid}") }
}

impl From<QemuError> for Failure {
    fn from(error: QemuError) -> Self {
        let code = match &error {
            error if error.is_timeout() => Code::WrongState,
            QemuError::Qmp(_) => Code::UnknownGuest,
            QemuError::Memory { .. }
            | QemuError::Unsupported(_)
            | QemuError::Unattachable(_)
            | QemuError::SameFile { .. } => Code::Incompatible,
            QemuError::State { .. }
            | QemuError::Stopped { .. }
            | QemuError::SentAgain { .. }
            | QemuError::MayBeGiven { .. } => Code::WrongState,
            QemuError::Another { .. } => Code::UnknownGuest,
            QemuError::Process { .. }
            | QemuError::Inject { .. }
            | QemuError::Ended { .. }
            | QemuError::EndedTaking
            | QemuError::GivenUp { .. }
            | QemuError::Local { .. } => Code::Internal,
        };
        Self::of(code, error)
    }
}
