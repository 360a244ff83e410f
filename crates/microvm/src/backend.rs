//! What runs a guest's vCPUs.

use std::sync::Arc;

use vmferry_dirty::{
    DirtyLog, KvmAdaptiveLog, KvmBitmapLog, KvmClearLog, KvmRingLog, LogChoice, UffdLog,
};
use vmferry_memory::GuestMemory;

use crate::error::MachineError;
use crate::kvm::KvmBackend;
use crate::pace::Pace;
use crate::state::{SectionKind, StateReader, StateWriter};

/// Runs vCPUs. A new one stands still; either it starts, or state is loaded and it resumes.
pub(crate) trait Backend: Send {
    /// `kvm` or `process`.
    fn kind(&self) -> &'static str;

    /// Boots the guest.
    fn start(&mut self) -> Result<(), MachineError>;

    /// On return no vCPU runs, and pending exits are completed.
    fn pause(&mut self) -> Result<(), MachineError>;

    /// Lets the vCPUs go on.
    fn resume(&mut self) -> Result<(), MachineError>;

    /// Takes a part of their time from the vCPUs, or with `None` no longer, whether they run or are
    /// paused. A throttled vCPU is paused as soon as any.
    fn throttle(&mut self, pace: Option<Pace>) -> Result<(), MachineError>;

    /// Saves everything but memory; the guest is paused.
    fn save(&mut self, out: &mut StateWriter) -> Result<(), MachineError>;

    /// Loads what `save` wrote into a machine that has never run.
    fn load(&mut self, from: &StateReader<'_>) -> Result<(), MachineError>;

    /// The sections that `load` knows.
    fn sections(&self) -> Vec<&'static [SectionKind]>;

    /// Why the guest has stopped by itself, if it has.
    fn crash(&self) -> Option<String>;

    /// What the guest has printed lately.
    fn serial_text(&self) -> String;

    /// A log of what the vCPUs write, and whether it sees the VMM's own writes too.
    fn dirty_log(
        &self,
        choice: LogChoice,
        memory: &GuestMemory,
    ) -> Result<(Arc<dyn DirtyLog>, bool), MachineError>;
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
    ) -> Result<(Arc<dyn DirtyLog>, bool), MachineError> {
        let slots = self.kvm_slots();
        let vm = Arc::clone(self.vm());
        Ok(match choice {
            LogChoice::Userfaultfd => (Arc::new(UffdLog::new(memory)?), true),
            LogChoice::KvmBitmap => (Arc::new(KvmBitmapLog::new(vm, slots)), false),
            LogChoice::KvmClear => (Arc::new(KvmClearLog::new(vm, slots)?), false),
            LogChoice::KvmRing => match self.rings() {
                Some(rings) => (Arc::new(KvmRingLog::new(Arc::clone(rings))), false),
                None => {
                    let reason = "the machine was not made for it: say so before it is".into();
                    return Err(MachineError::Config { setting: "dirty-log", reason });
                }
            },
            LogChoice::Auto => match self.rings() {
                Some(rings) => (Arc::new(KvmRingLog::new(Arc::clone(rings))), false),
                None => match KvmAdaptiveLog::new(Arc::clone(&vm), slots.clone()) {
                    Ok(log) => (Arc::new(log), false),
                    Err(_) => (Arc::new(KvmBitmapLog::new(vm, slots)), false),
                },
            },
        })
    }
}
