//! A receiver beside a QEMU: signals, the end of that QEMU, and the hook.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use serde_json::json;
use vmferry::destination::{Owned, Received, Stop, Witness, receive};
use vmferry::{DestinationConfig, DestinationVm, MigrateError};
use vmferry_qemu::{QemuError, wait_until_gone};
use vmferry_sandbox::{Files, Work};

use super::hook::{Call, Hook, HookRunner, Outcome};
use super::hooked::Hooked;
use crate::args::ReceiveOptions;
use crate::commands::prepared_directories;
use crate::commands::reception::{announce, config, tell};
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::restrict::restrict;

/// For how long a guest that is this host's is to be started in a QEMU that does not answer, and how often it is tried.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(3600);
pub(super) const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// What ends the wait beside a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// Its QEMU has ended.
    QemuEnded,
    /// A signal.
    Told,
}

/// Whether a process is another user's, whose sockets only root may connect to, and only by a capability. One that is gone
/// is nobody's.
pub(super) fn is_of_another_user(pid: u32) -> bool {
    std::fs::metadata(format!("/proc/{pid}"))
        .is_ok_and(|process| process.uid() != rustix::process::geteuid().as_raw())
}

/// Signals, and the end of the QEMU.
pub(super) struct Waiting {
    pub(super) config: DestinationConfig,
    hook: Option<Arc<HookRunner>>,
    stop: Stop,
    over: Sender<Over>,
    pub(super) is_over: Receiver<Over>,
}

impl Waiting {
    pub(super) fn begin(
        listener: &vmferry_transport::Listener,
        options: &ReceiveOptions,
        files: Files,
        others_sockets: bool,
        output: &Output,
    ) -> Result<Self, Failure> {
        let config = config(options, prepared_directories()?.journals(), output)?;
        // While this process may start one.
        let hook = Hook::of(&options.hook)?.map(|hook| HookRunner::spawn(&hook)).transpose()?;
        let restrictions =
            restrict(options, listener.local_address(), Work::Beside, files, others_sockets)?;
        let (over, is_over) = channel();
        let stop = Stop::default();
        let (stopping, told) = (stop.clone(), over.clone());
        // Each of them: a second one ends the wait for a QEMU that does not end.
        crate::signals::on_each(move || {
            stopping.stop();
            let _ = told.send(Over::Told);
        })?;
        announce(listener, &restrictions, output);
        Ok(Self { config, hook: hook.map(Arc::new), stop, over, is_over })
    }

    /// Tells the hook of guests that never run here, beside everything else: a source that waits
    /// for this host's word has paused its guest.
    pub(super) fn tell_kept(&self, kept: Vec<Call>, output: &Output) -> Result<(), Failure> {
        let (Some(hook), false) = (self.hook.clone(), kept.is_empty()) else { return Ok(()) };
        let output = output.clone();
        let tell = move || kept.iter().for_each(|call| hook.run_after(call, &output));
        std::thread::Builder::new().name("hook".into()).spawn(tell)?;
        Ok(())
    }

    /// Tells the hook where a guest is.
    pub(super) fn run_after(&self, call: Option<Call>, output: &Output) {
        if let (Some(hook), Some(call)) = (&self.hook, call) {
            hook.run_after(&call, output);
        }
    }

    pub(super) fn receive<V: DestinationVm>(
        &self,
        listener: vmferry_transport::Listener,
        vm: V,
        output: &Output,
    ) -> Result<Owned<Hooked<V>>, Failure> {
        let vm = Hooked::new(vm, self.hook.clone(), output);
        match receive(listener, vm, &self.config, &self.stop, &mut |notice| tell(notice, output)) {
            Received::Nothing { error, .. } => Err(error.into()),
            Received::Owns(owned) => Ok(*owned),
        }
    }

    /// Tells of the guest that has come; with it comes whether it runs.
    pub(super) fn received<V: DestinationVm>(
        &self,
        owned: Owned<Hooked<V>>,
        qmp: &Path,
        output: &Output,
    ) -> (V, Witness, Result<(), Failure>) {
        let Owned { mut vm, session, guest, paused, crash, stats, witness } = owned;
        if let Some(error) = crash
            && let Err(error) = self.insist(&mut vm, error, output)
        {
            let text = format!(
                "the guest is this host's and could not be started: {}. It stands still in its QEMU: `cont` by QMP at {} \
                 starts it",
                vmferry::chain(&error),
                qmp.display()
            );
            return (vm.vm, witness, Err(Failure::new(Code::Corrupt, text)));
        }
        let event = json!({
            "event": "received", "guest": guest, "session": session, "stats": stats, "qmp": qmp,
            "paused": paused,
        });
        output.event(&event, || {
            let name = guest.as_ref().map_or_else(|| "the guest".to_owned(), ToString::to_string);
            format!(
                "{name} {}, QMP at {}; this host's word about it is given until its QEMU ends",
                if paused { "is here, paused as it was at the source" } else { "runs here" },
                qmp.display()
            )
        });
        vm.after(Outcome::Moved);
        (vm.vm, witness, Ok(()))
    }

    /// Starts a guest that is this host's once more, as long as its QEMU just does not answer. Meanwhile the source
    /// hears that the guest is here.
    fn insist<V: DestinationVm>(
        &self,
        vm: &mut V,
        mut error: MigrateError,
        output: &Output,
    ) -> Result<(), MigrateError> {
        let until = Instant::now() + START_TIMEOUT;
        let mut told = false;
        loop {
            let MigrateError::Vm { action, source } = &error else { return Err(error) };
            if !QemuError::is_timeout_of(source) || Instant::now() >= until {
                return Err(error);
            }
            if !std::mem::replace(&mut told, true) {
                output.event(&json!({ "event": "not-started", "reason": source.to_string() }), || {
                    format!("{source}. The guest is this host's, and vmferry goes on trying to start it")
                });
            }
            if let Ok(over) = self.is_over.recv_timeout(RETRY_PERIOD) {
                let _ = self.over.send(over);
                return Err(error);
            }
            let action = *action;
            match vm.run() {
                Ok(()) => return Ok(()),
                Err(source) => error = MigrateError::Vm { action, source },
            }
        }
    }

    /// Waits until QEMU has ended, which is [watched](Self::watch) for, or a signal has come: the
    /// guest outlives this process.
    pub(super) fn await_end(&self, qmp: &Path, pid: Option<u32>, output: &Output) -> Over {
        match self.is_over.recv() {
            Ok(Over::QemuEnded) => {
                say_end(output, "its QEMU has ended");
                Over::QemuEnded
            }
            _ => {
                let pid = pid.map_or_else(|| "unknown".to_owned(), |pid| pid.to_string());
                let text = format!(
                    "left to its QEMU, process {pid}, which goes on: this command started again \
                     answers for it, and `quit` by QMP at {} ends it",
                    qmp.display()
                );
                say_end(output, &text);
                Over::Told
            }
        }
    }

    /// Hears of the end of QEMU from now on.
    pub(super) fn watch(&self, pid: Option<u32>, qmp: &Path) -> Result<(), Failure> {
        let (over, qmp) = (self.over.clone(), qmp.to_owned());
        std::thread::Builder::new().name("qemu-end".into()).spawn(move || {
            wait_until_gone(pid, &qmp);
            let _ = over.send(Over::QemuEnded);
        })?;
        Ok(())
    }
}

pub(super) fn say_end(output: &Output, why: &str) {
    output.event(&json!({ "event": "ended", "why": why }), || why.to_owned());
}
