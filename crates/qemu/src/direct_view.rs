//! Access to a QEMU process from this process.

use std::fs::File;
use std::sync::Arc;

use crate::error::QemuError;
use crate::fault_access::{DirectFaults, FaultAccess};
use crate::identity::ProcessIdentity;
use crate::inject;
use crate::inventory::OpenImage;
use crate::memory_file::{self, Examiner};
use crate::proc_stat;
use crate::process::{self as proc, Mapping};
use crate::sample::{self, BlockReader};
use crate::view::{Looker, View};

/// Accesses `/proc` from this process.
pub struct DirectView;

impl View for DirectView {
    fn shared_mappings(&mut self, pid: u32) -> Result<Vec<Mapping>, QemuError> {
        let all = proc::mappings(pid)?;
        Ok(all.into_iter().filter(|mapping| mapping.shared && mapping.file.1 != 0).collect())
    }

    fn pagemap(&mut self, pid: u32) -> Result<File, QemuError> {
        proc::pagemap(pid)
    }

    fn open_file(&mut self, pid: u32, mapping: &Mapping) -> Result<File, QemuError> {
        memory_file::open(pid, mapping)
    }

    fn open_images(&mut self, pid: u32) -> Result<Vec<OpenImage>, QemuError> {
        let action = "list the open files";
        OpenImage::of(pid).map_err(|source| QemuError::Process { action, pid, source })
    }

    fn identify(&mut self, pid: u32) -> Result<ProcessIdentity, QemuError> {
        ProcessIdentity::of(pid)
    }

    fn gives_descriptors(&mut self, pid: u32) -> bool {
        inject::fetch(pid, 0).is_ok()
    }

    fn looker(&self) -> Looker {
        Arc::new(proc_stat::is_stopped)
    }

    fn examiner(&self) -> Examiner {
        Arc::new(|pid, mapping| memory_file::examine(pid, mapping, &[std::process::id()]))
    }

    fn block_reader(&self) -> BlockReader {
        Arc::new(sample::read)
    }

    fn fault_access(&self) -> Arc<dyn FaultAccess> {
        Arc::new(DirectFaults::default())
    }
}
