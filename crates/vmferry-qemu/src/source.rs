//! A running QEMU as the engine's source.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use vmferry::free_pages::{FreePages, PunchedPages};
use vmferry::{GuestDescription, Resume, SourceVm, StateEstimate, VmError};
use vmferry_dirty::{DirtyLog, UffdLog};
use vmferry_memory::{GuestMemory, PAGE_SIZE, SlotLayout};
use vmferry_wire::GuestIdentity;

use crate::error::QemuError;
use crate::guest::{self, end_migration, host, run_on};
use crate::inject::{self, Injected};
use crate::machine::{self, Habits, Machine};
use crate::qmp::{Qmp, Version};
use crate::ram::{self, Ram};
use crate::settings::Settings;
use crate::starter::DirectView;
use crate::state::Saving;
use crate::throttle::Throttle;

/// The name of this kind of machine, which source and destination must agree on.
pub const VMM: &str = "qemu";

/// What stopping, saving, loading and starting take, measured with QEMU 7.2 and 10.0: 10 to 20 ms.
const HANDLING: Duration = Duration::from_millis(15);

/// Times that a guest that stands still is asked to run on.
const CONT_ATTEMPTS: u32 = 3;

/// A QEMU that vmferry is attached to. Dropped, it is detached: nothing is left in it.
pub struct QemuSource {
    qmp: Qmp,
    ram: Ram,
    log: Arc<UffdLog>,
    /// Closed in QEMU when this is dropped.
    _userfaultfd: Injected,
    identity: GuestIdentity,
    machine: Machine,
    habits: Habits,
    settings: Settings,
    vcpu_threads: Vec<u32>,
    throttle: Option<Throttle>,
    saving: Option<Saving>,
    /// QEMU was told to let its state out.
    told_to_finish: bool,
}

impl QemuSource {
    /// Attaches to the QEMU whose QMP socket this is, after looking whether its guest can be moved.
    /// The guest is not touched.
    ///
    /// # Errors
    /// What can't be moved, and what to change.
    pub fn attach(socket: &Path) -> Result<Self, QemuError> {
        let mut qmp = Qmp::connect(socket)?;
        guest::must_be_migratable(&mut qmp)?;
        machine::no_unseen_writers(&mut qmp)?;
        let (machine, habits) = machine::look(&mut qmp)?;
        let vcpu_threads = machine::vcpu_threads(&mut qmp)?;
        let ram = Ram::find(&mut qmp, &mut DirectView)?;
        let pid = qmp.pid();
        let settings = Settings::read(&mut qmp)?;
        // QEMU makes one itself only while it migrates, which it does not.
        inject::close_leftovers(pid)?;
        let userfaultfd = inject::userfaultfd(pid)?;
        let ours = userfaultfd
            .descriptor
            .try_clone()
            .map_err(|source| QemuError::Local { action: "duplicate a descriptor", source })?;
        let log = UffdLog::of_process(pid, ours, ram.ranges.clone(), ram.memory.clone())
            .map_err(|error| QemuError::Unattachable(error.to_string()))?;
        let identity = guest::identity(&mut qmp)?;
        let log = Arc::new(log);
        Ok(Self {
            qmp,
            ram,
            log,
            _userfaultfd: userfaultfd,
            identity,
            machine,
            habits,
            settings,
            vcpu_threads,
            throttle: None,
            saving: None,
            told_to_finish: false,
        })
    }

    /// The guest's memory, block by block.
    #[must_use]
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// Ends the QEMU, whose guest runs elsewhere.
    ///
    /// # Errors
    /// QMP's.
    pub fn quit(mut self) -> Result<(), QemuError> {
        self.qmp.execute("quit", json!({}))?;
        Ok(())
    }

    /// QEMU's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.qmp.version()
    }

    /// What kind of machine it is.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The guest's name and UUID.
    #[must_use]
    pub fn identity(&self) -> &GuestIdentity {
        &self.identity
    }

    /// What QEMU's own migration was set to before vmferry came.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Makes sure that the vCPUs can be throttled when the guest writes too fast.
    ///
    /// # Errors
    /// If the control groups do not allow it.
    pub fn allow_throttling(&mut self) -> Result<(), QemuError> {
        let pid = self.qmp.pid();
        self.throttle = Some(Throttle::prepare(pid, self.vcpu_threads.clone())?);
        Ok(())
    }

    /// The QEMU process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.qmp.pid()
    }

    /// Whether the guest runs; false also if QEMU does not answer.
    pub fn is_running(&mut self) -> bool {
        self.qmp.execute("query-status", json!({})).is_ok_and(|status| status["running"] == true)
    }

    /// What its devices ask of the engine.
    #[must_use]
    pub fn habits(&self) -> Habits {
        self.habits
    }
}

impl Resume for QemuSource {
    fn resume(&mut self) -> Result<(), VmError> {
        match self.saving.take() {
            Some(saving) => saving.cancel(&mut self.qmp)?,
            // One that was begun and never reached its pause would pause the guest later.
            None => end_migration(&mut self.qmp, self.told_to_finish)?,
        }
        self.told_to_finish = false;
        run_on(&mut self.qmp)?;
        // The guest runs. Settings are worth no failure.
        let _ = self.settings.restore(&mut self.qmp);
        Ok(())
    }
}

impl SourceVm for QemuSource {
    fn describe(&self) -> GuestDescription {
        GuestDescription {
            identity: self.identity.clone(),
            vmm: VMM.into(),
            config: ram::describe(&self.machine, &self.ram.blocks, &host()),
            layout: layout(&self.ram.memory),
        }
    }

    fn release(&self) -> String {
        self.qmp.release()
    }

    fn memory(&self) -> GuestMemory {
        self.ram.memory.clone()
    }

    fn dirty_log(&self) -> Arc<dyn DirtyLog> {
        self.log.clone()
    }

    fn pause(&mut self) -> Result<Duration, VmError> {
        let (saving, stood_still) = Saving::begin(&mut self.qmp)?;
        self.saving = Some(saving);
        Ok(stood_still)
    }

    fn save(&mut self) -> Result<Vec<u8>, VmError> {
        let saving = self.saving.take().ok_or("the guest is not paused")?;
        self.told_to_finish = true;
        Ok(saving.finish(&mut self.qmp)?)
    }

    fn state_estimate(&self) -> StateEstimate {
        StateEstimate { bytes: self.ram.state_bytes_in_use(), handling: HANDLING }
    }

    fn quiesced(&mut self, harvest: &mut dyn FnMut()) -> Result<Duration, VmError> {
        if !self.habits.pins_pages {
            harvest();
            return Ok(Duration::ZERO);
        }
        let begun = Instant::now();
        // On return all I/O is done: `stop` drains every disk.
        self.qmp.execute("stop", json!({}))?;
        harvest();
        let mut resumed = self.qmp.execute("cont", json!({}));
        for _ in 1..CONT_ATTEMPTS {
            if resumed.is_ok() {
                break;
            }
            resumed = self.qmp.execute("cont", json!({}));
        }
        resumed?;
        Ok(begun.elapsed())
    }

    fn throttle(&mut self, percent: u8) -> Result<(), VmError> {
        match &self.throttle {
            Some(throttle) => Ok(throttle.set(percent)?),
            None if percent == 0 => Ok(()),
            None => Err("throttling of this QEMU was not prepared".into()),
        }
    }

    fn free_pages(&self) -> Vec<Arc<dyn FreePages>> {
        // What its balloon is inflated by is punched out of the memory's files.
        if self.habits.gives_pages_back {
            vec![Arc::new(PunchedPages::new(self.ram.memory.clone()))]
        } else {
            Vec::new()
        }
    }
}

/// The slots of a memory.
pub fn layout(memory: &GuestMemory) -> Vec<SlotLayout> {
    let slots = memory.slots().iter();
    slots
        .map(|slot| SlotLayout {
            slot: slot.id(),
            gpa: slot.gpa().0,
            pages: (slot.len_bytes() / PAGE_SIZE) as u64,
        })
        .collect()
}
