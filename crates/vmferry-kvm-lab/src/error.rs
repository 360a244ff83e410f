//! What can go wrong in the lab.

use vmferry_memory::MemoryError;

/// An error of the lab.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A number of vCPUs that can't be.
    #[error("{asked} vCPUs asked for; choose 1 to {max}", max = crate::MAX_VCPUS)]
    Vcpus {
        /// How many.
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
    /// A dirty ring is full and nobody has said what to do about it.
    #[error("the dirty ring of vCPU {vcpu} is full, and there is no hook for that")]
    RingFull {
        /// The vCPU.
        vcpu: usize,
    },
    /// The guest left for another reason than that it is done.
    #[error("vCPU {vcpu} left the guest by {exit} at {rip:#x}")]
    Exit {
        /// The vCPU.
        vcpu: usize,
        /// KVM's name of the exit.
        exit: String,
        /// Where it was.
        rip: u64,
    },
    /// KVM refused something.
    #[error("{what}")]
    Kvm {
        /// What was asked.
        what: &'static str,
        /// What it said.
        #[source]
        source: std::io::Error,
    },
    /// Guest memory: its layout, or a page that is not in it.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// No thread, or no signal handler.
    #[error("{what}")]
    System {
        /// What was asked.
        what: &'static str,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

impl LabError {
    pub(crate) fn kvm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |error| Self::Kvm { what, source: error.into() }
    }
}
