//! The files that guests boot.

use std::path::{Path, PathBuf};

use vmferry_qemu_lab::Fixture;

/// The directory of a host's own copies.
const COPIES: &str = "/var/lib/libvirt/boot";

/// The files that guests boot, by paths that QEMU on a host can use.
#[derive(Debug)]
pub(crate) struct BootFiles {
    /// Linux.
    pub kernel: PathBuf,
    /// Its initramfs.
    pub initramfs: PathBuf,
    /// The bare-metal guest.
    pub bare_metal: PathBuf,
}

impl BootFiles {
    /// Those of this machine, which belong to root.
    pub fn shared() -> Self {
        let Fixture { kernel, initramfs, bare_metal, .. } = Fixture::new();
        Self { kernel, initramfs, bare_metal }
    }

    /// Copies for one host. `on_host` returns how this process reaches a path of the host.
    pub fn copied(&self, on_host: impl Fn(&Path) -> PathBuf) -> Self {
        let copies = Path::new(COPIES);
        std::fs::create_dir_all(on_host(copies)).expect("the host has directories");
        let copy = |from: &Path, name: &str| {
            let path = copies.join(name);
            std::fs::copy(from, on_host(&path)).expect("a file can be copied to the host");
            path
        };
        Self {
            kernel: copy(&self.kernel, "kernel"),
            initramfs: copy(&self.initramfs, "initramfs"),
            bare_metal: copy(&self.bare_metal, "bare-metal.elf"),
        }
    }
}
