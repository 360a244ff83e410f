//! The errors of a machine.

use vmferry_dirty::DirtyLogError;
use vmferry_memory::MemoryError;

use crate::kvm::KvmError;
use crate::state::StateError;

/// An error of a machine.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// A setting is out of bounds.
    #[error("{setting}: {reason}")]
    Config {
        /// The setting.
        setting: &'static str,
        /// What is wrong, and what the setting may be.
        reason: String,
    },
    /// The machine is in the wrong state for the request.
    #[error("the guest is {is}, and must be {needed}")]
    WrongState {
        /// The state it is in.
        is: &'static str,
        /// The state it must be in.
        needed: &'static str,
    },
    /// The guest has crashed.
    #[error("the guest has crashed: {0}")]
    Crashed(String),
    /// KVM failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// Guest memory failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A dirty log failed.
    #[error(transparent)]
    DirtyLog(#[from] DirtyLogError),
    /// The saved state cannot be loaded.
    #[error(transparent)]
    State(#[from] StateError),
    /// The balloon could not be created or saved.
    #[error("the balloon failed")]
    Balloon(#[source] std::io::Error),
    /// No thread could be started.
    #[error("a thread could not be started")]
    Thread(#[source] std::io::Error),
}
