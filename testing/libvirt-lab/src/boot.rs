//! The files that guests boot.

use std::path::{Path, PathBuf};

use vmferry_qemu_lab::Fixture;

/// The directory of a host's own copies.
const COPIES: &str = "/var/lib/libvirt/boot";

/// The files that guests boot, by paths that QEMU on a host can use.
#[derive(Debug, Default)]
pub(crate) struct BootFiles {
    /// Linux.
    pub kernel: PathBuf,
    /// Its initramfs.
    pub initramfs: PathBuf,
    /// The bare-metal guest.
    pub bare_metal: PathBuf,
}

impl BootFiles {
    /// Copies for one host, as users' guests have them. `on_host` returns how this process reaches
    /// a path of the host. libvirt changes the owner of the files that a guest boots, so those of
    /// this machine are not used.
    pub fn copied(on_host: impl Fn(&Path) -> PathBuf) -> Self {
        let Fixture { kernel, initramfs, bare_metal, .. } = Fixture::new();
        let copies = Path::new(COPIES);
        std::fs::create_dir_all(on_host(copies)).expect("the host has directories");
        let copy = |from: &Path, name: &str| {
            let path = copies.join(name);
            std::fs::copy(from, on_host(&path)).expect("a file can be copied to the host");
            path
        };
        Self {
            kernel: copy(&kernel, "kernel"),
            initramfs: copy(&initramfs, "initramfs"),
            bare_metal: copy(&bare_metal, "bare-metal.elf"),
        }
    }
}
