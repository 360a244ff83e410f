//! Access to a QEMU process through `/proc`.

use std::fs::File;
use std::sync::Arc;

use crate::error::QemuError;
use crate::fault_access::FaultAccess;
use crate::identity::ProcessIdentity;
use crate::inventory::OpenImage;
use crate::memory_file::sharing::Examiner;
use crate::process::Mapping;
use crate::qmp::Qmp;
use crate::sample::BlockReader;

/// Access to a QEMU process through `/proc`.
pub trait View {
    /// The process of a QEMU, if it is visible.
    fn process(&self, qmp: &Qmp) -> Option<u32> {
        qmp.pid()
    }

    /// Its mappings of shared files.
    ///
    /// # Errors
    /// If the mappings can't be read.
    fn shared_mappings(&mut self, pid: u32) -> Result<Vec<Mapping>, QemuError>;

    /// Its page table, for `PAGEMAP_SCAN`.
    ///
    /// # Errors
    /// If the page table can't be opened.
    fn pagemap(&mut self, pid: u32) -> Result<File, QemuError>;

    /// The file behind one of its mappings, for reading and writing.
    ///
    /// # Errors
    /// If the file can't be opened for both.
    fn open_file(&mut self, pid: u32, mapping: &Mapping) -> Result<File, QemuError>;

    /// The images and other files that it has open.
    ///
    /// # Errors
    /// If they can't be listed.
    fn open_images(&mut self, pid: u32) -> Result<Vec<OpenImage>, QemuError>;

    /// Identifies the process.
    ///
    /// # Errors
    /// If there is no such process.
    fn identify(&mut self, pid: u32) -> Result<ProcessIdentity, QemuError>;

    /// Whether a later process with the same rights can take descriptors from the process.
    fn gives_descriptors(&mut self, pid: u32) -> bool;

    /// Returns a function by which any thread can check whether a process is stopped.
    fn looker(&self) -> Looker;

    /// Returns a function by which any thread can check which processes share a memory file.
    fn examiner(&self) -> Examiner;

    /// Returns a function by which any thread can read blocks of the images of a process.
    fn block_reader(&self) -> BlockReader;

    /// Returns the access to the missing pages of the process.
    fn fault_access(&self) -> Arc<dyn FaultAccess>;

    /// Whether the process is stopped.
    fn is_stopped(&self, pid: u32) -> bool {
        self.looker()(pid)
    }
}

/// Checks whether a process is stopped, as after `SIGSTOP`. A process that is not visible counts as
/// running.
pub type Looker = Arc<dyn Fn(u32) -> bool + Send + Sync>;
