//! Migrations with a hook, at the source and at the destination.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use serde_json::json;
use vmferry::destination::FetchHandle;
use vmferry::source::{Orders, Report};
use vmferry::vmm::storage::DestinationStorage;
use vmferry::vmm::streamed::{LateEnd, LateStreams};
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};
use vmferry_control::Directories;
use vmferry_faults::FaultRanges;
use vmferry_memory::{GuestMemory, PAGE_SIZE};
use vmferry_qemu::ProcessIdentity;
use vmferry_wire::{GuestIdentity, SessionId};

use super::fetching::{Guest, ReceivingQemu, Shown};
use super::hook::{Call, Hook, HookError, HookRunner, Outcome, Phase, Side};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// The source's side: holds a migration before its switchover until the hook has run and, with
/// `--pause-before-switchover`, until the user releases it.
pub struct Gate {
    hook: Hook,
    call: Call,
    orders: Orders,
    output: Output,
    /// Runs `before`.
    runner: HookRunner,
    /// The thread that waits for `before`.
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Whether the migration is over, so that the result of `before` no longer matters.
    is_over: AtomicBool,
    hook_succeeded: AtomicBool,
    user_released: AtomicBool,
    started: AtomicBool,
    failure: Mutex<Option<HookError>>,
}

impl Gate {
    /// The gate of the migration that `orders` controls.
    pub fn new(
        hook: Hook,
        call: Call,
        orders: Orders,
        release: SwitchoverRelease,
        output: &Output,
    ) -> Result<Arc<Self>, Failure> {
        Ok(Arc::new(Self {
            runner: HookRunner::spawn(&hook)?,
            hook,
            call,
            orders,
            output: output.clone(),
            thread: Mutex::new(None),
            is_over: AtomicBool::new(false),
            hook_succeeded: AtomicBool::new(false),
            user_released: AtomicBool::new(release == SwitchoverRelease::Hook),
            started: AtomicBool::new(false),
            failure: Mutex::new(None),
        }))
    }

    /// The process that runs `before`.
    pub fn runner(&self) -> ProcessIdentity {
        self.runner.process().clone()
    }

    /// The user releases the migration.
    pub fn switch_over(&self) {
        self.user_released.store(true, Ordering::SeqCst);
        self.open();
    }

    /// Runs the hook in a separate thread when the migration is held for the first time.
    pub fn watch(self: &Arc<Self>, report: &Report) {
        if matches!(report, Report::Held { .. }) && !self.started.swap(true, Ordering::SeqCst) {
            let gate = Arc::clone(self);
            let spawned =
                std::thread::Builder::new().name("hook".into()).spawn(move || gate.run_before());
            match spawned {
                Ok(thread) => *self.thread.lock() = Some(thread),
                Err(source) => {
                    self.fail(HookError::Runner(format!("no thread for the hook: {source}")));
                }
            }
        }
    }

    /// Runs the hook in this thread, for a migration that can't be held.
    pub fn run_at_once(&self) {
        self.started.store(true, Ordering::SeqCst);
        self.run_before();
    }

    fn run_before(&self) {
        self.output.event(&json!({ "event": "hook", "phase": "before" }), || {
            "running the hook before the switchover".to_owned()
        });
        match self.runner.run(&self.call) {
            Ok(()) => {
                self.hook_succeeded.store(true, Ordering::SeqCst);
                self.open();
            }
            // The hook was killed because the migration ended, which is reported elsewhere.
            Err(_) if self.is_over.load(Ordering::SeqCst) => {}
            Err(error) => self.fail(error),
        }
    }

    fn fail(&self, error: HookError) {
        *self.failure.lock() = Some(error);
        self.orders.cancel();
    }

    fn open(&self) {
        if self.hook_succeeded.load(Ordering::SeqCst) && self.user_released.load(Ordering::SeqCst) {
            self.orders.switch_over();
        }
    }

    /// Kills a running `before`, because the migration is cancelled.
    pub fn stop(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.runner.stop();
    }

    /// Waits for `before` to end after the migration is over.
    pub fn end(&self) {
        self.stop();
        if let Some(thread) = self.thread.lock().take() {
            // A thread that panicked has ended, too.
            let _ = thread.join();
        }
        self.runner.wait();
    }

    /// Runs `after` if `before` was started. Call [`end`](Self::end) first.
    pub fn run_after(&self, result: Outcome) {
        if self.started.load(Ordering::SeqCst) {
            self.hook.run_after(&self.call.after(result), &self.output);
        }
    }

    /// The failure of the hook, if that cancelled the migration.
    pub fn failure(&self) -> Option<Failure> {
        let error = self.failure.lock().take()?;
        Some(Failure::of(Code::Cancelled, error))
    }
}

/// Who releases a held migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchoverRelease {
    /// The hook, when it succeeds.
    Hook,
    /// The hook and the user, with `vmferry switch-over`.
    HookAndUser,
}

/// The destination's side: a QEMU with a hook, which runs before a guest is accepted and after the
/// outcome. While the guest lacks pages, it has a control socket.
pub struct Hooked<V> {
    /// The VM.
    pub vm: V,
    runner: Option<Arc<HookRunner>>,
    /// The `before` call whose `after` is due.
    pending: Option<Call>,
    session: Option<String>,
    /// The guest that was announced, and the size of its memory.
    guest: Option<(GuestIdentity, u64)>,
    /// It was paused at the source, and stays paused.
    is_paused: bool,
    /// Where its control socket is.
    places: Option<Directories>,
    shown: Option<Shown>,
    output: Output,
}

impl<V> Hooked<V> {
    /// Wraps a VM. Without a runner, no hook runs.
    pub fn new(vm: V, runner: Option<Arc<HookRunner>>, output: &Output) -> Self {
        let (pending, session, guest) = (None, None, None);
        let (is_paused, places, shown) = (false, None, None);
        let output = output.clone();
        Self { vm, runner, pending, session, guest, is_paused, places, shown, output }
    }

    /// The guest has a control socket while it lacks pages.
    pub fn shown_in(self, places: Directories) -> Self {
        Self { places: Some(places), ..self }
    }

    fn before(&mut self, guest: &GuestIdentity) -> Result<(), HookError> {
        let Some(runner) = &self.runner else { return Ok(()) };
        let call = Call {
            phase: Phase::Before,
            side: Side::Destination,
            guest: guest.clone(),
            session: self.session.clone(),
            peer: None,
            result: None,
        };
        self.pending = Some(call.clone());
        let done = runner.run(&call);
        if done.is_err() {
            self.after(Outcome::Kept);
        }
        done
    }

    /// Runs `after` if `before` was run.
    pub fn after(&mut self, result: Outcome) {
        if let (Some(runner), Some(call)) = (&self.runner, self.pending.take()) {
            runner.run_after(&call.after(result), &self.output);
        }
    }
}

impl<V: DestinationVm + ReceivingQemu> DestinationVm for Hooked<V> {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        let pages: u64 = guest.layout.iter().map(|slot| slot.pages).sum();
        self.guest = Some((guest.identity.clone(), pages * PAGE_SIZE as u64));
        self.is_paused = false;
        self.before(&guest.identity).map_err(|error| PrepareError::Vm(error.into()))?;
        let prepared = self.vm.prepare(guest);
        if prepared.is_err() {
            self.after(Outcome::Kept);
        }
        prepared
    }

    fn would_take(&mut self, guest: &GuestDescription) -> Option<Result<(), PrepareError>> {
        self.vm.would_take(guest)
    }

    fn opened(&mut self, session: SessionId, journals: &Path) -> Result<(), VmError> {
        self.session = Some(session.to_string());
        if let Some(call) = &mut self.pending {
            call.session.clone_from(&self.session);
        }
        self.vm.opened(session, journals)?;
        if let Some(runner) = &self.runner {
            runner.opened();
        }
        Ok(())
    }

    fn takes_post_copy(&self) -> Result<(), VmError> {
        self.vm.takes_post_copy()
    }

    fn fetch_begins(&mut self, fetch: FetchHandle) {
        if let (Some(places), Some((identity, memory_bytes))) = (&self.places, self.guest.clone()) {
            let guest = Guest {
                identity,
                pid: self.vm.process(),
                qmp: self.vm.monitor().to_owned(),
                release: self.vm.release(),
                memory_bytes,
                is_paused: self.is_paused,
            };
            self.shown = guest.show(places, fetch.clone(), &self.output);
        }
        self.vm.fetch_begins(fetch);
    }

    fn ended_in_order(&mut self) -> bool {
        self.vm.ended_in_order()
    }

    fn fetch_ends(&mut self) {
        self.shown = None;
        self.vm.fetch_ends();
    }

    fn register_faults(&mut self, memory: &GuestMemory) -> Result<FaultRanges, VmError> {
        self.vm.register_faults(memory)
    }

    fn late_streams(&mut self) -> Result<LateStreams, VmError> {
        self.vm.late_streams()
    }

    fn storage(&mut self) -> Option<&mut dyn DestinationStorage> {
        self.vm.storage()
    }

    fn reconnect(&mut self) -> Result<LateStreams, VmError> {
        self.vm.reconnect()
    }

    fn late_end(&mut self) -> Result<LateEnd, VmError> {
        self.vm.late_end()
    }

    fn stay_paused(&mut self) -> Result<(), VmError> {
        self.is_paused = true;
        self.vm.stay_paused()
    }

    fn load(&mut self, state: &[u8]) -> Result<(), VmError> {
        self.vm.load(state)
    }

    fn release(&self) -> String {
        self.vm.release()
    }

    fn discard(&mut self) {
        self.vm.discard();
        self.after(Outcome::Kept);
    }

    fn is_spent(&self) -> bool {
        self.vm.is_spent()
    }

    fn run(&mut self) -> Result<(), VmError> {
        self.vm.run()
    }
}

#[cfg(test)]
mod tests;
