//! A guest at the source, parts of which a test replaces.

use std::sync::Arc;
use std::time::Duration;

use vmferry::vmm::free_pages::FreePages;
use vmferry::vmm::storage::SourceStorage;
use vmferry::{GuestDescription, HarvestGuard, Resume, SourceVm, StateEstimate, VmError};
use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestBytes, GuestMemory};

/// A source's guest with another dirty log or another device state.
pub struct SourceDouble<V> {
    /// The guest that does everything else.
    pub vm: V,
    log: Option<Arc<dyn DirtyLog>>,
    state: Option<fn() -> GuestBytes>,
}

impl<V: SourceVm> SourceDouble<V> {
    /// Logs its writes with `log`.
    pub fn with_log(vm: V, log: Arc<dyn DirtyLog>) -> Self {
        Self { vm, log: Some(log), state: None }
    }

    /// Its device state is what `state` returns.
    pub fn with_state(vm: V, state: fn() -> GuestBytes) -> Self {
        Self { vm, log: None, state: Some(state) }
    }
}

impl<V: SourceVm> Resume for SourceDouble<V> {
    fn resume(&mut self) -> Result<(), VmError> {
        self.vm.resume()
    }
}

impl<V: SourceVm> SourceVm for SourceDouble<V> {
    fn describe(&self) -> GuestDescription {
        self.vm.describe()
    }

    fn memory(&self) -> GuestMemory {
        self.vm.memory()
    }

    fn dirty_log(&self) -> Arc<dyn DirtyLog> {
        self.log.clone().unwrap_or_else(|| self.vm.dirty_log())
    }

    fn pause(&mut self) -> Result<Duration, VmError> {
        self.vm.pause()
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        self.state.map_or_else(|| self.vm.save(), |state| Ok(state()))
    }

    fn save_for(&mut self, protocol: u16) -> Result<GuestBytes, VmError> {
        self.state.map_or_else(|| self.vm.save_for(protocol), |state| Ok(state()))
    }

    fn release(&self) -> String {
        self.vm.release()
    }

    fn state_estimate(&self) -> StateEstimate {
        self.vm.state_estimate()
    }

    fn begin_harvest(&mut self) -> Result<Box<dyn HarvestGuard + '_>, VmError> {
        self.vm.begin_harvest()
    }

    fn throttle(&mut self, percent: u8) -> Result<(), VmError> {
        self.vm.throttle(percent)
    }

    fn used_bytes(&self) -> Vec<Option<u64>> {
        self.vm.used_bytes()
    }

    fn free_pages(&self) -> Vec<Arc<dyn FreePages>> {
        self.vm.free_pages()
    }

    fn storage(&mut self) -> Option<&mut dyn SourceStorage> {
        self.vm.storage()
    }
}
