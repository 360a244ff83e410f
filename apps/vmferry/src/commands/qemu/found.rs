//! A QEMU whose guest is to be sent, in whichever way.

use std::path::Path;

use serde_json::{Value, json};
use vmferry::config::ConfigError;
use vmferry::source::{Orders, Report, SourceOutcome, migrate, migrate_streamed};
use vmferry::stats::SourceStats;
use vmferry::vmm::streamed::StreamedVm;
use vmferry::{MigrateError, SourceConfig};
use vmferry_qemu::{Machine, QemuError, Reached, Release, Settings, Version};
use vmferry_transport::Dialer;
use vmferry_wire::GuestIdentity;

use crate::args::{SendOptions, WhenStuck};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// What was found behind a QMP socket.
pub struct Found(Reached);

/// A guest that runs elsewhere.
pub struct Moved {
    /// Ends the QEMU that it has left, and gives its memory files' pages back.
    pub quit: Box<dyn FnOnce() -> Result<Release, QemuError>>,
    /// What was done.
    pub stats: Box<SourceStats>,
}

/// A guest that is still here. QMP is free for others again.
pub struct NotMoved {
    /// Why.
    pub error: MigrateError,
    /// Whether it runs.
    pub runs: bool,
    /// Whether somebody else than vmferry has paused it, so that it stays paused.
    pub stays_paused: bool,
}

impl Found {
    /// Looks whether, and how, the guest can be moved as the user wants it. It is not touched.
    pub fn look(qmp: &Path, options: &SendOptions) -> Result<Self, Failure> {
        let multifd = options.multifd.unwrap_or(0);
        let mut source = Reached::by(qmp, options.mode.into(), multifd)?;
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
                        why.as_ref().map(|why| format!("; or let it be attached: {why}"));
                    return Err(Failure::new(
                        Code::NotConverging,
                        format!(
                            "QEMU {version} without KVM loses a part of what its guest writes while QEMU migrates it \
                             (mended in QEMU 9.0 for memory of one backend), so it would have to stand still for the whole move: allow that \
                             with --when-stuck switch-over, or give it memory whose size is no multiple of 256 KiB{}",
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

    /// The QEMU process, if it is seen from here.
    pub fn pid(&self) -> Option<u32> {
        match &self.0 {
            Reached::Attached(attached) => Some(attached.pid()),
            Reached::Carried { source: carried, .. } => carried.pid(),
        }
    }

    /// Whether somebody else than vmferry has paused it.
    pub fn is_paused(&self) -> bool {
        match &self.0 {
            Reached::Attached(attached) => attached.is_paused(),
            Reached::Carried { source: carried, .. } => carried.is_paused(),
        }
    }

    /// What its own migration was set to.
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

    /// Whether its switchover can be held.
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

    /// What `status` says of it.
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

    /// What was found, for the result.
    pub fn facts(&self) -> Value {
        let mut facts = json!({
            "mode": self.mode(),
            "version": self.version().to_string(),
            "machine": self.machine().kind,
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

    /// Tells people what was found, and how the guest is moved.
    pub fn tell(&self, output: &Output) {
        let (version, machine) = (self.version(), &self.machine().kind);
        if self.is_paused() {
            output
                .note("the guest is paused, and arrives paused: `cont` by QMP continues it there");
        }
        match &self.0 {
            Reached::Attached(attached) => {
                let ram = attached.ram();
                let mib = |ours: bool| {
                    let blocks = ram.blocks.iter();
                    let of = blocks
                        .filter(|block| (block.carrier == vmferry_qemu::Carrier::Vmferry) == ours);
                    of.map(|block| block.bytes).sum::<u64>() >> 20
                };
                output.note(format!(
                    "attached to QEMU {version} ({machine}): {} MiB of memory, and {} MiB of ROMs and video memory that \
                     QEMU moves with its devices",
                    mib(true),
                    mib(false),
                ));
                if attached.habits().pins_pages {
                    output.note(
                        "a disk is used without the host's cache (cache=none or direct): each \
                         round waits until its requests under way are over, because it writes \
                         memory unseen",
                    );
                }
            }
            Reached::Carried { source: carried, why } => {
                let streams = carried.streams();
                output.note(format!(
                    "carrying the migration of QEMU {version} ({machine}) in {streams} {}: {} MiB of memory",
                    if streams == 1 { "stream" } else { "streams" },
                    carried.memory_bytes() >> 20,
                ));
                if let Some(why) = why {
                    output.note(format!("not attached, because {}", vmferry::chain(why)));
                }
                if carried.must_stand_still() {
                    output.note(format!(
                        "the guest stands still all the time: QEMU {version} without KVM would lose a part of what it writes"
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
                        Ok(Moved { quit: Box::new(move || vm.quit()), stats })
                    }
                    SourceOutcome::Kept { error, mut vm, .. } => {
                        let (runs, stays_paused) = (vm.is_running(), vm.is_paused());
                        // Detached before it is said, so that a guardian that must take over finds QMP free.
                        drop(vm);
                        Err(NotMoved { error, runs, stays_paused })
                    }
                }
            }
            Reached::Carried { source: carried, .. } => {
                match migrate_streamed(*carried, dialer, config, orders, watch) {
                    SourceOutcome::Given { vm, stats } => {
                        Ok(Moved { quit: Box::new(move || vm.quit()), stats })
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
