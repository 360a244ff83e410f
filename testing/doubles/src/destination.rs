//! A guest at the destination, with calls of a test before those of the VMM.

use std::path::Path;

use vmferry::vmm::storage::DestinationStorage;
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};
use vmferry_wire::SessionId;

type BeforeLoad<D> = Box<dyn FnMut(&mut D, &[u8]) -> Result<(), VmError> + Send>;
type BeforeRun<D> = Box<dyn FnMut(&mut D) -> Result<(), VmError> + Send>;

/// A destination's VMM that calls a test's functions before it loads the state and before it runs
/// the guest. An error of one is the VMM's error.
pub struct DestinationDouble<D> {
    /// The VMM that does everything.
    pub vm: D,
    before_load: BeforeLoad<D>,
    before_run: BeforeRun<D>,
}

impl<D: DestinationVm> DestinationDouble<D> {
    /// Calls `hook` with the state before it is loaded.
    pub fn before_load(
        vm: D,
        hook: impl FnMut(&mut D, &[u8]) -> Result<(), VmError> + Send + 'static,
    ) -> Self {
        Self { vm, before_load: Box::new(hook), before_run: Box::new(|_| Ok(())) }
    }

    /// Calls `hook` before the guest runs.
    pub fn before_run(
        vm: D,
        hook: impl FnMut(&mut D) -> Result<(), VmError> + Send + 'static,
    ) -> Self {
        Self { vm, before_load: Box::new(|_, _| Ok(())), before_run: Box::new(hook) }
    }
}

impl<D: DestinationVm> DestinationVm for DestinationDouble<D> {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        self.vm.prepare(guest)
    }

    fn would_take(&mut self, guest: &GuestDescription) -> Option<Result<(), PrepareError>> {
        self.vm.would_take(guest)
    }

    fn opened(&mut self, session: SessionId, journals: &Path) -> Result<(), VmError> {
        self.vm.opened(session, journals)
    }

    fn stay_paused(&mut self) -> Result<(), VmError> {
        self.vm.stay_paused()
    }

    fn load(&mut self, state: &[u8]) -> Result<(), VmError> {
        (self.before_load)(&mut self.vm, state)?;
        self.vm.load(state)
    }

    fn release(&self) -> String {
        self.vm.release()
    }

    fn storage(&mut self) -> Option<&mut dyn DestinationStorage> {
        self.vm.storage()
    }

    fn discard(&mut self) {
        self.vm.discard();
    }

    fn is_spent(&self) -> bool {
        self.vm.is_spent()
    }

    fn run(&mut self) -> Result<(), VmError> {
        (self.before_run)(&mut self.vm)?;
        self.vm.run()
    }
}
