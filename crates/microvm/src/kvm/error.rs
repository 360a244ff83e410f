//! What can go wrong with a KVM machine, with the evidence.

use vmferry_dirty::DirtyLogError;

use crate::state::StateError;

/// A failure of the KVM back end.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// `/dev/kvm` cannot be opened or does not serve.
    #[error("KVM cannot be used here: {reason}")]
    Unavailable {
        /// What is missing and what to do.
        reason: String,
    },
    /// A machine that this back end cannot make.
    #[error("this machine cannot be made: {reason}")]
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
    /// KVM did not take a register that the saved guest has.
    #[error(
        "KVM refused the value {value:#x} of MSR {index:#x} for vCPU {vcpu}: \
         this host cannot continue this guest"
    )]
    Msr {
        /// The vCPU.
        vcpu: u32,
        /// Of the register.
        index: u32,
        /// That was saved.
        value: u64,
    },
    /// The source's clock ticks at a rate that this host cannot give.
    #[error(
        "the guest's TSC runs at {saved} kHz, this host's at {here} kHz and cannot be scaled: \
         {source}"
    )]
    TscFrequency {
        /// In the state.
        saved: u32,
        /// Of this host.
        here: u32,
        /// KVM's answer.
        source: std::io::Error,
    },
    /// The guest program or its boot structures cannot be put into guest memory.
    #[error("the guest cannot be loaded into its memory: {reason}")]
    Boot {
        /// Address and cause.
        reason: String,
    },
    /// A thread that runs a vCPU is gone or cannot be made.
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
        /// The system's answer.
        source: std::io::Error,
    },
    /// The machine is not in the phase that the request needs.
    #[error("the machine cannot be {wanted}: it {phase}")]
    Phase {
        /// What was asked for.
        wanted: &'static str,
        /// The phase that it is in.
        phase: String,
    },
    /// The state cannot be written or read.
    #[error(transparent)]
    State(#[from] StateError),
    /// The dirty rings cannot be made.
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
