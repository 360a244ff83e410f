//! Disks of a domain.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use vmferry_qemu_lab::qcow2_image;

use crate::LibvirtHost;

/// The directory of disks that only one host has, on each host.
const OWN_DISKS: &str = "/var/lib/libvirt/images";

/// The format of a disk's image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// A sparse file.
    Raw,
    /// A qcow2 image.
    Qcow2,
}

/// A virtio disk. It bypasses the host's page cache, as libvirt wants for a migration.
#[derive(Clone, Debug)]
pub struct Disk {
    /// The image's path on every host that runs the domain.
    pub path: PathBuf,
    /// The image's format.
    pub format: ImageFormat,
}

impl Disk {
    /// Creates an empty disk in a directory that hosts share, such as one in `/tmp`.
    ///
    /// # Panics
    /// If it can't be created.
    #[must_use]
    pub fn shared(directory: &Path, name: &str, mib: u64, format: ImageFormat) -> Self {
        let path = directory.join(name);
        create(&path, mib, format);
        Self { path, format }
    }

    /// The disk's element in a domain's XML.
    pub(crate) fn xml(&self, number: usize) -> String {
        let format = match self.format {
            ImageFormat::Raw => "raw",
            ImageFormat::Qcow2 => "qcow2",
        };
        let letter = char::from(b'a' + u8::try_from(number).expect("a domain has few disks"));
        format!(
            "<disk type='file' device='disk'><driver name='qemu' type='{format}' cache='none'/>\
             <source file='{}'/><target dev='vd{letter}' bus='virtio'/></disk>",
            self.path.display()
        )
    }
}

impl LibvirtHost {
    /// Creates an empty disk that only this host has. A migration with `--copy-storage-all` needs
    /// one of the same name and size on the destination.
    ///
    /// # Panics
    /// If it can't be created.
    pub fn create_disk(&self, name: &str, mib: u64, format: ImageFormat) -> Disk {
        let path = Path::new(OWN_DISKS).join(name);
        create(&self.path(&path), mib, format);
        Disk { path, format }
    }

    /// Creates a raw disk with content that can't be compressed, and that only this host has.
    ///
    /// # Panics
    /// If it can't be created.
    pub fn create_filled_disk(&self, name: &str, mib: u64) -> Disk {
        let path = Path::new(OWN_DISKS).join(name);
        let random = File::open("/dev/urandom").expect("there are random numbers");
        let copied = File::create(self.path(&path))
            .and_then(|mut file| std::io::copy(&mut random.take(mib << 20), &mut file));
        copied.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Disk { path, format: ImageFormat::Raw }
    }

    /// The content of a disk's image on this host.
    ///
    /// # Panics
    /// If it can't be read.
    pub fn read_disk(&self, disk: &Disk) -> Vec<u8> {
        let path = self.path(&disk.path);
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }
}

fn create(path: &Path, mib: u64, format: ImageFormat) {
    let created = match format {
        ImageFormat::Raw => File::create(path).and_then(|file| file.set_len(mib << 20)),
        ImageFormat::Qcow2 => std::fs::write(path, qcow2_image(mib)),
    };
    created.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
