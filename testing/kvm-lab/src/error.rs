//! Errors of the lab.

use vmferry_memory::MemoryError;

/// An error of the lab.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// An unsupported number of vCPUs.
    #[error("{asked} vCPUs; choose 1 to {max}", max = crate::MAX_VCPUS)]
    Vcpus {
        /// The requested number.
        asked: usize,
    },
    /// A layout that leaves no room for the lab's slot.
    #[error("the slots reach to {end:#x}, beyond what the page tables map")]
    TooHigh {
        /// End of the last slot.
        end: u64,
    },
    /// A vCPU that the machine does not have.
    #[error("there is no vCPU {vcpu}")]
    NoSuchVcpu {
        /// The vCPU.
        vcpu: usize,
    },
    /// A vCPU that is writing.
    #[error("vCPU {vcpu} is in use")]
    Busy {
        /// The vCPU.
        vcpu: usize,
    },
    /// This KVM has no dirty ring.
    #[error("this KVM has no dirty ring")]
    NoDirtyRing,
    /// A dirty ring is full and there is no hook for it.
    #[error("the dirty ring of vCPU {vcpu} is full, and there is no hook for that")]
    RingFull {
        /// The vCPU.
        vcpu: usize,
    },
    /// The guest exited for an unexpected reason.
    #[error("vCPU {vcpu} left the guest by {exit} at {rip:#x}")]
    Exit {
        /// The vCPU.
        vcpu: usize,
        /// KVM's name for the exit.
        exit: String,
        /// The instruction pointer.
        rip: u64,
    },
    /// KVM refused a request.
    #[error("{what}")]
    Kvm {
        /// The request.
        what: &'static str,
        /// The error of KVM.
        #[source]
        source: std::io::Error,
    },
    /// An error of guest memory: its layout, or a page outside of it.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A thread or a signal handler could not be created.
    #[error("{what}")]
    System {
        /// The request.
        what: &'static str,
        /// The system error.
        #[source]
        source: std::io::Error,
    },
}

impl LabError {
    pub(crate) fn kvm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |error| Self::Kvm { what, source: error.into() }
    }
}
