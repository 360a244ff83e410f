//! A disk image on a FUSE file system that bypasses the page cache (`FOPEN_DIRECT_IO`), as a client
//! of a network file system has it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use crate::{Machine, Version};

/// The mount. Removed on drop.
#[derive(Debug)]
pub struct FuseImage {
    server: Child,
    mounted: PathBuf,
}

impl FuseImage {
    /// Mounts an image at a file of its own. Several mounts of an image show the same bytes.
    ///
    /// # Panics
    /// If it can't be mounted.
    #[must_use]
    pub fn mount(image: &Path, mounted: PathBuf) -> Self {
        std::fs::write(&mounted, "").expect("a mount point can be made");
        let libraries =
            Machine::new(Version::V7_2, "").libraries().expect("this QEMU is installed");
        let node = format!("driver=file,node-name=image,filename={},locking=off", image.display());
        let point = mounted.display();
        let export = format!("type=fuse,id=export,node-name=image,mountpoint={point},writable=on");
        let server = Command::new(libraries.join("../../bin/qemu-storage-daemon"))
            .env("LD_LIBRARY_PATH", libraries)
            .args(["--blockdev", &node, "--export", &export])
            .spawn()
            .expect("qemu-storage-daemon can be started");
        let mut on_fuse = Self { server, mounted };
        while std::fs::metadata(&on_fuse.mounted).map_or(0, |file| file.len()) == 0 {
            let ended = on_fuse.server.try_wait().expect("it is a child");
            assert!(ended.is_none(), "it serves no image: {ended:?}");
            // No event tells that the export is mounted.
            std::thread::sleep(Duration::from_millis(10));
        }
        on_fuse
    }

    /// The file as which it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.mounted
    }
}

impl Drop for FuseImage {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.mounted).status();
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
