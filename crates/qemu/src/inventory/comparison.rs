//! What two inventories must have in common, row by row. docs/qemu.md has the same table.

#[cfg(test)]
mod tests;

use super::storage::{Sameness, Storage};
use super::{Disk, Inventory, Medium};

/// A row of the table.
pub struct Row {
    /// What is compared.
    pub subject: &'static str,
    /// What happens if it differs.
    pub rule: Rule,
    /// Describes the first difference, in words.
    find: fn(&Pair<'_>) -> Option<String>,
}

/// What happens if a subject differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The destination refuses the guest.
    Refused,
    /// The destination refuses the guest, unless the operator says that its disks differ.
    RefusedUnlessDisksDiffer,
}

/// What the operator allows to differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// The disks' contents: they are copies, or the operator knows better.
    pub disks_differ: bool,
}

/// The table.
pub const ROWS: [Row; 8] = [
    Row { subject: "topology", rule: Rule::Refused, find: topology },
    Row { subject: "RAM blocks", rule: Rule::Refused, find: blocks },
    Row { subject: "devices on other buses than PCI", rule: Rule::Refused, find: devices },
    Row { subject: "disks", rule: Rule::Refused, find: disks },
    Row { subject: "media", rule: Rule::Refused, find: media },
    Row { subject: "formats", rule: Rule::Refused, find: formats },
    Row { subject: "storage", rule: Rule::RefusedUnlessDisksDiffer, find: storage },
    Row { subject: "sizes", rule: Rule::Refused, find: sizes },
];

/// Two machines to be compared.
struct Pair<'a> {
    theirs: &'a Inventory,
    ours: &'a Inventory,
}

impl Inventory {
    /// Describes the differences between the source's inventory and this one, in words.
    #[must_use]
    pub fn differences(&self, theirs: &Self, allowed: Allowed) -> Vec<String> {
        let pair = Pair { theirs, ours: self };
        let counts = |row: &&Row| row.rule == Rule::Refused || !allowed.disks_differ;
        ROWS.iter().filter(counts).filter_map(|row| (row.find)(&pair)).collect()
    }
}

impl Inventory {
    /// The disks of which nothing that both hosts know tells whether they are the same.
    #[must_use]
    pub fn unknown_disks(&self, theirs: &Self) -> Vec<Disk> {
        let pair = Pair { theirs, ours: self };
        let is_unknown = |theirs: &Disk, ours: &Disk| {
            let [theirs, ours] =
                [theirs, ours].map(|disk| disk.medium.as_ref().map(|medium| &medium.storage));
            let both = theirs.zip(ours);
            both.is_some_and(|(theirs, ours)| {
                Storage::compare(theirs.as_ref(), ours.as_ref()) == Sameness::Unknown
            })
        };
        let disks = pair.disks().filter(|(theirs, ours)| is_unknown(theirs, ours));
        disks.map(|(_, ours)| ours.clone()).collect()
    }
}

impl<'a> Pair<'a> {
    /// The disks of the same devices.
    fn disks(&self) -> impl Iterator<Item = (&'a Disk, &'a Disk)> {
        let Self { theirs, ours } = *self;
        theirs
            .disks
            .iter()
            .filter_map(|disk| Some((disk, same_device(&disk.device, &disk.name, &ours.disks)?)))
    }

    /// Their media.
    fn media(&self) -> impl Iterator<Item = (&'a str, &'a Medium, &'a Medium)> {
        self.disks().filter_map(|(theirs, ours)| {
            Some((&*theirs.device, theirs.medium.as_ref()?, ours.medium.as_ref()?))
        })
    }
}

/// The disk of this device, or of this drive if the devices have no IDs.
pub fn same_device<'a>(device: &str, name: &str, among: &'a [Disk]) -> Option<&'a Disk> {
    let of_the_drive = |other: &&Disk| !name.is_empty() && other.name == name;
    let found = among.iter().find(|other| other.device == device);
    found.or_else(|| among.iter().find(of_the_drive))
}

fn topology(pair: &Pair<'_>) -> Option<String> {
    let Pair { theirs, ours } = pair;
    // Each version of QEMU has its own levels. One that the other lacks counts 1 there.
    let mut names = theirs.topology.keys().filter(|name| ours.topology.contains_key(*name));
    let name = names.find(|name| theirs.topology[*name] != ours.topology[*name])?;
    Some(format!(
        "`-smp`: the source has {name}={} and the destination {name}={}: use the same `-smp`, \
         or the guest's processors change their places",
        theirs.topology[name], ours.topology[name]
    ))
}

fn blocks(pair: &Pair<'_>) -> Option<String> {
    let Pair { theirs, ours } = pair;
    let size = |bytes: Option<&u64>| match bytes {
        None => "nothing".to_owned(),
        Some(bytes) if bytes % (1 << 20) == 0 => format!("{} MiB", bytes >> 20),
        Some(bytes) => format!("{} KiB", bytes >> 10),
    };
    let names = theirs.blocks.keys().chain(ours.blocks.keys());
    let name = names.into_iter().find(|name| theirs.blocks.get(*name) != ours.blocks.get(*name))?;
    let (there, here) = (size(theirs.blocks.get(name)), size(ours.blocks.get(name)));
    Some(format!(
        "the source has {there} of memory in `{name}` and the destination {here}: use the same \
         device with the same options"
    ))
}

fn devices(pair: &Pair<'_>) -> Option<String> {
    let Pair { theirs, ours } = pair;
    let count = |of: &Inventory, kind: &String| of.devices.get(kind).copied().unwrap_or(0);
    let mut added = theirs.added.union(&ours.added);
    let kind = added.find(|kind| count(theirs, kind) != count(ours, kind))?;
    Some(format!(
        "device `{kind}`: the source has {} and the destination {}: use the same devices",
        count(theirs, kind),
        count(ours, kind)
    ))
}

fn disks(pair: &Pair<'_>) -> Option<String> {
    let Pair { theirs, ours } = pair;
    let lacks = |these: &Inventory, those: &Inventory| {
        let found = these
            .disks
            .iter()
            .find(|disk| same_device(&disk.device, &disk.name, &those.disks).is_none());
        found.map(|disk| disk.device.clone())
    };
    if let Some(device) = lacks(theirs, ours) {
        return Some(format!(
            "the destination lacks the source's disk device `{device}`: use the same devices \
             with the same IDs"
        ));
    }
    lacks(ours, theirs).map(|device| {
        format!(
            "the source lacks the destination's disk device `{device}`: use the same devices \
             with the same IDs"
        )
    })
}

/// A medium that was ejected at the source is ejected at the destination, too.
fn media(pair: &Pair<'_>) -> Option<String> {
    pair.disks().find_map(|(theirs, ours)| match (&theirs.medium, &ours.medium) {
        (Some(medium), None) => Some(format!(
            "the drive `{}` is empty at the destination, and the source has {} in it: insert the \
             same medium",
            theirs.device, medium.images
        )),
        (None, Some(medium)) if !ours.removable => Some(format!(
            "the source has no medium in `{}`, and the destination has {}, which can't be ejected",
            theirs.device, medium.images
        )),
        _ => None,
    })
}

fn formats(pair: &Pair<'_>) -> Option<String> {
    let access = |medium: &Medium| if medium.read_only { "read-only" } else { "writable" };
    pair.media().find_map(|(device, theirs, ours)| {
        if theirs.format != ours.format {
            return Some(format!(
                "the source reads the disk `{device}` as `{}` and the destination as `{}`: use \
                 the same format",
                theirs.format, ours.format
            ));
        }
        (theirs.read_only != ours.read_only).then(|| {
            format!(
                "the disk `{device}` is {} at the source and {} at the destination: use the same \
                 options",
                access(theirs),
                access(ours)
            )
        })
    })
}

fn storage(pair: &Pair<'_>) -> Option<String> {
    let different = |theirs: &Medium, ours: &Medium| {
        Storage::compare(theirs.storage.as_ref(), ours.storage.as_ref()) == Sameness::Different
    };
    let mut media = pair.media();
    let (device, theirs, ours) = media.find(|(_, theirs, ours)| different(theirs, ours))?;
    Some(format!(
        "the disk `{device}` is {} at the source and {} at the destination, which is another one: \
         the guest would go on with that one's data. Give the destination the same image; if this \
         one has the same data, send the guest with the permission that its disks differ",
        theirs.file, ours.file
    ))
}

/// The destination may have opened an image before it was resized. It is the same image then, and
/// QEMU looks at its size again when it gets the guest.
fn sizes(pair: &Pair<'_>) -> Option<String> {
    let same = |theirs: &Medium, ours: &Medium| {
        Storage::compare(theirs.storage.as_ref(), ours.storage.as_ref()) == Sameness::Same
    };
    let mut media = pair.media();
    let (device, theirs, ours) =
        media.find(|(_, theirs, ours)| theirs.bytes != ours.bytes && !same(theirs, ours))?;
    Some(format!(
        "the disk `{device}` has {} bytes at the source and {} at the destination: use the same \
         image, and if it was resized since the destination was started, start that one again",
        theirs.bytes, ours.bytes
    ))
}
