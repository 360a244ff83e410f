//! A running QEMU as the engine's source.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use vmferry::vmm::free_pages::{FreePages, PunchedPages};
use vmferry::vmm::storage::SourceStorage;
use vmferry::{GuestDescription, HarvestGuard, Resume, SourceVm, StateEstimate, VmError};
use vmferry_dirty::{DirtyLog, UffdLog};
use vmferry_memory::userfaultfd::FaultOrigin;
use vmferry_memory::{GuestBytes, GuestMemory, PAGE_SIZE, SlotLayout};
use vmferry_wire::GuestIdentity;

use crate::additions::Additions;
use crate::direct_view::DirectView;
use crate::disks::Disks;
use crate::error::QemuError;
use crate::guest::{self, end_migration};
use crate::inject::{self, Injected};
use crate::inventory::{Allowed, Inventory, Parts};
use crate::located::Located;
use crate::lock::Lock;
use crate::machine::{self, Habits, Machine};
use crate::memory_file::{Leaving, MemoryFiles, Release};
use crate::proc_stat::host;
use crate::qmp::{Qmp, Version, threads_here};
use crate::ram::{self, Ram};
use crate::sample::Sampler;
use crate::settings::Settings;
use crate::state::Saving;
use crate::throttle::Throttle;
use crate::vcpu::Vcpu;
use crate::view::View;
use crate::writers;

/// The name of this VMM kind, which must be equal at source and destination.
pub const VMM: &str = "qemu";

/// The time for stopping, saving, loading and starting, measured with QEMU 7.2 and 10.0: 10 to 20
/// ms.
const HANDLING: Duration = Duration::from_millis(15);

/// A QEMU that vmferry is attached to. On drop, vmferry detaches and leaves nothing in it.
pub struct QemuSource {
    qmp: Qmp,
    pid: u32,
    ram: Ram,
    log: Arc<UffdLog>,
    /// Closed in QEMU on drop.
    _userfaultfd: Injected,
    /// Released after that.
    _lock: Lock,
    identity: GuestIdentity,
    machine: Machine,
    additions: Additions,
    sampler: Sampler,
    /// The parts that the destination was told to have.
    parts: Parts,
    habits: Habits,
    settings: Settings,
    vcpu_threads: Vec<u32>,
    throttle: Option<Throttle>,
    saving: Option<Saving>,
    /// QEMU was told to write its state.
    told_to_finish: bool,
}

impl QemuSource {
    /// Attaches to the QEMU at this QMP socket, after checking whether its guest can be moved. The
    /// guest is not touched.
    ///
    /// # Errors
    /// What can't be moved, and what to change.
    pub fn attach(socket: &Path) -> Result<Self, QemuError> {
        let mut qmp = Qmp::connect(socket)?;
        let pid = qmp.pid().ok_or_else(|| QemuError::Unseen { path: socket.to_owned() })?;
        let lock = Lock::take(pid)?;
        guest::must_be_migratable(&mut qmp)?;
        let habits = writers::all_seen(&mut qmp)?;
        let parts = Parts::read(&mut qmp)?;
        let machine = machine::look(&mut qmp)?;
        let inventory = Inventory::read(&mut qmp, &mut DirectView)?;
        inventory.must_outlive_qemu()?;
        let sampler = Sampler::new(pid, &inventory.disks);
        let additions = Additions {
            vcpu: Vcpu::read(&mut qmp)?,
            inventory: Some(inventory),
            allowed: Allowed::default(),
        };
        let vcpu_threads = threads_here(pid, &machine::vcpu_threads(&mut qmp)?);
        let located = Located::find(&mut qmp, &mut DirectView)?;
        // The log misses all writes of another process, whatever that process uses the memory for.
        MemoryFiles::of(&located, DirectView.examiner())
            .nobody_else_is_seen()
            .map_err(written_by)?;
        let ram = Ram::of(&located, &mut qmp, &mut DirectView)?;
        let settings = Settings::read(&mut qmp)?;
        // QEMU itself creates a userfaultfd only while it migrates, which it does not.
        inject::close_leftovers(pid)?;
        let userfaultfd = inject::userfaultfd(pid, FaultOrigin::UserMode)?;
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
            _lock: lock,
            pid,
            identity,
            machine,
            additions,
            sampler,
            parts,
            habits,
            settings,
            vcpu_threads,
            throttle: None,
            saving: None,
            told_to_finish: false,
        })
    }

    /// The guest's memory, by block.
    #[must_use]
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// Quits the QEMU, whose guest runs elsewhere, and releases the pages of its memory files, as
    /// far as no other process uses them.
    ///
    /// # Errors
    /// QMP errors.
    pub fn quit(mut self) -> Result<Release, QemuError> {
        let leaving = Leaving::quit(&mut self.qmp, &mut DirectView)?;
        drop(self);
        Ok(Release::by(leaving))
    }

    /// QEMU's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.qmp.version()
    }

    /// The kind of machine.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Whether the guest may run at the destination before all its pages have arrived. The
    /// destination checks this too, for its own QEMU.
    ///
    /// # Errors
    /// `QemuError::FreesPages`.
    pub fn may_use_post_copy(&self) -> Result<(), QemuError> {
        if self.habits.gives_pages_back { Err(QemuError::FreesPages) } else { Ok(()) }
    }

    /// The guest's name and UUID.
    #[must_use]
    pub fn identity(&self) -> &GuestIdentity {
        &self.identity
    }

    /// The settings of QEMU's own migration before vmferry attached.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The dirty bitmaps that stay behind, as `NAME of DEVICE`.
    #[must_use]
    pub fn ending_bitmaps(&self) -> &[String] {
        self.additions.inventory.as_ref().map_or(&[], |inventory| &inventory.ending_bitmaps)
    }

    /// Allows the machine at the destination to differ.
    pub fn allow_to_differ(&mut self, allowed: Allowed) {
        self.additions.allowed = allowed;
    }

    /// Prepares to throttle the vCPUs when the guest writes too fast.
    ///
    /// # Errors
    /// If the control groups do not allow it.
    pub fn allow_throttling(&mut self) -> Result<(), QemuError> {
        self.throttle = Some(Throttle::prepare(self.pid, self.vcpu_threads.clone())?);
        Ok(())
    }

    /// The QEMU process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether another client, or QEMU itself after an error, has paused the guest, so that it
    /// stays paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.qmp.is_paused_by_others()
    }

    /// Whether the guest runs. False also if QEMU does not answer.
    pub fn is_running(&mut self) -> bool {
        self.qmp.execute("query-status", json!({})).is_ok_and(|status| status["running"] == true)
    }

    /// What its devices require of the engine.
    #[must_use]
    pub fn habits(&self) -> Habits {
        self.habits
    }
}

impl Resume for QemuSource {
    fn is_paused_by_others(&self) -> bool {
        self.is_paused()
    }

    fn resume(&mut self) -> Result<(), VmError> {
        let resumed = self.run_on();
        Ok(self.qmp.unless_powered_off(resumed)?)
    }
}

impl QemuSource {
    fn run_on(&mut self) -> Result<(), QemuError> {
        match self.saving.take() {
            Some(saving) => saving.cancel(&mut self.qmp)?,
            // A migration that was started and never reached its pause would pause the guest later.
            None => end_migration(&mut self.qmp, self.told_to_finish)?,
        }
        self.qmp.continue_guest()?;
        if std::mem::take(&mut self.told_to_finish) {
            // The destination may have loaded the guest, and announced it to the switches.
            self.qmp.announce();
        }
        // The guest runs, or is paused as it was before. Failing to restore settings is ignored.
        let _ = self.settings.restore(&mut self.qmp);
        Ok(())
    }
}

impl SourceVm for QemuSource {
    fn describe(&self) -> GuestDescription {
        GuestDescription {
            identity: self.identity.clone(),
            vmm: VMM.into(),
            config: ram::describe(&self.machine, &self.ram.blocks, &host(), &self.additions),
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
        // The check costs the guest no downtime here. Once QEMU has saved its state, the parts
        // can't change any more.
        self.parts.must_be_as_before(&mut self.qmp)?;
        match Saving::begin(&mut self.qmp) {
            Ok((saving, stood_still)) => {
                self.saving = Some(saving);
                self.sampler.begin();
                Ok(stood_still)
            }
            Err(error) => Err(self.qmp.explain(error).into()),
        }
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        let saving = self.saving.take().ok_or("the guest is not paused")?;
        self.told_to_finish = true;
        match saving.finish(&mut self.qmp) {
            Ok(state) => {
                self.qmp.learn_from_state(&state);
                self.parts.must_be_as_before(&mut self.qmp)?;
                Ok(state)
            }
            Err(error) => Err(self.qmp.explain(error).into()),
        }
    }

    fn state_estimate(&self) -> StateEstimate {
        StateEstimate { bytes: self.ram.state_bytes_in_use(), handling: HANDLING }
    }

    fn begin_harvest(&mut self) -> Result<Box<dyn HarvestGuard + '_>, VmError> {
        let disks = Disks { pin_pages: self.habits.pins_pages };
        Ok(Box::new(disks.begin_harvest(&mut self.qmp)?))
    }

    fn throttle(&mut self, percent: u8) -> Result<(), VmError> {
        match &self.throttle {
            Some(throttle) => Ok(throttle.set(percent)?),
            None if percent == 0 => Ok(()),
            None => Err("throttling of this QEMU was not prepared".into()),
        }
    }

    fn storage(&mut self) -> Option<&mut dyn SourceStorage> {
        Some(&mut self.sampler)
    }

    fn free_pages(&self) -> Vec<Arc<dyn FreePages>> {
        // The balloon's inflated pages are holes in the memory files.
        if self.habits.gives_pages_back {
            vec![Arc::new(PunchedPages::new(self.ram.memory.clone()))]
        } else {
            Vec::new()
        }
    }
}

/// If another process has the guest's memory mapped, the guest is carried instead: this is no error
/// of its own.
fn written_by(error: QemuError) -> QemuError {
    match error {
        QemuError::FileInUse { block, path, pid, name } => QemuError::Unattachable(format!(
            "process {pid} ({name}) has its memory file {path} of {block} mapped too, and can \
             write it where the dirty log does not see it"
        )),
        error => error,
    }
}

/// The slots of a guest memory.
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
