//! The errors of a KVM machine.

use vmferry_dirty::DirtyLogError;

use crate::state::StateError;

/// A failure of the KVM back end.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// `/dev/kvm` cannot be opened, or lacks a capability.
    #[error("KVM cannot be used here: {reason}")]
    Unavailable {
        /// What is missing and what to do.
        reason: String,
    },
    /// This back end cannot create such a machine.
    #[error("this machine cannot be created: {reason}")]
    Config {
        /// The setting and its bounds.
        reason: String,
    },
    /// A request to KVM about the whole machine failed.
    #[error("KVM refused {what}: {source}")]
    Vm {
        /// The ioctl.
        what: &'static str,
        /// Its error.
        source: std::io::Error,
    },
    /// A request to KVM about one vCPU failed.
    #[error("KVM refused {what} for vCPU {vcpu}: {source}")]
    Vcpu {
        /// Its index.
        vcpu: u32,
        /// The ioctl.
        what: &'static str,
        /// Its error.
        source: std::io::Error,
    },
    /// KVM refused the value of a register of the saved guest.
    #[error(
        "KVM refused the value {value:#x} of MSR {index:#x} for vCPU {vcpu}: \
         this host cannot continue this guest"
    )]
    Msr {
        /// The vCPU.
        vcpu: u32,
        /// The register's number.
        index: u32,
        /// The saved value.
        value: u64,
    },
    /// The guest's TSC runs at a rate that this host cannot provide.
    #[error(
        "the guest's TSC runs at {saved} kHz, this host's at {here} kHz and cannot be scaled: \
         {source}"
    )]
    TscFrequency {
        /// The rate in the saved state.
        saved: u32,
        /// The rate of this host.
        here: u32,
        /// KVM's error.
        source: std::io::Error,
    },
    /// The guest program or its boot structures cannot be put into guest memory.
    #[error("the guest cannot be loaded into its memory: {reason}")]
    Boot {
        /// The address and the cause.
        reason: String,
    },
    /// The thread of a vCPU has ended or could not be started.
    #[error("the thread of vCPU {vcpu} {reason}")]
    Thread {
        /// The vCPU.
        vcpu: u32,
        /// What happened to it.
        reason: String,
    },
    /// No thread could be started to throttle the vCPUs.
    #[error("the vCPUs cannot be throttled, because no thread could be started for it: {source}")]
    Throttle {
        /// The system's error.
        source: std::io::Error,
    },
    /// The machine is not in the phase that the request needs.
    #[error("the machine cannot be {wanted}: it {phase}")]
    Phase {
        /// The request.
        wanted: &'static str,
        /// The machine's phase.
        phase: String,
    },
    /// The state cannot be written or read.
    #[error(transparent)]
    State(#[from] StateError),
    /// The dirty rings cannot be created.
    #[error(transparent)]
    DirtyLog(#[from] DirtyLogError),
}

impl KvmError {
    pub(super) fn vm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |error| Self::Vm { what, source: error.into() }
    }

    pub(super) fn vcpu(vcpu: u32, what: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |error| Self::Vcpu { vcpu, what, source: error.into() }
    }
}
