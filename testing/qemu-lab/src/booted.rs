//! Guests that are already booted. Linux takes two seconds of CPU time until its program runs; a
//! state that was saved at that point loads in half a second. The bare-metal guest boots as fast.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Value, json};
use vmferry_kit::Exclusive;

use crate::machine::{REST, kernel};
use crate::{Backend, Guest, Machine, Monitor, Qemu, World, initramfs, packages};

/// A booting guest needs a whole CPU: several at once would not be up in time. And each state is
/// saved only once.
const BOOTING: &str = "booting-qemu";

impl Machine {
    /// Starts a QEMU, and waits until its guest works. A Linux guest continues from the saved state
    /// of an equal one after its boot, unless its devices use files of the test, it runs as another
    /// user or in another network, QEMU may not start the program that reads the state, or its
    /// memory is large: QEMU reads all of it when it loads a state, also what was never written.
    pub fn start_booted(&self, world: &World, name: &str) -> Qemu {
        let elsewhere = self.user.is_some() || self.namespace.is_some();
        let forbids = |device: &String| device.contains('/') || device.contains("spawn=deny");
        let must_boot = elsewhere || self.mib > 1024 || self.devices.iter().any(forbids);
        if self.guest != Guest::BareMetal && must_boot {
            let _alone = Exclusive::lock(BOOTING);
            let mut qemu = self.start(world, name);
            works(&mut qemu);
            return qemu;
        }
        self.start_booted_under(world, name, &[])
    }

    /// The same, started by a program with arguments that becomes QEMU or stays its parent, such as
    /// `unshare --pid --fork`.
    pub fn start_booted_under(&self, world: &World, name: &str, under: &[&str]) -> Qemu {
        let mut qemu = if self.guest == Guest::BareMetal {
            self.spawn_with(world, name, &[], under)
        } else {
            let from = format!("exec:cat '{}'", self.saved().display());
            let mut qemu = self.spawn_with(world, name, &["-incoming", &from], under);
            run_on(&mut qemu);
            qemu
        };
        works(&mut qemu);
        qemu
    }

    /// The state of such a guest, saved on first use.
    fn saved(&self) -> PathBuf {
        let _alone = Exclusive::lock(BOOTING);
        let mut key = DefaultHasher::new();
        // A state does not depend on the backends of the memory, but on its blocks.
        let backend = if self.backend == Backend::TwoNodes { self.backend } else { Backend::File };
        let any = Machine { memory_directory: None, backend, backend_options: "", ..self.clone() };
        (format!("{any:?}"), REST).hash(&mut key);
        let path = directory().join(format!("{:016x}", key.finish()));
        if !path.exists() {
            let unique = path.with_extension(std::process::id().to_string());
            any.boot_and_save(&unique);
            // A program that was killed leaves no incomplete state.
            std::fs::rename(&unique, &path).expect("a state can be put in its place");
        }
        path
    }

    fn boot_and_save(&self, path: &Path) {
        let world = World::new();
        let mut qemu = self.start(&world, "booting");
        works(&mut qemu);
        let mut monitor = Monitor::connect(&qemu.qmp);
        // Stopped first: an emulated guest of QEMU 7.2 would lose writes.
        monitor.execute("stop", json!({}));
        monitor.execute("migrate-set-parameters", json!({ "max-bandwidth": 100_u64 << 30 }));
        let uri = format!("exec:cat > '{}'", path.display());
        monitor.execute("migrate", json!({ "uri": uri }));
        let has_ended = |said: &Value| {
            ["completed", "failed", "cancelled"].iter().any(|status| said["status"] == *status)
        };
        let said = monitor.wait_for("query-migrate", has_ended);
        assert_eq!(said["status"], "completed", "the guest was not saved: {said}");
        qemu.quit(monitor);
    }
}

/// The directory of the saved states. Those of earlier programs and kernels are removed.
fn directory() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let mut content = DefaultHasher::new();
        for file in [initramfs::path(packages()), &kernel()] {
            std::fs::read(file).expect("what the guest boots is there").hash(&mut content);
        }
        let directory = packages().join(format!("booted-{:016x}", content.finish()));
        if !directory.exists() {
            let others = std::fs::read_dir(packages()).expect("packages were fetched").flatten();
            for other in others.filter(|it| it.file_name().to_string_lossy().starts_with("booted-"))
            {
                // Another program may do the same.
                let _ = std::fs::remove_dir_all(other.path());
            }
            std::fs::create_dir_all(&directory).expect("a directory can be made");
        }
        directory
    })
}

/// Waits until the guest's program checks memory.
fn works(qemu: &mut Qemu) {
    qemu.wait_for("works", |said| said.get("checked") > 0);
}

/// Continues a guest that was saved while it was stopped, once it is loaded.
fn run_on(qemu: &mut Qemu) {
    let mut monitor = Monitor::connect(&qemu.qmp);
    qemu.wait_until("has loaded its state", |_| {
        monitor.execute("query-status", json!({}))["status"] == "paused"
    });
    monitor.execute("cont", json!({}));
}
