//! A running QEMU whose own migration the engine carries.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use serde_json::json;
use vmferry::streamed::{OutgoingStream, Recogniser, StreamEvents, StreamedVm};
use vmferry::{GuestDescription, Resume, VmError};
use vmferry_wire::GuestIdentity;

use super::channels;
use super::description::{Description, MAX_CHANNELS, describe};
use super::monitor::Monitor;
use super::watch::{Begun, Watch};
use crate::error::QemuError;
use crate::guest::{self, end_migration};
use crate::lock::Lock;
use crate::machine::Machine;
use crate::memory_file::{Leaving, Release};
use crate::parts::Parts;
use crate::qmp::{Qmp, Version};
use crate::settings::{self, Settings, Streaming};
use crate::starter::DirectView;
use crate::stream::{Blocks, MainStream, MultifdChannel};
use crate::vcpu::Vcpu;

/// A QEMU whose guest is to be carried. Dropped, it is left as it is: a guest that was not
/// [resumed](Resume::resume) may run elsewhere.
pub struct CarriedSource {
    pub(super) monitor: Arc<Monitor>,
    version: Version,
    pid: Option<u32>,
    identity: GuestIdentity,
    description: Description,
    vcpu: Option<Vcpu>,
    parts: Parts,
    settings: Settings,
    throttle: u8,
    must_stand_still: bool,
    under_way: Option<UnderWay>,
    _lock: Option<Lock>,
}

/// QEMU's migration.
struct UnderWay {
    watch: Option<Watch>,
    /// Our ends of its streams.
    sockets: Vec<UnixStream>,
    told_to_finish: bool,
}

impl CarriedSource {
    /// Takes the QEMU whose QMP socket this is, after asking it whether its guest can be migrated. The guest is not
    /// touched. With `channels` QEMU spreads memory over so many streams beside the main one (`multifd`).
    ///
    /// # Errors
    /// What QEMU says against it, and what to change.
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
        let vcpu = Vcpu::read(&mut qmp)?;
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
            vcpu,
            parts,
            settings,
            throttle: 0,
            must_stand_still,
            under_way: None,
            _lock: lock,
        })
    }

    /// Ends the QEMU, whose guest runs elsewhere, and gives the pages of its memory files back, as
    /// far as they are its alone.
    ///
    /// # Errors
    /// QMP's.
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

    /// What kind of machine it is.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.description.machine
    }

    /// Whether the guest must stand still for the whole of its migration, because QEMU would lose a part of what it writes
    /// meanwhile: without KVM QEMUs before 9.0 do, with memory of a usual size, and later ones with several backends of it.
    #[must_use]
    pub fn must_stand_still(&self) -> bool {
        self.must_stand_still
    }

    /// The guest's memory, with ROMs and video memory, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.description.blocks.iter().map(|block| block.bytes).sum()
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

    /// The QEMU process, if it is seen from here.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Whether somebody else than vmferry has paused the guest, so that it stays paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.monitor.orders().is_paused_by_others()
    }

    /// Whether the guest runs; false also if QEMU does not answer.
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
        let streaming = Streaming { channels, downtime, throttle: self.throttle };
        let at = Instant::now();
        let (tell_paused, paused) = channel();
        let mut tell_paused = Some(tell_paused);
        // From here on there is something to be put right again.
        let nothing = UnderWay { watch: None, sockets: Vec::new(), told_to_finish: false };
        let under_way = self.under_way.insert(nothing);
        let mut streams = Vec::new();
        {
            let mut qmp = self.monitor.orders();
            if self.must_stand_still {
                qmp.pause_guest()?;
            }
            self.settings.for_streaming(&mut qmp, &streaming)?;
            let blocks = Arc::new(Blocks::new(self.description.blocks()));
            channels::open_outgoing(&mut qmp, channels, &mut under_way.sockets)?;
            // Who has paused it since it was looked at was heard by nobody yet, and QEMU does not
            // stop it before somebody reads.
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
            // The destination may have loaded it, and have told the switches so.
            qmp.announce();
        }
        // The guest runs. Settings are worth no failure.
        let _ = self.settings.restore(&mut qmp);
        drop(qmp);
        self.under_way = None;
        Ok(())
    }
}

impl UnderWay {
    /// Nothing more is told, and QEMU can get rid of its bytes: while it sends the rest it holds its main lock and
    /// answers no order. Says whether it was told to do so.
    fn end(&mut self, monitor: &Monitor) -> bool {
        if let Some(watch) = &self.watch {
            watch.end(monitor);
        }
        channels::drain(std::mem::take(&mut self.sockets));
        self.told_to_finish
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

impl StreamedVm for CarriedSource {
    fn describe(&self) -> GuestDescription {
        describe(&self.identity, &self.description, self.vcpu.as_ref())
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
                // One that has powered off, and its QEMU with it, can't begin.
                let error = self.monitor.orders().explain(error);
                // Nothing is left of what was begun, and one that had to stand still runs on. The reason is what counts.
                let _ = self.run_on();
                Err(error.into())
            }
        }
    }

    fn set_downtime(&mut self, downtime: Duration) -> Result<(), VmError> {
        Ok(settings::set_downtime(&mut self.monitor.orders(), downtime).map_err(QemuError::from)?)
    }

    fn finish(&mut self) -> Result<(), VmError> {
        // QEMU itself refuses other devices while it migrates, but nothing of its disks.
        self.parts.must_be_as_before(&mut self.monitor.orders())?;
        let order = json!({ "state": "pre-switchover" });
        // Even if no answer comes, it may be followed.
        if let Some(under_way) = &mut self.under_way {
            under_way.told_to_finish = true;
        }
        let mut qmp = self.monitor.orders();
        // While QEMU sends the rest it holds its main lock: the answer may have to wait for that.
        let done = qmp.order("migrate-continue", order, |event| {
            let status = event["data"]["status"].as_str();
            event["event"] == "MIGRATION" && matches!(status, Some("device" | "completed"))
        });
        Ok(done.map_err(QemuError::from)?)
    }

    fn allow_throttling(&mut self, percent: u8) -> Result<(), VmError> {
        if percent > 99 {
            return Err("at most 99 % of the vCPUs' time can be taken".into());
        }
        self.throttle = percent;
        Ok(())
    }
}
