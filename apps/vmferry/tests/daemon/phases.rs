//! Migrations that have reached a phase, and that stay in it until the test lets them go.

use std::process::{Child, Output};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vmferry_libvirt_lab::{Disk, Domain};

use crate::support::{Hosts, LIMIT};

/// A phase of a migration from `host-a` to `host-b`, with what makes it last:
///
/// | phase | it has begun when | it lasts because |
/// | --- | --- | --- |
/// | prepare | `host-a`'s daemon has made the memory's socket | QEMU must be started |
/// | disks | 2 MiB have passed | 24 MiB at 4 MiB/s |
/// | memory | libvirt has counted sent memory | 32 MiB at 4 MiB/s, rewritten faster than that |
/// | Finish | `host-b`'s daemon passes Finish | `host-b`'s libvirtd is stopped |
/// | post-copy | the guest runs at `host-b` | 24 MiB at 2 MiB/s |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The destination's libvirt starts QEMU.
    Prepare,
    /// Disks are copied.
    Disks,
    /// Memory is copied while the guest writes to it.
    Memory,
    /// The guest is paused at the source, and the destination's libvirt is about to run it.
    Finish,
    /// The guest runs at the destination, and the rest of its memory follows.
    PostCopy,
}

impl Phase {
    /// Whether the guest still runs at the source.
    pub fn is_before_switchover(self) -> bool {
        !matches!(self, Self::Finish | Self::PostCopy)
    }

    /// The options of `virsh migrate`.
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Prepare | Self::Memory | Self::Finish => &[],
            Self::Disks => &COPY,
            Self::PostCopy => &["--postcopy", "--postcopy-bandwidth", "2"],
        }
    }

    /// The limit for disks and memory in MiB/s.
    fn speed(self) -> Option<&'static str> {
        match self {
            Self::Prepare | Self::Finish => None,
            Self::Disks | Self::Memory | Self::PostCopy => Some("4"),
        }
    }
}

/// The options that copy disks.
const COPY: [&str; 3] =
    ["--copy-storage-all", "--disks-uri", "unix:///run/vmferry-peers/host-b/web.disks"];

/// A limit in MiB/s that is none.
const FAST: &str = "4000";

/// A migration of the guest `web` that is in a phase.
pub struct Moving {
    pub hosts: Hosts,
    phase: Phase,
    virsh: Child,
    /// The stopped libvirtd of `host-b`.
    stopped: Option<Pid>,
    /// The disk that is copied.
    disk: Option<Disk>,
}

/// A migration that has ended.
pub struct Ended {
    pub hosts: Hosts,
    /// What `virsh migrate` said.
    pub virsh: Output,
    phase: Phase,
    disk: Option<Disk>,
}

impl Moving {
    /// Starts the guest and its migration, and waits for the phase.
    pub fn until(phase: Phase, hosts: Hosts) -> Self {
        vmferry_kit::need_kvm();
        let mut guest = Domain::on_kvm("web", "fill=24,incompressible hot=8,rate=4000");
        let mut disk = None;
        if phase == Phase::Disks {
            let filled = hosts.a.libvirt.create_filled_disk("own.raw", 24);
            hosts.b.libvirt.create_disk("own.raw", 24, filled.format);
            guest = guest.with_disk(filled.clone());
            disk = Some(filled);
        }
        hosts.a.libvirt.create(&guest);
        hosts.a.libvirt.check_guest("web");
        if let Some(speed) = phase.speed() {
            hosts.a.libvirt.virsh_ok(&["migrate-setspeed", "web", speed]);
        }
        let virsh = hosts.a.migrate_command("web", "host-b", phase.options()).spawn().unwrap();
        let mut moving = Self { hosts, phase, virsh, stopped: None, disk };
        moving.wait();
        moving
    }

    fn wait(&mut self) {
        let Hosts { a, b, .. } = &self.hosts;
        match self.phase {
            Phase::Prepare => {
                let socket = a.libvirt.path("/run/vmferry-peers/host-b/web.mig");
                wait_until("announced", || socket.exists());
            }
            Phase::Disks => {
                // QEMU gives up a connection for disks whose negotiation takes 10 s.
                wait_until("copies disks", || b.cable.carried() > 2 << 20);
            }
            Phase::Memory => self.wait_for_memory(),
            Phase::Finish => {
                b.daemon().wait_for("prepares", |event| event["event"] == "prepared");
                // QEMU receives the memory without it.
                let libvirtd = Pid::from_raw(b.libvirt.libvirtd_pid() as i32).unwrap();
                kill_process(libvirtd, Signal::STOP).unwrap();
                self.stopped = Some(libvirtd);
                let finish = |event: &Value| event["event"] == "finishing";
                b.daemon().wait_for("passes the Finish", finish);
            }
            Phase::PostCopy => {
                self.wait_for_memory();
                a.libvirt.virsh_ok(&["migrate-postcopy", "web"]);
                b.libvirt.wait_for_state("web", Some("running"));
            }
        }
    }

    /// Waits until libvirt says that memory has been sent.
    fn wait_for_memory(&self) {
        wait_until("sends memory", || {
            let said = self.hosts.a.libvirt.virsh(&["domjobinfo", "web"]).stdout;
            let said = String::from_utf8_lossy(&said).into_owned();
            let processed = said.lines().find_map(|line| line.strip_prefix("Memory processed:"));
            processed.is_some_and(|amount| !amount.trim().starts_with("0.000"))
        });
    }

    /// Kills `host-b`'s libvirtd, also while it is stopped.
    pub fn kill_libvirtd_of_b(&mut self) {
        self.hosts.b.libvirt.kill_libvirtd();
        self.stopped = None;
    }

    /// Ends what makes the phase last.
    pub fn let_go(&mut self) {
        if let Some(libvirtd) = self.stopped.take() {
            kill_process(libvirtd, Signal::CONT).unwrap();
        }
        // They fail if the migration has ended.
        for more in [&[][..], &["--postcopy"]] {
            let faster = [&["migrate-setspeed", "web", FAST], more].concat();
            drop(self.hosts.a.libvirt.virsh(&faster));
        }
    }

    /// Lets it go and waits for the end of `virsh`.
    pub fn end(mut self) -> Ended {
        self.let_go();
        let Self { hosts, phase, virsh, disk, .. } = self;
        Ended { hosts, virsh: virsh.wait_with_output().unwrap(), phase, disk }
    }
}

impl Ended {
    /// The guest runs at the destination and nowhere else, and is intact.
    pub fn has_moved(&self) {
        let Hosts { a, b, .. } = &self.hosts;
        b.libvirt.wait_for_state("web", Some("running"));
        a.libvirt.wait_for_state("web", None);
        b.libvirt.check_guest("web");
        if let Some(disk) = &self.disk {
            assert!(a.libvirt.read_disk(disk) == b.libvirt.read_disk(disk), "the disks differ");
        }
    }

    /// The guest runs at the source and nowhere else, and is intact.
    pub fn has_stayed(&self) {
        let Hosts { a, b, .. } = &self.hosts;
        a.libvirt.wait_for_state("web", Some("running"));
        b.libvirt.wait_for_state("web", None);
        a.libvirt.check_guest("web");
    }

    /// The next attempt succeeds.
    pub fn moves_now(mut self) {
        self.hosts.a.libvirt.virsh_ok(&["migrate-setspeed", "web", FAST]);
        let moved = self.hosts.a.migrate("web", "host-b", self.phase.options());
        crate::support::must_succeed(&self.hosts, &moved);
        self.virsh = moved;
        self.has_moved();
    }
}

/// Polls a condition.
pub fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_true() {
        assert!(Instant::now() < deadline, "it never {what}");
        // Files and libvirt's answers cause no wake-up.
        std::thread::sleep(Duration::from_millis(10));
    }
}
