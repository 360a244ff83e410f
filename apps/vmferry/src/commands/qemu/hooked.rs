//! Migrations with a hook, on either side.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use serde_json::json;
use vmferry::source::{Orders, Report};
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};
use vmferry_qemu::ProcessIdentity;
use vmferry_wire::{GuestIdentity, SessionId};

use super::hook::{Call, Hook, HookError, HookRunner, Outcome, Phase, Side};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// The source's side: a migration is held before its switchover until the hook has run, and the
/// user has said so if that was asked for.
pub struct Gate {
    hook: Hook,
    call: Call,
    orders: Orders,
    output: Output,
    /// Runs `before`.
    runner: HookRunner,
    /// Waits for it.
    thread: Mutex<Option<JoinHandle<()>>>,
    /// `before` counts for nothing any more.
    is_over: AtomicBool,
    hook_is_done: AtomicBool,
    user_is_done: AtomicBool,
    begun: AtomicBool,
    failure: Mutex<Option<HookError>>,
}

impl Gate {
    /// For a migration with these orders. `asked`: whether the user is waited for too.
    pub fn new(
        hook: Hook,
        call: Call,
        orders: Orders,
        asked: bool,
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
            hook_is_done: AtomicBool::new(false),
            user_is_done: AtomicBool::new(!asked),
            begun: AtomicBool::new(false),
            failure: Mutex::new(None),
        }))
    }

    /// The process that runs `before`.
    pub fn runner(&self) -> ProcessIdentity {
        self.runner.process().clone()
    }

    /// The user's word.
    pub fn switch_over(&self) {
        self.user_is_done.store(true, Ordering::SeqCst);
        self.open();
    }

    /// Runs the hook, beside the migration, when that is held for the first time.
    pub fn watch(self: &Arc<Self>, report: &Report) {
        if matches!(report, Report::Held { .. }) && !self.begun.swap(true, Ordering::SeqCst) {
            let gate = Arc::clone(self);
            let begun =
                std::thread::Builder::new().name("hook".into()).spawn(move || gate.run_before());
            match begun {
                Ok(thread) => *locked(&self.thread) = Some(thread),
                Err(source) => {
                    self.fail(HookError::There(format!("no thread for the hook: {source}")));
                }
            }
        }
    }

    /// Runs the hook now, for a migration that can't be held.
    pub fn run_at_once(&self) {
        self.begun.store(true, Ordering::SeqCst);
        self.run_before();
    }

    fn run_before(&self) {
        self.output.event(&json!({ "event": "hook", "phase": "before" }), || {
            "running the hook before the switchover".to_owned()
        });
        match self.runner.run(&self.call) {
            Ok(()) => {
                self.hook_is_done.store(true, Ordering::SeqCst);
                self.open();
            }
            // What ended it is the reason, which others tell.
            Err(_) if self.is_over.load(Ordering::SeqCst) => {}
            Err(error) => self.fail(error),
        }
    }

    fn fail(&self, error: HookError) {
        *locked(&self.failure) = Some(error);
        self.orders.cancel();
    }

    fn open(&self) {
        if self.hook_is_done.load(Ordering::SeqCst) && self.user_is_done.load(Ordering::SeqCst) {
            self.orders.switch_over();
        }
    }

    /// Ends a `before` that runs: the migration is cancelled.
    pub fn stop(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.runner.stop();
    }

    /// The migration is over. On return `before` has ended.
    pub fn end(&self) {
        self.stop();
        if let Some(thread) = locked(&self.thread).take() {
            // One that has panicked has ended.
            let _ = thread.join();
        }
        self.runner.wait();
    }

    /// Tells the hook where the guest is, if it was told of its going. `before` has
    /// [ended](Self::end).
    pub fn run_after(&self, result: Outcome) {
        if self.begun.load(Ordering::SeqCst) {
            self.hook.run_after(&self.call.after(result), &self.output);
        }
    }

    /// Why the migration was ended, if the hook has ended it.
    pub fn failure(&self) -> Option<Failure> {
        let error = locked(&self.failure).take()?;
        Some(Failure::of(Code::Cancelled, error))
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The destination's side: a VM whose guests are announced to a hook.
pub struct Hooked<V> {
    /// The VM.
    pub vm: V,
    runner: Option<Arc<HookRunner>>,
    /// What the hook was told of.
    told: Option<Call>,
    session: Option<String>,
    output: Output,
}

impl<V> Hooked<V> {
    /// With a hook, or without.
    pub fn new(vm: V, runner: Option<Arc<HookRunner>>, output: &Output) -> Self {
        Self { vm, runner, told: None, session: None, output: output.clone() }
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
        self.told = Some(call.clone());
        let done = runner.run(&call);
        if done.is_err() {
            self.after(Outcome::Kept);
        }
        done
    }

    /// Tells the hook where the guest is, if it was told of its coming.
    pub fn after(&mut self, result: Outcome) {
        if let (Some(runner), Some(call)) = (&self.runner, self.told.take()) {
            runner.run_after(&call.after(result), &self.output);
        }
    }
}

impl<V: DestinationVm> DestinationVm for Hooked<V> {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        self.before(&guest.identity).map_err(|error| PrepareError::Vm(error.into()))?;
        let prepared = self.vm.prepare(guest);
        if prepared.is_err() {
            self.after(Outcome::Kept);
        }
        prepared
    }

    fn opened(&mut self, session: SessionId, journals: &Path) -> Result<(), VmError> {
        self.session = Some(session.to_string());
        if let Some(call) = &mut self.told {
            call.session.clone_from(&self.session);
        }
        self.vm.opened(session, journals)?;
        if let Some(runner) = &self.runner {
            runner.opened();
        }
        Ok(())
    }

    fn stay_paused(&mut self) -> Result<(), VmError> {
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
