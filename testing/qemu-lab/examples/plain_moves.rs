//! Moves an emulated Linux guest between plain QEMUs, without vmferry, and looks for pages that
//! QEMU has lost: `cargo run -p vmferry-qemu-lab --example plain_moves -- --cpu 0 --passes 8`.
//!
//! After each migration both guests are paused, and their memory files must be equal. A page that
//! differs was written by the guest after QEMU had sent it last, and QEMU did not notice. After
//! such a loss the guest continues at the source, and otherwise at the destination. With `--paused`
//! the guest does not run during its migrations: the control, in which no page may differ.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use clap::Parser;
use serde_json::{Value, json};
use vmferry_qemu_lab::{Backend, Guest, Machine, Monitor, Qemu, Version, World};

const PAGE_BYTES: usize = 4096;

#[derive(Parser)]
struct Options {
    /// How many migrations.
    #[arg(long, default_value_t = 100)]
    moves: u32,
    /// QEMU's version: 7.2 or 10.0.
    #[arg(long, default_value = "10.0")]
    qemu: String,
    /// Channels beside the main one.
    #[arg(long, default_value_t = 0)]
    multifd: u8,
    /// The passes over memory that a migration has at least.
    #[arg(long, default_value_t = 4)]
    passes: u64,
    /// Processes that use a CPU each.
    #[arg(long, default_value_t = 0)]
    load: u32,
    /// The CPU that all QEMUs share, so that their threads preempt each other.
    #[arg(long)]
    cpu: Option<u32>,
    /// The guest's memory.
    #[arg(long, default_value_t = 256)]
    mib: u64,
    /// KiB by which its memory is smaller. QEMU reads the dirty log of a block of a multiple of 256
    /// KiB by words, and of any other page by page.
    #[arg(long, default_value_t = 8)]
    less_kib: u64,
    /// The guest's vCPUs.
    #[arg(long, default_value_t = 1)]
    vcpus: u32,
    /// One thread for all vCPUs (`thread=single`).
    #[arg(long)]
    one_thread: bool,
    /// The guest's workload.
    #[arg(long, default_value = "static=8 dirty=20 rest=0")]
    workload: String,
    /// Pauses the guest for each migration.
    #[arg(long)]
    paused: bool,
}

fn main() {
    let options = Options::parse();
    let _load = Load::start(options.load);
    let world = World::new();
    let version = if options.qemu == "7.2" { Version::V7_2 } else { Version::V10_0 };
    let machine = Machine {
        mib: options.mib,
        less_kib: options.less_kib,
        vcpus: options.vcpus,
        guest: if options.one_thread { Guest::LinuxOfOneThread } else { Guest::Linux },
        backend: Backend::File,
        ..Machine::new(version, &options.workload)
    };
    // A guest that arrives is paused until its memory was compared.
    let waiting = machine.clone().with(&["-S"]);
    let mut here = Side::new(machine.start_booted(&world, "here"), &world, "here", &options);
    let (mut lossy, mut lost, mut passes) = (0, BTreeMap::<u64, u32>::new(), 0);
    let begun = Instant::now();
    for number in 1..=options.moves {
        let name = format!("there-{number}");
        let mut there = Side::new(waiting.incoming(&world, &name), &world, &name, &options);
        passes += here.migrate_to(&mut there, &options);
        let pages = differing(&here.memory, &there.memory);
        if pages.is_empty() {
            here = there;
        } else {
            lossy += 1;
            println!("move {number}: these pages were lost: {pages:?}");
            pages.iter().for_each(|page| *lost.entry(*page).or_default() += 1);
        }
        here.monitor.execute("cont", json!({}));
        here.qemu.check_guest();
        if number % 20 == 0 {
            println!("{number} moves, {passes} passes, {lossy} with lost pages");
        }
    }
    println!(
        "{} moves in {:.0} s, {passes} passes: {lossy} with lost pages, {} different pages",
        options.moves,
        begun.elapsed().as_secs_f64(),
        lost.len()
    );
}

/// A QEMU, and its memory file.
struct Side {
    qemu: Qemu,
    monitor: Monitor,
    memory: PathBuf,
}

impl Side {
    fn new(qemu: Qemu, world: &World, name: &str, options: &Options) -> Self {
        if let Some(cpu) = options.cpu {
            let pid = qemu.child.id().to_string();
            let pin = Command::new("taskset")
                .args(["--all-tasks", "--cpu-list", "--pid", &cpu.to_string(), &pid])
                .stdout(Stdio::null())
                .status();
            assert!(pin.expect("taskset(1) runs").success());
        }
        let monitor = Monitor::connect(&qemu.qmp);
        Self { qemu, monitor, memory: world.path_on_tmpfs(&format!("{name}-ram")) }
    }

    /// Migrates the guest. Both sides are paused in the end. Returns the number of passes.
    fn migrate_to(&mut self, there: &mut Self, options: &Options) -> u64 {
        let socket = there.qemu.qmp.with_extension("migration");
        let uri = json!({ "uri": format!("unix:{}", socket.display()) });
        let multifd = json!({ "capability": "multifd", "state": options.multifd > 0 });
        let capabilities = json!({ "capabilities": [multifd] });
        // Too little downtime is allowed until there were enough passes.
        let slow = json!({ "downtime-limit": 1, "max-bandwidth": options.mib << 20 });
        if options.paused {
            self.monitor.execute("stop", json!({}));
        }
        for monitor in [&mut self.monitor, &mut there.monitor] {
            monitor.execute("migrate-set-capabilities", capabilities.clone());
            monitor.execute("migrate-set-parameters", slow.clone());
            if options.multifd > 0 {
                let channels = json!({ "multifd-channels": options.multifd });
                monitor.execute("migrate-set-parameters", channels);
            }
        }
        there.monitor.execute("migrate-incoming", uri.clone());
        self.monitor.execute("migrate", uri);
        let passes = |migration: &Value| migration["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
        let is_over = |migration: &Value| migration["status"] == "completed";
        let enough = |migration: &Value| passes(migration) > options.passes || is_over(migration);
        self.monitor.wait_for("query-migrate", enough);
        let quick = json!({ "downtime-limit": 10_000, "max-bandwidth": 10_u64 << 30 });
        self.monitor.execute("migrate-set-parameters", quick);
        let migration = self.monitor.wait_for("query-migrate", is_over);
        there.monitor.wait_for("query-status", |status| status["status"] == "paused");
        passes(&migration)
    }
}

/// The numbers of the pages in which two files differ.
fn differing(one: &Path, other: &Path) -> Vec<u64> {
    let read = |path| std::fs::read(path).expect("a memory file can be read");
    let (one, other) = (read(one), read(other));
    assert_eq!(one.len(), other.len());
    let pages = one.chunks(PAGE_BYTES).zip(other.chunks(PAGE_BYTES)).zip(0..);
    pages.filter(|((one, other), _)| one != other).map(|(_, page)| page).collect()
}

/// Processes that keep the CPUs busy, killed on drop.
struct Load(Vec<Child>);

impl Load {
    fn start(count: u32) -> Self {
        let busy = |_| Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
        Self((0..count).map(busy).collect::<Result<_, _>>().expect("sh(1) runs"))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It runs forever, and nothing depends on its end.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
