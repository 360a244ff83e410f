//! QEMU's memory backends, and what they are used for.

use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// What a memory block is to the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Use {
    /// RAM.
    Ram,
    /// The storage of a device: an `nvdimm`, for instance.
    Storage(String),
    /// The memory of a device that exists to be shared with others, such as `ivshmem`.
    Shared,
}

impl Use {
    /// Why vmferry neither moves nor empties it; `None` for RAM.
    pub fn why_not(&self) -> Option<String> {
        let device = match self {
            Self::Ram => return None,
            Self::Storage(device) => device.as_str(),
            Self::Shared => "a device",
        };
        Some(format!(
            "belongs to {device}, whose file is data and not RAM: vmferry does not empty it, and \
             leaves it to QEMU's own migration"
        ))
    }
}

/// A memory backend object.
#[derive(Clone, Debug, Default)]
struct Backend {
    id: String,
    /// Such as `memory-backend-file`.
    kind: String,
}

/// All memory backends, and the memory devices that use them.
#[derive(Clone, Debug, Default)]
pub struct Backends {
    all: Vec<Backend>,
    /// Backend ids, and the types of the memory devices that use them.
    devices: Vec<(String, String)>,
}

/// The type of a backend that is a named file.
const FILE: &str = "memory-backend-file";

/// Memory devices whose memory is RAM.
const RAM_DEVICES: [&str; 2] = ["dimm", "virtio-mem"];

impl Backends {
    /// Reads them from QEMU.
    ///
    /// # Errors
    /// QMP errors.
    pub fn read(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let objects = qmp.execute("qom-list", json!({ "path": "/objects" }))?;
        let all = objects.as_array().into_iter().flatten().filter_map(|object| {
            let kind = object["type"].as_str()?.strip_prefix("child<")?.strip_suffix('>')?;
            let id = object["name"].as_str()?;
            let is_memory = kind.starts_with("memory-backend-");
            is_memory.then(|| Backend { id: id.to_owned(), kind: kind.to_owned() })
        });
        let devices = match qmp.execute("query-memory-devices", json!({})) {
            Ok(devices) => devices,
            // A machine that supports none.
            Err(QmpError::Refused { .. }) => Value::Null,
            Err(error) => return Err(error),
        };
        let devices = devices.as_array().into_iter().flatten().filter_map(|device| {
            let id = device["data"]["memdev"].as_str()?.rsplit('/').next()?;
            Some((id.to_owned(), device["type"].as_str().unwrap_or_default().to_owned()))
        });
        Ok(Self { all: all.collect(), devices: devices.collect() })
    }

    /// Whether any backend is a named file that is mapped shared, so that its pages stay when QEMU
    /// ends.
    ///
    /// # Errors
    /// QMP errors.
    pub fn have_shared_files(&self, qmp: &mut Qmp) -> Result<bool, QmpError> {
        for backend in self.all.iter().filter(|backend| backend.kind == FILE) {
            let path = format!("/objects/{}", backend.id);
            if qmp.execute("qom-get", json!({ "path": path, "property": "share" }))? == true {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a block is a named file to QEMU, so that its migration can leave the block out.
    /// Memory for which QEMU creates the file itself (`memory-backend-shm`, a memfd) is not.
    pub fn is_named_file(&self, block: &str) -> bool {
        self.find(block).is_some_and(|backend| backend.kind == FILE)
    }

    /// The type of a block's backend, for messages.
    pub fn kind(&self, block: &str) -> Option<&str> {
        self.find(block).map(|backend| backend.kind.as_str())
    }

    /// What a block is to the guest. The name of a device's memory includes the device's address.
    pub fn use_of(&self, block: &str) -> Use {
        let id = id_of(block);
        let device = self.devices.iter().find(|(memdev, _)| memdev == id);
        match device {
            Some((_, kind)) if RAM_DEVICES.contains(&kind.as_str()) => Use::Ram,
            Some((_, kind)) => Use::Storage(format!("a device `{kind}`")),
            None if self.find(block).is_none() => Use::Storage("no memory backend".to_owned()),
            None if block == id || block.starts_with("/objects/") => Use::Ram,
            None => Use::Shared,
        }
    }

    fn find(&self, block: &str) -> Option<&Backend> {
        self.all.iter().find(|backend| backend.id == id_of(block))
    }
}

/// The backend's id. A block is named by the id, by its path, or by a device's address and the id.
fn id_of(block: &str) -> &str {
    block.rsplit('/').next().unwrap_or(block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_is_ram_only_if_no_device_keeps_data_in_it() {
        let backend = |id: &str, kind: &str| Backend {
            id: id.into(),
            kind: format!("memory-backend-{kind}"),
        };
        let backends = Backends {
            all: vec![
                backend("ram", "file"),
                backend("anon", "shm"),
                backend("dd", "file"),
                backend("nv0", "file"),
                backend("sh", "file"),
                backend("vm", "memfd"),
            ],
            devices: [("dd", "dimm"), ("nv0", "nvdimm"), ("vm", "virtio-mem")]
                .map(|(id, kind)| (id.to_owned(), kind.to_owned()))
                .to_vec(),
        };
        for block in ["ram", "/objects/ram", "dd", "0000:00:02.0/vm"] {
            assert_eq!(backends.use_of(block), Use::Ram, "{block}");
        }
        assert_eq!(backends.use_of("0000:00:01.0/sh"), Use::Shared);
        assert_eq!(backends.use_of("nv0"), Use::Storage("a device `nvdimm`".into()));
        assert!(matches!(backends.use_of("pc.bios"), Use::Storage(_)));
        assert!(backends.is_named_file("ram") && backends.is_named_file("/objects/ram"));
        assert!(!backends.is_named_file("anon") && !backends.is_named_file("pc.bios"));
    }
}
