//! The disks of a guest's devices, by `query-block`.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::storage::{OpenImage, Storage};
use crate::qmp::{Qmp, QmpError};
use crate::view::View;

/// The limits of a disk that QEMU itself applies, by the names of `block_set_io_throttle`.
const LIMITS: [&str; 19] = [
    "bps",
    "bps_rd",
    "bps_wr",
    "iops",
    "iops_rd",
    "iops_wr",
    "bps_max",
    "bps_rd_max",
    "bps_wr_max",
    "iops_max",
    "iops_rd_max",
    "iops_wr_max",
    "bps_max_length",
    "bps_rd_max_length",
    "bps_wr_max_length",
    "iops_max_length",
    "iops_rd_max_length",
    "iops_wr_max_length",
    "iops_size",
];

/// A device with a disk, or a drive for one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Disk {
    /// The device: its ID, or for one without an ID its place in QEMU's object tree.
    pub device: String,
    /// The device, as QEMU's commands name it.
    #[serde(skip)]
    pub(super) path: String,
    /// The drive's name, as `-drive id=` gives it; often empty.
    pub name: String,
    /// Whether the medium can be ejected.
    pub removable: bool,
    /// `None` if the drive is empty.
    pub medium: Option<Medium>,
    /// The limits that are not 0, by the names of `block_set_io_throttle`.
    pub limits: BTreeMap<String, u64>,
}

/// What is in a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Medium {
    /// The size that the guest sees, in bytes.
    pub bytes: u64,
    /// Such as `qcow2`, by QEMU's name.
    pub format: String,
    /// Whether the guest may not write it.
    pub read_only: bool,
    /// The image and the images below it, with their sizes.
    pub images: String,
    /// The file or the address of the topmost image.
    pub file: String,
    /// Where that file is stored, if that is known.
    pub storage: Option<Storage>,
    /// It ends with its QEMU.
    pub temporary: bool,
    /// The file of the image and of each image below it.
    #[serde(skip)]
    pub(crate) layers: Vec<String>,
}

/// Reads the disks of a QEMU, without their [storage](locate).
///
/// # Errors
/// QMP errors.
pub fn read(qmp: &mut Qmp) -> Result<Vec<Disk>, QmpError> {
    let blocks = qmp.execute("query-block", json!({}))?;
    let mut disks: Vec<_> = blocks.as_array().into_iter().flatten().filter_map(Disk::of).collect();
    disks.sort_by(|a, b| a.device.cmp(&b.device));
    Ok(disks)
}

/// The dirty bitmaps that end with this QEMU, as `NAME of DEVICE`. Those that are persistent are in
/// their images.
///
/// # Errors
/// QMP errors.
pub fn bitmaps_that_end(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    let blocks = qmp.execute("query-block", json!({}))?;
    let mut found = Vec::new();
    for block in blocks.as_array().into_iter().flatten() {
        let Some(disk) = Disk::of(block) else { continue };
        let bitmaps = block["inserted"]["dirty-bitmaps"].as_array().into_iter().flatten();
        let ending = bitmaps.filter(|bitmap| bitmap["persistent"] != true);
        // Those that a block job uses have no name.
        let names = ending.filter_map(|bitmap| bitmap["name"].as_str());
        found.extend(names.map(|name| format!("{name} of {}", disk.device)));
    }
    Ok(found)
}

/// Finds out where the disks' images are stored, as far as QEMU's process is visible.
pub fn locate(disks: &mut [Disk], qmp: &Qmp, view: &mut dyn View) {
    let process = view.process(qmp);
    let open = process.and_then(|pid| view.open_images(pid).ok()).unwrap_or_default();
    for medium in disks.iter_mut().filter_map(|disk| disk.medium.as_mut()) {
        medium.storage = Storage::of(&medium.file, &open);
        medium.temporary |= is_deleted(&medium.file, &open);
    }
}

impl Disk {
    /// Reads an element of `query-block`; `None` for a drive that no device uses.
    pub(super) fn of(block: &Value) -> Option<Self> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let path = text(&block["qdev"]);
        let name = text(&block["device"]);
        // Devices of the machine type are numbered, differently in each version of QEMU.
        let device = match path.strip_prefix("/machine/") {
            Some(rest) if rest.starts_with("unattached/") && !name.is_empty() => name.clone(),
            Some(rest) => {
                let rest = rest.strip_prefix("peripheral/").unwrap_or(rest);
                rest.strip_suffix("/virtio-backend").unwrap_or(rest).to_owned()
            }
            None => path.clone(),
        };
        if device.is_empty() {
            return None;
        }
        let inserted = &block["inserted"];
        let limits = LIMITS.iter().filter_map(|&name| {
            let limit = inserted[name].as_u64().filter(|limit| *limit > 0)?;
            Some((name.to_owned(), limit))
        });
        Some(Self {
            device,
            path,
            name,
            removable: block["removable"] == true,
            medium: inserted.is_object().then(|| Medium::of(inserted)),
            limits: limits.collect(),
        })
    }

    /// Whether the guest's writes to it end with its QEMU.
    pub(super) fn is_temporary(&self) -> bool {
        self.medium.as_ref().is_some_and(|medium| medium.temporary)
    }
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.medium {
            None => f.write_str("empty"),
            Some(medium) => {
                f.write_str(&medium.images)?;
                if medium.read_only {
                    f.write_str(", read-only")?;
                }
                self.limits.iter().try_for_each(|(name, limit)| write!(f, ", {name} {limit}"))
            }
        }
    }
}

impl Medium {
    fn of(inserted: &Value) -> Self {
        let mut image = &inserted["image"];
        let bytes = image["virtual-size"].as_u64().unwrap_or(0);
        let format = image["format"].as_str().unwrap_or_default().to_owned();
        let file = file(image["filename"].as_str().unwrap_or_default());
        // QEMU's name for the overlay that `snapshot=on` makes and deletes (`create_tmp_file` in
        // block.c), which it writes without flushes.
        let base = file.rsplit('/').next().unwrap_or_default();
        let is_unnamed = base.strip_prefix("vl.").is_some_and(|rest| rest.len() == 6);
        let temporary = is_unnamed && inserted["cache"]["no-flush"] == true;
        let (mut images, mut layers) = (Vec::new(), Vec::new());
        while let Some(name) = image["filename"].as_str().filter(|name| !name.is_empty()) {
            let mib = image["virtual-size"].as_u64().unwrap_or(0) >> 20;
            let file = self::file(name);
            images.push(format!("{file} of {mib} MiB"));
            layers.push(file);
            image = &image["backing-image"];
        }
        Self {
            bytes,
            format,
            read_only: inserted["ro"] == true,
            images: images.join(" on "),
            file,
            storage: None,
            temporary,
            layers,
        }
    }
}

/// The file of an image. QEMU writes its options as JSON where a name would not be enough; then it
/// is that of the innermost node that has one.
fn file(name: &str) -> String {
    let Some(options) = name.strip_prefix("json:") else { return name.to_owned() };
    let Ok(options) = serde_json::from_str::<Value>(options) else { return name.to_owned() };
    let mut node = &options;
    while node["filename"].is_null() && node["file"].is_object() {
        node = &node["file"];
    }
    node["filename"].as_str().map_or_else(|| name.to_owned(), str::to_owned)
}

/// Whether QEMU has the file open under this name, and the name is gone.
fn is_deleted(file: &str, open: &[OpenImage]) -> bool {
    let of_this_name = |image: &&OpenImage| image.is_at(file);
    let mut found = open.iter().filter(of_this_name).peekable();
    found.peek().is_some() && found.all(|image| image.deleted)
}
