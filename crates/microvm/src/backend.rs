//! The back end of a machine, which runs the guest's vCPUs.

use std::sync::Arc;

use vmferry_dirty::{
    DirtyLog, KvmAdaptiveLog, KvmBitmapLog, KvmClearLog, KvmRingLog, LogChoice, UffdLog,
};
use vmferry_memory::GuestMemory;

use crate::error::MachineError;
use crate::kvm::KvmBackend;
use crate::pace::Pace;
use crate::state::{SectionKind, StateReader, StateWriter};

/// Runs vCPUs. A new back end is paused: either it is started, or state is loaded and it is
/// resumed.
pub(crate) trait Backend: Send {
    /// `kvm` or `process`.
    fn kind(&self) -> &'static str;

    /// Boots the guest.
    fn start(&mut self) -> Result<(), MachineError>;

    /// Pauses the vCPUs. On return no vCPU runs, and pending exits are completed.
    fn pause(&mut self) -> Result<(), MachineError>;

    /// Resumes the vCPUs.
    fn resume(&mut self) -> Result<(), MachineError>;

    /// Throttles the vCPUs, whether they run or are paused. `None` lifts the throttle. A throttled
    /// vCPU pauses as promptly as any other.
    fn throttle(&mut self, pace: Option<Pace>) -> Result<(), MachineError>;

    /// Saves everything but memory. The guest must be paused.
    fn save(&mut self, out: &mut StateWriter) -> Result<(), MachineError>;

    /// Loads what `save` wrote into a machine that has never run.
    fn load(&mut self, from: &StateReader<'_>) -> Result<(), MachineError>;

    /// The sections that `load` knows.
    fn sections(&self) -> Vec<&'static [SectionKind]>;

    /// Why the guest has crashed, if it has.
    fn crash(&self) -> Option<String>;

    /// The latest output of the guest's serial port.
    fn serial_text(&self) -> String;

    /// A log of the writes of the vCPUs.
    fn dirty_log(
        &self,
        choice: LogChoice,
        memory: &GuestMemory,
    ) -> Result<BackendLog, MachineError>;
}

/// A dirty log of a back end.
pub(crate) struct BackendLog {
    pub(crate) log: Arc<dyn DirtyLog>,
    pub(crate) coverage: LogCoverage,
}

/// Whose writes a log of a back end sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogCoverage {
    /// Those of the vCPUs alone.
    VcpuWrites,
    /// Those of the vCPUs and of this process.
    AllWrites,
}

impl BackendLog {
    pub(crate) fn of_vcpu_writes(log: impl DirtyLog + 'static) -> Self {
        Self { log: Arc::new(log), coverage: LogCoverage::VcpuWrites }
    }

    pub(crate) fn of_all_writes(log: impl DirtyLog + 'static) -> Self {
        Self { log: Arc::new(log), coverage: LogCoverage::AllWrites }
    }
}

impl Backend for KvmBackend {
    fn kind(&self) -> &'static str {
        "kvm"
    }

    fn start(&mut self) -> Result<(), MachineError> {
        Ok(Self::start(self)?)
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        Ok(Self::pause(self)?)
    }

    fn resume(&mut self) -> Result<(), MachineError> {
        Ok(Self::resume(self)?)
    }

    fn throttle(&mut self, pace: Option<Pace>) -> Result<(), MachineError> {
        Ok(Self::throttle(self, pace)?)
    }

    fn save(&mut self, out: &mut StateWriter) -> Result<(), MachineError> {
        Ok(Self::save(self, out)?)
    }

    fn load(&mut self, from: &StateReader<'_>) -> Result<(), MachineError> {
        Ok(Self::load(self, from)?)
    }

    fn sections(&self) -> Vec<&'static [SectionKind]> {
        Self::sections().to_vec()
    }

    fn crash(&self) -> Option<String> {
        self.stopped().map(|stop| stop.to_string())
    }

    fn serial_text(&self) -> String {
        Self::serial_text(self)
    }

    fn dirty_log(
        &self,
        choice: LogChoice,
        memory: &GuestMemory,
    ) -> Result<BackendLog, MachineError> {
        let slots = self.kvm_slots();
        let vm = Arc::clone(self.vm());
        Ok(match choice {
            LogChoice::Userfaultfd => BackendLog::of_all_writes(UffdLog::new(memory)?),
            LogChoice::KvmBitmap => BackendLog::of_vcpu_writes(KvmBitmapLog::new(vm, slots)),
            LogChoice::KvmClear => BackendLog::of_vcpu_writes(KvmClearLog::new(vm, slots)?),
            LogChoice::KvmRing => match self.rings() {
                Some(rings) => BackendLog::of_vcpu_writes(KvmRingLog::new(Arc::clone(rings))),
                None => {
                    let reason = "the machine was created without dirty rings: \
                                  choose them when it is created";
                    return Err(MachineError::Config {
                        setting: "dirty-log",
                        reason: reason.into(),
                    });
                }
            },
            LogChoice::Auto => match self.rings() {
                Some(rings) => BackendLog::of_vcpu_writes(KvmRingLog::new(Arc::clone(rings))),
                None => match KvmAdaptiveLog::new(Arc::clone(&vm), slots.clone()) {
                    Ok(log) => BackendLog::of_vcpu_writes(log),
                    Err(_) => BackendLog::of_vcpu_writes(KvmBitmapLog::new(vm, slots)),
                },
            },
        })
    }
}
