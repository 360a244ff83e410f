//! QEMU guests: `send --qemu`, `receive --qemu`, `receive --exec`, and their helper processes: the
//! starter of QEMU, the runner of hooks, and the guardian of a guest that is being sent.

mod arrived;
mod fetching;
mod found;
pub mod guard;
pub mod hook;
mod hooked;
mod kept;
pub mod receive;
pub mod send;
mod service;
mod settle;
pub mod starter;
mod waiting;

pub use self::arrived::note_crashed;

use vmferry_microvm::config::check_name;
use vmferry_qemu::{QemuError, QmpError};
use vmferry_wire::GuestIdentity;

use crate::exit::{Code, Failure};

/// The name of a QEMU guest's control socket while it is sent: the guest's name, if it is valid for
/// a socket.
pub fn socket_name(guest: &GuestIdentity, pid: Option<u32>) -> String {
    if check_name(&guest.name).is_ok() {
        return guest.name.clone();
    }
    pid.map_or_else(|| format!("qemu-{}", guest.uuid.simple()), |pid| format!("qemu-{pid}"))
}

impl From<QemuError> for Failure {
    fn from(error: QemuError) -> Self {
        let code = match &error {
            QemuError::Locked { .. } | QemuError::Qmp(QmpError::Busy { .. }) => Code::Busy,
            error if error.is_timeout() => Code::WrongState,
            QemuError::Qmp(QmpError::Ended { .. }) => Code::WrongState,
            QemuError::Qmp(_) => Code::UnknownGuest,
            QemuError::Memory { .. }
            | QemuError::Unsupported(_)
            | QemuError::Unattachable(_)
            | QemuError::Unproved { .. }
            | QemuError::SameFile { .. }
            | QemuError::NoFaults { .. }
            | QemuError::FreesPages
            | QemuError::HugePages => Code::Incompatible,
            QemuError::FileInUse { .. } => Code::Busy,
            QemuError::State { .. }
            | QemuError::PoweredOff(_)
            | QemuError::Stopped { .. }
            | QemuError::LacksPages { .. }
            | QemuError::NotEnded { .. }
            | QemuError::SentAgain { .. }
            | QemuError::MayBeGiven { .. } => Code::WrongState,
            QemuError::Another { .. } | QemuError::Unseen { .. } => Code::UnknownGuest,
            QemuError::NotReported { .. } => Code::Corrupt,
            QemuError::Process { .. }
            | QemuError::Inject { .. }
            | QemuError::Ended { .. }
            | QemuError::EndedTaking { .. }
            | QemuError::GivenUp { .. }
            | QemuError::PostCopyFailed { .. }
            | QemuError::Local { .. } => Code::Internal,
        };
        Self::of(code, error)
    }
}
