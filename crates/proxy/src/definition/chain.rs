//! The files that images name.
//!
//! An image of the format qcow2 names its backing file, and can name a file with its data. If a
//! definition does not say where the chain of images ends, libvirt reads the images and opens what
//! they name (`virStorageSourceGetMetadata`), as root, and QEMU always opens the file with the
//! data. The sender may have written the image itself, with `--copy-storage-all`. So what the
//! images of a guest that is started name is judged as if the definition named it.

use std::path::Path;

use roxmltree::Node;

/// The most images of a chain. libvirt has no longer ones.
pub const MOST_IMAGES: usize = 200;

/// An image of a disk, whose format has names in it.
pub struct NamingImage {
    /// The XPath of its disk.
    pub disk: String,
    /// The path by which a policy permits what it names.
    pub general: String,
    /// Its file, or its volume and the volume's pool.
    pub source: Source,
    /// Whether libvirt opens its backing file because the definition does not say that there is
    /// none, or which.
    pub names_backing: bool,
}

/// Where an image is.
pub enum Source {
    /// In this file or block device.
    File(String),
    /// It is a volume of a storage pool.
    Volume {
        /// The pool.
        pool: String,
        /// The volume.
        volume: String,
    },
}

/// The images of a definition that can name other files. `domain` is its root.
pub fn naming_images(domain: Node<'_, '_>) -> Vec<NamingImage> {
    let devices = children(domain, "devices").flat_map(|devices| children(devices, "disk"));
    let mut found = Vec::new();
    for (number, disk) in (1..).zip(devices) {
        let kind = disk.attribute("type").unwrap_or_default();
        let (mut image, mut format) = (disk, format(disk, "driver"));
        loop {
            let below = children(image, "backingStore").next();
            let source = children(image, "source").last();
            if let (Some(source), "qcow2") = (source.and_then(source_of), format.as_str()) {
                found.push(NamingImage {
                    disk: format!("/domain/devices/disk[{number}]"),
                    general: format!("/domain/devices/disk[@type='{kind}']/backingStore"),
                    source,
                    names_backing: below.is_none(),
                });
            }
            let Some(below) = below else { break };
            (image, format) = (below, self::format(below, "format"));
        }
    }
    found
}

fn source_of(element: Node<'_, '_>) -> Option<Source> {
    let text = |name| element.attribute(name).map(str::to_owned);
    if let Some(file) = text("file").or_else(|| text("dev")) {
        return Some(Source::File(file));
    }
    Some(Source::Volume { pool: text("pool")?, volume: text("volume")? })
}

/// The file of a name in an image, which is relative to the image's directory.
pub fn named(by: &Path, name: &str) -> String {
    let directory = by.parent().unwrap_or(by);
    directory.join(name).to_string_lossy().into_owned()
}

fn format(of: Node<'_, '_>, element: &'static str) -> String {
    let found = children(of, element).last().and_then(|found| found.attribute("type"));
    found.unwrap_or_default().to_owned()
}

fn children<'a, 'input>(
    node: Node<'a, 'input>,
    name: &'static str,
) -> impl Iterator<Item = Node<'a, 'input>> {
    node.children().filter(move |child| child.has_tag_name(name))
}
