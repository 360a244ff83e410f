//! What can go wrong with a machine.

use vmferry_dirty::DirtyLogError;
use vmferry_memory::MemoryError;

use crate::kvm::KvmError;
use crate::state::StateError;

/// An error of a machine.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// A setting out of its bounds.
    #[error("{setting}: {reason}")]
    Config {
        /// The setting.
        setting: &'static str,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// The machine is not in a state for that.
    #[error("the guest is {is}, and must be {needed}")]
    WrongState {
        /// What it is.
        is: &'static str,
        /// What it must be.
        needed: &'static str,
    },
    /// The guest has stopped by itself.
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
    /// Saved state that can't be loaded.
    #[error(transparent)]
    State(#[from] StateError),
    /// The balloon could not be made or saved.
    #[error("the balloon")]
    Balloon(#[source] std::io::Error),
    /// No thread could be started.
    #[error("the system has no thread left")]
    Thread(#[source] std::io::Error),
}
