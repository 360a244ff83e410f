//! A running QEMU whose own migration the engine carries.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use serde_json::json;
use vmferry::vmm::storage::SourceStorage;
use vmferry::vmm::streamed::{
    LateStreams, OutgoingStream, PostCopyStart, Recogniser, StreamEvents, StreamedVm,
};
use vmferry::{GuestDescription, Resume, VmError};
use vmferry_handover::Reconnect;
use vmferry_wire::GuestIdentity;

use super::channels;
use super::description::{Description, MAX_CHANNELS, describe};
use super::late::{self, FurtherChannel};
use super::monitor::Monitor;
use super::reconnect;
use super::watch::{Begun, Watch};
use crate::additions::Additions;
use crate::direct_view::DirectView;
use crate::error::QemuError;
use crate::guest::{self, end_migration};
use crate::inventory::{Allowed, Inventory, Parts};
use crate::lock::Lock;
use crate::machine::Machine;
use crate::memory_file::{Leaving, Release};
use crate::qmp::{Qmp, Version};
use crate::sample::Sampler;
use crate::settings::{self, Settings, Streaming};
use crate::stream::{Blocks, MainStream, MultifdChannel};
use crate::vcpu::Vcpu;

/// A QEMU from which a guest is carried. On drop it is left as it is: a guest that was not
/// [resumed](Resume::resume) may run elsewhere.
pub struct CarriedSource {
    pub(super) monitor: Arc<Monitor>,
    version: Version,
    pid: Option<u32>,
    identity: GuestIdentity,
    description: Description,
    additions: Additions,
    /// `None` if the process is not visible.
    sampler: Option<Sampler>,
    parts: Parts,
    settings: Settings,
    throttle: u8,
    post_copy: bool,
    must_stand_still: bool,
    under_way: Option<UnderWay>,
    _lock: Option<Lock>,
}

/// QEMU's migration.
#[derive(Default)]
struct UnderWay {
    watch: Option<Watch>,
    /// Our ends of its streams.
    sockets: Vec<UnixStream>,
    told_to_finish: bool,
    /// Where QEMU connects its further channel, if it may use post-copy.
    further: Option<FurtherChannel>,
    /// QEMU was told to start post-copy.
    is_late: bool,
}

impl CarriedSource {
    /// Takes the QEMU at this QMP socket, after asking it whether its guest can be migrated. The
    /// guest is not touched. With `channels` above 0, QEMU spreads memory over that number of
    /// streams in addition to the main one (`multifd`).
    ///
    /// # Errors
    /// What prevents the migration by QEMU's own account, and what to change.
    pub fn attach(socket: &Path, channels: u8) -> Result<Self, QemuError> {
        if channels > MAX_CHANNELS {
            return Err(QemuError::Unsupported(format!(
                "{channels} multifd channels are too many: take {MAX_CHANNELS} at most"
            )));
        }
        let mut qmp = Qmp::connect(socket)?;
        let lock = Lock::take_if_seen(qmp.pid())?;
        guest::must_be_migratable(&mut qmp)?;
        let parts = Parts::read(&mut qmp)?;
        let description = Description::read(&mut qmp, channels)?;
        let inventory = Inventory::read(&mut qmp, &mut DirectView)?;
        inventory.must_outlive_qemu()?;
        let sampler = qmp.pid().map(|pid| Sampler::new(pid, &inventory.disks));
        let additions = Additions {
            vcpu: Vcpu::read(&mut qmp)?,
            inventory: Some(inventory),
            allowed: Allowed::default(),
        };
        let settings = Settings::read(&mut qmp)?;
        let identity = guest::identity(&mut qmp)?;
        let (version, pid) = (qmp.version(), qmp.pid());
        let must_stand_still = guest::loses_writes(&mut qmp)?;
        let monitor = Arc::new(Monitor::new(qmp)?);
        Ok(Self {
            monitor,
            version,
            pid,
            identity,
            description,
            additions,
            sampler,
            parts,
            settings,
            throttle: 0,
            post_copy: false,
            must_stand_still,
            under_way: None,
            _lock: lock,
        })
    }

    /// Quits the QEMU, whose guest runs elsewhere, and releases the pages of its memory files, as
    /// far as no other process uses them.
    ///
    /// # Errors
    /// QMP errors.
    pub fn quit(self) -> Result<Release, QemuError> {
        let leaving = Leaving::quit(&mut self.monitor.orders(), &mut DirectView)?;
        drop(self);
        Ok(Release::by(leaving))
    }

    /// QEMU's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The kind of machine.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.description.machine
    }

    /// Whether the guest must be paused for its whole migration, because QEMU would lose a part of
    /// what it writes meanwhile. Without KVM this is so for QEMU before 9.0, and for later ones
    /// unless they have one memory backend, whose size is a multiple of 256 KiB.
    #[must_use]
    pub fn must_stand_still(&self) -> bool {
        self.must_stand_still
    }

    /// The guest's memory, with ROMs and video memory, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.description.blocks.iter().map(|block| block.bytes).sum()
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

    /// The QEMU process, if it is visible from here.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Whether another client, or QEMU itself after an error, has paused the guest, so that it
    /// stays paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.monitor.orders().is_paused_by_others()
    }

    /// Whether the guest runs. False also if QEMU does not answer.
    #[must_use]
    pub fn is_running(&self) -> bool {
        let status = self.monitor.orders().execute("query-status", json!({}));
        status.is_ok_and(|status| status["running"] == true)
    }

    fn stream(
        &mut self,
        downtime: Duration,
        events: StreamEvents,
    ) -> Result<Vec<OutgoingStream>, QemuError> {
        if self.under_way.is_some() {
            return Err(QemuError::State {
                found: "migrating".into(),
                wanted: "left alone: this migration of it goes on",
            });
        }
        let channels = self.description.multifd;
        let (throttle, post_copy) = (self.throttle, self.post_copy);
        let streaming = Streaming { channels, downtime, throttle, post_copy };
        let at = Instant::now();
        let (tell_paused, paused) = channel();
        let mut tell_paused = Some(tell_paused);
        // From here on there is state to undo.
        let under_way = self.under_way.insert(UnderWay::default());
        let mut streams = Vec::new();
        {
            let mut qmp = self.monitor.orders();
            if self.must_stand_still {
                qmp.pause_guest()?;
            }
            self.settings.for_streaming(&mut qmp, &streaming)?;
            let blocks = Arc::new(Blocks::new(self.description.blocks()));
            let sockets = &mut under_way.sockets;
            under_way.further = channels::open_outgoing(&mut qmp, channels, post_copy, sockets)?;
            if let (Some(_), Some(main)) = (&under_way.further, under_way.sockets.first()) {
                late::say_heard(main)?;
            }
            // A pause since the last check has not been noticed yet, and QEMU does not stop the
            // guest before the streams are read.
            qmp.heard_stop()?;
            for socket in &under_way.sockets {
                let socket = socket
                    .try_clone()
                    .map_err(|source| QemuError::Local { action: "duplicate a socket", source })?;
                let blocks = Arc::clone(&blocks);
                // The main stream is the first.
                let recogniser: Box<dyn Recogniser> = match tell_paused.take() {
                    Some(tell) => Box::new(MainStream::new(blocks).telling_paused(tell)),
                    None => Box::new(MultifdChannel::new(blocks)),
                };
                streams.push(OutgoingStream { socket, recogniser });
            }
        }
        let pages = self.description.blocks().map(|(_, pages)| pages).sum();
        let stopped = self.must_stand_still.then_some(at);
        let begun = Begun { at, stopped, pages, paused };
        let watch = Watch::start(Arc::clone(&self.monitor), begun, events)?;
        under_way.watch = Some(watch);
        Ok(streams)
    }

    fn run_on(&mut self) -> Result<(), QemuError> {
        let told_to_finish =
            self.under_way.as_mut().is_some_and(|under_way| under_way.end(&self.monitor));
        let mut qmp = self.monitor.orders();
        end_migration(&mut qmp, told_to_finish)?;
        qmp.continue_guest()?;
        if told_to_finish {
            // The destination may have loaded the guest, and announced it to the switches.
            qmp.announce();
        }
        // The guest runs. Failing to restore settings is ignored.
        let _ = self.settings.restore(&mut qmp);
        drop(qmp);
        self.under_way = None;
        Ok(())
    }
}

impl UnderWay {
    /// Stops the event thread and lets QEMU flush its streams: while QEMU sends the last pages it
    /// holds its main lock and answers no command. Returns whether QEMU was told to finish.
    fn end(&mut self, monitor: &Monitor) -> bool {
        if let Some(watch) = &self.watch {
            watch.end(monitor);
        }
        if self.further.is_some() && self.told_to_finish {
            // QEMU, which may be in its post-copy, can't be told to stop. It completes if its
            // destination seems to need nothing more.
            self.sockets.extend(self.accept_further());
            let _ = self.sockets.first().map(late::say_done);
        }
        channels::drain(std::mem::take(&mut self.sockets));
        self.told_to_finish
    }

    /// QEMU's further channel, if there is one that was not taken.
    fn accept_further(&self) -> Option<UnixStream> {
        self.further.as_ref()?.accept().ok()?
    }
}

impl Drop for CarriedSource {
    fn drop(&mut self) {
        if let Some(UnderWay { watch: Some(watch), .. }) = &self.under_way {
            watch.end(&self.monitor);
        }
    }
}

impl Resume for CarriedSource {
    fn is_paused_by_others(&self) -> bool {
        self.is_paused()
    }

    fn resume(&mut self) -> Result<(), VmError> {
        let resumed = self.run_on();
        Ok(self.monitor.orders().unless_powered_off(resumed)?)
    }
}

impl Reconnect for CarriedSource {
    type Streams = LateStreams;

    fn reconnect(&mut self) -> Result<LateStreams, VmError> {
        let under_way = self.under_way.as_mut().ok_or("QEMU does not migrate")?;
        let further = under_way.further.as_ref().ok_or("QEMU has no further channel")?;
        reconnect::end_all(&under_way.sockets);
        let late = reconnect::at_source(&mut self.monitor.orders(), further)?;
        under_way.sockets = reconnect::ends_of(&late)?;
        Ok(late)
    }
}

impl StreamedVm for CarriedSource {
    fn describe(&self) -> GuestDescription {
        describe(&self.identity, &self.description, &self.additions, self.post_copy)
    }

    fn release(&self) -> String {
        format!("QEMU {}", self.version)
    }

    fn streams(&self) -> u8 {
        1 + self.description.multifd
    }

    fn begin(
        &mut self,
        downtime: Duration,
        events: StreamEvents,
    ) -> Result<Vec<OutgoingStream>, VmError> {
        match self.stream(downtime, events) {
            Ok(streams) => Ok(streams),
            Err(error) => {
                // A guest that has powered off, together with its QEMU, can't begin.
                let error = self.monitor.orders().explain(error);
                // Undoes what was begun, so that a guest that had to be paused runs again. Only the
                // first error counts.
                let _ = self.run_on();
                Err(error.into())
            }
        }
    }

    fn set_downtime(&mut self, downtime: Duration) -> Result<(), VmError> {
        Ok(settings::set_downtime(&mut self.monitor.orders(), downtime).map_err(QemuError::from)?)
    }

    fn finish(&mut self) -> Result<(), VmError> {
        // While QEMU migrates it refuses device changes itself, but not disk changes.
        self.parts.must_be_as_before(&mut self.monitor.orders())?;
        if let Some(sampler) = &mut self.sampler {
            sampler.begin();
        }
        let order = json!({ "state": "pre-switchover" });
        // QEMU may obey even if no answer comes.
        if let Some(under_way) = &mut self.under_way {
            under_way.told_to_finish = true;
        }
        let mut qmp = self.monitor.orders();
        // While QEMU sends the last pages it holds its main lock, which may delay the answer until
        // then.
        let done = qmp.order("migrate-continue", order, |event| {
            let status = event["data"]["status"].as_str();
            event["event"] == "MIGRATION" && matches!(status, Some("device" | "completed"))
        });
        drop(qmp);
        done.map_err(QemuError::from)?;
        if let Some(UnderWay { further: Some(_), is_late: false, sockets, .. }) = &self.under_way
            && let Some(main) = sockets.first()
        {
            // The destination has nothing to say that matters.
            late::say_done(main)?;
        }
        Ok(())
    }

    fn storage(&mut self) -> Option<&mut dyn SourceStorage> {
        Some(self.sampler.as_mut()?)
    }

    fn allow_post_copy(&mut self) -> Result<(), VmError> {
        late::must_be_known(self.version)?;
        if self.description.multifd > 0 {
            return Err("QEMU has no post-copy with multifd: carry it over one stream".into());
        }
        if self.must_stand_still {
            return Err("QEMU loses some of its guest's writes during a migration, so that the \
                        guest is paused for all of it"
                .into());
        }
        self.post_copy = true;
        Ok(())
    }

    fn forbid_post_copy(&mut self) {
        self.post_copy = false;
    }

    fn begin_post_copy(&mut self) -> Result<PostCopyStart, VmError> {
        let mut qmp = self.monitor.orders();
        if !qmp.pause_for_post_copy()? {
            return Ok(PostCopyStart::TooLate);
        }
        qmp.execute("migrate-start-postcopy", json!({})).map_err(QemuError::from)?;
        drop(qmp);
        if let Some(under_way) = &mut self.under_way {
            under_way.is_late = true;
        }
        if let Some(sampler) = &mut self.sampler {
            sampler.tables_may_change();
        }
        Ok(PostCopyStart::Begun)
    }

    fn late_streams(&mut self) -> Result<LateStreams, VmError> {
        let under_way = self.under_way.as_mut().ok_or("QEMU does not migrate")?;
        let urgent = match &under_way.further {
            Some(further) => further.accept()?,
            None => return Err("QEMU has no further channel".into()),
        };
        // Copies, to drain them if the guest stays here.
        let copy = |socket: &UnixStream| {
            let action = "duplicate a socket";
            socket.try_clone().map_err(|source| QemuError::Local { action, source })
        };
        let requests = copy(under_way.sockets.first().ok_or("QEMU has no stream")?)?;
        under_way.sockets.extend(urgent.as_ref().map(copy).transpose()?);
        Ok(LateStreams::new(requests, urgent))
    }

    fn allow_throttling(&mut self, percent: u8) -> Result<(), VmError> {
        if percent > 99 {
            return Err("at most 99 % of the vCPUs' time can be taken".into());
        }
        self.throttle = percent;
        Ok(())
    }
}
