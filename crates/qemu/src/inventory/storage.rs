//! Where an image is stored, so that two hosts can tell whether they have the same one.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::proc_stat::host;

/// File systems of a server. Their files have the same inode number at every client, and the mount
/// names the server. The names are those of `/proc/PID/mountinfo`.
const OF_A_SERVER: [&str; 4] = ["cifs", "nfs", "nfs4", "smb3"];

/// A file that QEMU has open, which is a regular one or a block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenImage {
    /// Its path in QEMU's mount namespace.
    pub path: String,
    /// QEMU's working directory.
    pub directory: String,
    /// The path is gone.
    pub deleted: bool,
    /// Where it is stored, if that is known.
    pub storage: Option<Storage>,
}

/// Where an image is stored. Two images with the same `kind` and the same `within` are the same if
/// their `name` is, and are different otherwise. Of others that is not known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Storage {
    /// `file`, or a kind of block device.
    pub kind: String,
    /// The file system, as every host names it.
    pub within: String,
    /// The name within it.
    pub name: String,
}

/// Whether two images are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sameness {
    /// They are.
    Same,
    /// They are not.
    Different,
    /// Nothing that both hosts know tells.
    Unknown,
}

impl OpenImage {
    /// Lists the images that a process has open.
    ///
    /// # Errors
    /// If `/proc` can't be read.
    pub fn of(pid: u32) -> io::Result<Vec<Self>> {
        let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
        let directory = std::fs::read_link(format!("/proc/{pid}/cwd"))?.display().to_string();
        let mut found = Vec::new();
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
            let entry = entry?.path();
            // A descriptor may be closed meanwhile.
            let (Ok(path), Ok(about)) = (std::fs::read_link(&entry), std::fs::metadata(&entry))
            else {
                continue;
            };
            if !about.is_file() && !about.file_type().is_block_device() {
                continue;
            }
            let path = path.display().to_string();
            let named = path.strip_suffix(" (deleted)");
            found.push(Self {
                path: named.unwrap_or(&path).to_owned(),
                directory: directory.clone(),
                deleted: about.nlink() == 0,
                storage: Storage::find(pid, &entry, &about, &mounts),
            });
        }
        Ok(found)
    }

    /// Whether QEMU opened it by this name.
    pub(super) fn is_at(&self, file: &str) -> bool {
        is_named(Path::new(&self.path), file, Path::new(&self.directory))
    }
}

/// Whether a process in this directory can have opened the file at `path` by this name.
pub fn is_named(path: &Path, name: &str, directory: &Path) -> bool {
    let plain = |path: &Path| path.components().collect::<PathBuf>();
    !name.is_empty() && plain(&directory.join(name)) == plain(path)
}

impl Storage {
    /// Where an image of this name is stored.
    pub(super) fn of(file: &str, open: &[OpenImage]) -> Option<Self> {
        open.iter().find(|image| image.is_at(file))?.storage.clone()
    }

    fn find(pid: u32, descriptor: &Path, about: &Metadata, mounts: &str) -> Option<Self> {
        if about.file_type().is_block_device() {
            return Self::of_device(about.rdev());
        }
        let number = descriptor.file_name()?.to_str()?;
        let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
        let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim();
        let line = mounts.lines().find(|line| line.split(' ').next() == Some(mount))?;
        let mut words = line.split_once(" - ")?.1.split(' ');
        let (kind, source) = (words.next()?, words.next()?);
        let within = if OF_A_SERVER.contains(&kind) {
            format!("{kind} {source}")
        } else {
            format!("host {} {}", host(), about.dev())
        };
        Some(Self { kind: "file".into(), within, name: about.ino().to_string() })
    }

    /// By the name that a disk or the device mapper gives to all hosts. A partition has its disk's,
    /// and its own number.
    fn of_device(number: u64) -> Option<Self> {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let at = format!("/sys/dev/block/{major}:{minor}");
        let read = |of: &str| {
            let text = std::fs::read_to_string(format!("{at}/{of}")).ok()?;
            Some(text.trim().to_owned()).filter(|text| !text.is_empty())
        };
        let part = read("partition").map_or_else(String::new, |part| format!(" part {part}"));
        let names = ["dm/uuid", "wwid", "device/wwid", "../wwid", "../device/wwid"];
        names.into_iter().find_map(|of| {
            let kind = of.trim_start_matches("../").split('/').next()?.to_owned();
            Some(Self { kind, within: String::new(), name: read(of)? + &part })
        })
    }

    /// Compares two images.
    pub(super) fn compare(one: Option<&Self>, other: Option<&Self>) -> Sameness {
        match (one, other) {
            (Some(one), Some(other)) if one == other => Sameness::Same,
            (Some(one), Some(other))
                if (&one.kind, &one.within) == (&other.kind, &other.within) =>
            {
                Sameness::Different
            }
            _ => Sameness::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn open_files_are_found_by_the_names_that_a_process_uses() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let [image, copy, gone] = ["image", "copy", "gone"].map(|name| File::create(at(name)));
        std::fs::hard_link(at("image"), at("link")).unwrap();
        let link = File::open(at("link")).unwrap();
        std::fs::remove_file(at("gone")).unwrap();
        let open = OpenImage::of(std::process::id()).unwrap();
        let named = |name: &str| Storage::of(at(name).to_str().unwrap(), &open);
        let same = |one, other| Storage::compare(named(one).as_ref(), named(other).as_ref());
        assert_eq!(same("image", "link"), Sameness::Same);
        assert_eq!(same("image", "copy"), Sameness::Different);
        assert_eq!(same("image", "never"), Sameness::Unknown);
        let path = at("gone").display().to_string();
        assert!(open.iter().any(|one| one.is_at(&path) && one.deleted), "{open:?}");
        drop((image, copy, gone, link));
    }

    #[test]
    fn names_are_relative_to_the_working_directory_of_qemu() {
        let image = OpenImage {
            path: "/images/web".into(),
            directory: "/images".into(),
            deleted: false,
            storage: None,
        };
        for name in ["web", "./web", "/images/web", "/images/./web"] {
            assert!(image.is_at(name), "{name}");
        }
        for name in ["", "/web", "web2", "../web"] {
            assert!(!image.is_at(name), "{name}");
        }
    }
}
