//! The QEMU whose guest `vmferry send` moves, attached or carried.

use std::path::Path;

use serde_json::{Value, json};
use vmferry::config::ConfigError;
use vmferry::source::{Orders, Report, SourceOutcome, migrate, migrate_streamed};
use vmferry::stats::SourceStats;
use vmferry::vmm::streamed::StreamedVm;
use vmferry::{MigrateError, SourceConfig};
use vmferry_qemu::{Allowed, Machine, QemuError, Reached, Release, Settings, Version};
use vmferry_transport::Dialer;
use vmferry_wire::GuestIdentity;

use crate::args::{SendOptions, WhenStuck};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// The QEMU at a QMP socket.
pub struct Found(Reached);

/// A guest that runs at the destination.
pub struct Moved {
    /// Quits the source's QEMU and frees the pages of its memory files.
    pub quit: Box<dyn FnOnce() -> Result<Release, QemuError>>,
    /// Statistics of the migration.
    pub stats: Box<SourceStats>,
    /// Why it has lost pages there, if it has.
    pub lost: Option<MigrateError>,
}

/// A guest that is still here. Other clients can connect to its QMP socket again.
pub struct NotMoved {
    /// Why the migration failed.
    pub error: MigrateError,
    /// Whether the guest runs.
    pub runs: bool,
    /// Whether the guest was paused before the migration, so that it stays paused.
    pub stays_paused: bool,
}

impl Found {
    /// Checks whether and how the guest can be moved with these options. The guest is not changed.
    pub fn look(qmp: &Path, options: &SendOptions) -> Result<Self, Failure> {
        let multifd = options.multifd.unwrap_or(0);
        let mut source = Reached::by(qmp, options.mode.into(), multifd)?;
        source.allow_to_differ(Allowed { disks_differ: options.disks_differ });
        let throttle = options.migration.throttle;
        match &mut source {
            Reached::Attached(attached) if throttle > 0 => attached.allow_throttling()?,
            Reached::Attached(_) => {}
            Reached::Carried { .. } if options.verify => {
                return Err(Failure::of(Code::Usage, ConfigError::NothingToVerify));
            }
            Reached::Carried { .. } if options.migration.pause_before_switchover => {
                return Err(Failure::of(Code::Usage, ConfigError::NothingToHold));
            }
            Reached::Carried { source: carried, why } => {
                if carried.must_stand_still() && options.migration.when_stuck == WhenStuck::Refuse {
                    let version = carried.version();
                    let else_attach =
                        why.as_ref().map(|why| format!("; or make it attachable: {why}"));
                    return Err(Failure::new(
                        Code::NotConverging,
                        format!(
                            "QEMU {version} without KVM loses some of its guest's writes during \
                             a migration (less so since QEMU 9.0 with one memory backend, whose \
                             size is a multiple of 256 KiB), so the guest would be paused for the \
                             whole migration: allow that with --when-stuck switch-over{}",
                            else_attach.unwrap_or_default()
                        ),
                    ));
                }
                if throttle > 0 {
                    let allowed = carried.allow_throttling(throttle);
                    allowed.map_err(|error| Failure::new(Code::Usage, error.to_string()))?;
                }
            }
        }
        Ok(Self(source))
    }

    /// The guest's name and UUID.
    pub fn identity(&self) -> &GuestIdentity {
        match &self.0 {
            Reached::Attached(attached) => attached.identity(),
            Reached::Carried { source: carried, .. } => carried.identity(),
        }
    }

    /// The QEMU process, if it is visible in this PID namespace.
    pub fn pid(&self) -> Option<u32> {
        match &self.0 {
            Reached::Attached(attached) => Some(attached.pid()),
            Reached::Carried { source: carried, .. } => carried.pid(),
        }
    }

    /// Whether the guest was paused before the migration.
    pub fn is_paused(&self) -> bool {
        match &self.0 {
            Reached::Attached(attached) => attached.is_paused(),
            Reached::Carried { source: carried, .. } => carried.is_paused(),
        }
    }

    /// The settings of QEMU's own migration.
    pub fn settings(&self) -> &Settings {
        match &self.0 {
            Reached::Attached(attached) => attached.settings(),
            Reached::Carried { source: carried, .. } => carried.settings(),
        }
    }

    fn version(&self) -> Version {
        match &self.0 {
            Reached::Attached(attached) => attached.version(),
            Reached::Carried { source: carried, .. } => carried.version(),
        }
    }

    fn machine(&self) -> &Machine {
        match &self.0 {
            Reached::Attached(attached) => attached.machine(),
            Reached::Carried { source: carried, .. } => carried.machine(),
        }
    }

    /// The dirty bitmaps that stay behind.
    pub fn ending_bitmaps(&self) -> &[String] {
        match &self.0 {
            Reached::Attached(attached) => attached.ending_bitmaps(),
            Reached::Carried { source: carried, .. } => carried.ending_bitmaps(),
        }
    }

    /// Whether its migration can be held before the switchover.
    pub fn can_be_held(&self) -> bool {
        matches!(self.0, Reached::Attached(_))
    }

    /// The guest's memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        match &self.0 {
            Reached::Attached(attached) => attached.ram().carried().map(|block| block.bytes).sum(),
            Reached::Carried { source: carried, .. } => carried.memory_bytes(),
        }
    }

    /// The answer to `status` for this guest, without the migration.
    pub fn about(&self, name: &str) -> Value {
        let kind = match &self.0 {
            Reached::Attached(_) => "shared",
            Reached::Carried { .. } => "QEMU's",
        };
        json!({
            "name": name,
            "uuid": self.identity().uuid,
            "phase": if self.is_paused() { "paused" } else { "migrating" },
            "guest": "qemu",
            "mode": self.mode(),
            "choice": format!("QEMU {}, {}", self.version(), self.machine().kind),
            "memory_bytes": self.memory_bytes(),
            "memory_kind": kind,
            "vcpus": self.machine().vcpus,
            "pid": self.pid(),
        })
    }

    fn mode(&self) -> &'static str {
        match &self.0 {
            Reached::Attached(_) => "attached",
            Reached::Carried { .. } => "carried",
        }
    }

    /// The facts about this QEMU for the result.
    pub fn facts(&self) -> Value {
        let mut facts = json!({
            "mode": self.mode(),
            "version": self.version().to_string(),
            "machine": self.machine().kind,
            "ending_bitmaps": self.ending_bitmaps(),
        });
        match &self.0 {
            Reached::Attached(attached) => {
                let (ram, habits) = (attached.ram(), attached.habits());
                facts["blocks"] = json!(ram.blocks);
                facts["state_bytes_in_use"] = json!(ram.state_bytes_in_use());
                facts["pins_pages"] = json!(habits.pins_pages);
                facts["gives_pages_back"] = json!(habits.gives_pages_back);
            }
            Reached::Carried { source: carried, why } => {
                facts["not_attached"] = json!(why.as_ref().map(|why| vmferry::chain(why)));
                facts["streams"] = json!(carried.streams());
                facts["memory_bytes"] = json!(carried.memory_bytes());
                facts["stands_still"] = json!(carried.must_stand_still());
            }
        }
        facts
    }

    /// Prints what was found and how the guest is moved.
    pub fn describe(&self, output: &Output) {
        let (version, machine) = (self.version(), &self.machine().kind);
        if self.is_paused() {
            output.note("the guest is paused and arrives paused: `cont` by QMP resumes it there");
        }
        if !self.ending_bitmaps().is_empty() {
            output.note(format!(
                "dirty bitmaps that are not persistent stay behind, so the next backup there is a \
                 full one: {}",
                self.ending_bitmaps().join(", ")
            ));
        }
        match &self.0 {
            Reached::Attached(attached) => {
                let ram = attached.ram();
                let all: u64 = ram.blocks.iter().map(|block| block.bytes).sum();
                let ours: u64 = ram.carried().map(|block| block.bytes).sum();
                output.note(format!(
                    "attached to QEMU {version} ({machine}): {} MiB of memory, and {} MiB of ROMs \
                     and video memory that QEMU moves with its devices",
                    ours >> 20,
                    (all - ours) >> 20,
                ));
                if attached.habits().pins_pages {
                    output.note(
                        "a disk bypasses the host's page cache (cache=none or direct), so its DMA \
                         is not logged: each round waits for its pending requests",
                    );
                }
            }
            Reached::Carried { source: carried, why } => {
                let streams = carried.streams();
                output.note(format!(
                    "carrying the migration of QEMU {version} ({machine}) in {streams} {}: {} MiB \
                     of memory",
                    if streams == 1 { "stream" } else { "streams" },
                    carried.memory_bytes() >> 20,
                ));
                if let Some(why) = why {
                    output.note(format!("not attached, because {}", vmferry::chain(why)));
                }
                if carried.must_stand_still() {
                    output.note(format!(
                        "the guest is paused for the whole migration: QEMU {version} without KVM \
                         would lose some of its writes"
                    ));
                }
            }
        }
    }

    /// Moves the guest.
    pub fn migrate(
        self,
        dialer: &Dialer,
        config: SourceConfig,
        orders: &Orders,
        watch: &mut dyn FnMut(&Report),
    ) -> Result<Moved, NotMoved> {
        match self.0 {
            Reached::Attached(attached) => {
                match migrate(*attached, dialer, config, orders, watch) {
                    SourceOutcome::Given { vm, stats } => {
                        Ok(Moved { quit: Box::new(move || vm.quit()), stats, lost: None })
                    }
                    SourceOutcome::Lost { vm, error, stats } => {
                        let quit = Box::new(move || vm.quit());
                        Ok(Moved { quit, stats, lost: Some(error) })
                    }
                    SourceOutcome::Kept { error, mut vm, .. } => {
                        let (runs, stays_paused) = (vm.is_running(), vm.is_paused());
                        // Detached first, so that a guardian that takes over can connect to QMP.
                        drop(vm);
                        Err(NotMoved { error, runs, stays_paused })
                    }
                }
            }
            Reached::Carried { source: carried, .. } => {
                match migrate_streamed(*carried, dialer, config, orders, watch) {
                    SourceOutcome::Given { vm, stats } => {
                        Ok(Moved { quit: Box::new(move || vm.quit()), stats, lost: None })
                    }
                    SourceOutcome::Lost { vm, error, stats } => {
                        let quit = Box::new(move || vm.quit());
                        Ok(Moved { quit, stats, lost: Some(error) })
                    }
                    SourceOutcome::Kept { error, vm, .. } => {
                        let (runs, stays_paused) = (vm.is_running(), vm.is_paused());
                        drop(vm);
                        Err(NotMoved { error, runs, stays_paused })
                    }
                }
            }
        }
    }
}
