//! Which processes use a memory file.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::QemuError;
use crate::process::Mapping;

/// Which processes use a file of QEMU's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// This QEMU only.
    Alone,
    /// Another process has it mapped.
    Mapped(Mapper),
    /// No other process was seen, but not all could be examined; with the reason.
    Unknown(String),
}

/// A process that has a file mapped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapper {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
}

/// Examines a mapping of QEMU, from any thread and at any time: `examine`, with the rights that it
/// needs.
pub type Examiner = Arc<dyn Fn(u32, &Mapping) -> Result<Sharing, QemuError> + Send + Sync>;
