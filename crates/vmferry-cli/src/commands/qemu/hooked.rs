//! Migrations with a hook, on either side.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::json;
use vmferry::source::{Orders, Report};
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};
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
    hook_is_done: AtomicBool,
    user_is_done: AtomicBool,
    begun: AtomicBool,
    failure: Mutex<Option<HookError>>,
}

impl Gate {
    /// For a migration with these orders. `asked`: whether the user is waited for too.
    pub fn new(hook: Hook, call: Call, orders: Orders, asked: bool, output: &Output) -> Arc<Self> {
        Arc::new(Self {
            hook,
            call,
            orders,
            output: output.clone(),
            hook_is_done: AtomicBool::new(false),
            user_is_done: AtomicBool::new(!asked),
            begun: AtomicBool::new(false),
            failure: Mutex::new(None),
        })
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
            if let Err(source) = begun {
                self.fail(HookError::There(format!("no thread for the hook: {source}")));
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
        match self.hook.run(&self.call) {
            Ok(()) => {
                self.hook_is_done.store(true, Ordering::SeqCst);
                self.open();
            }
            Err(error) => self.fail(error),
        }
    }

    fn fail(&self, error: HookError) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.orders.cancel();
    }

    fn open(&self) {
        if self.hook_is_done.load(Ordering::SeqCst) && self.user_is_done.load(Ordering::SeqCst) {
            self.orders.switch_over();
        }
    }

    /// Tells the hook where the guest is, if it was told of its going.
    pub fn run_after(&self, result: Outcome) {
        if self.begun.load(Ordering::SeqCst) {
            let call = Call { phase: Phase::After, result: Some(result), ..self.call.clone() };
            self.hook.run_after(&call, &self.output);
        }
    }

    /// Why the migration was ended, if the hook has ended it.
    pub fn failure(&self) -> Option<Failure> {
        let error = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some(Failure::of(Code::Cancelled, error))
    }
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
            let call = Call { phase: Phase::After, result: Some(result), ..call };
            runner.run_after(&call, &self.output);
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
        self.vm.opened(session, journals)
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
