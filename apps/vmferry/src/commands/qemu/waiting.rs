//! A receiver beside a QEMU: it waits for signals and QEMU's end, and runs the hook.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use serde_json::json;
use vmferry::destination::{Notice, Owned, Received, Report, Responder, Stop, receive};
use vmferry::{DestinationConfig, DestinationVm, MigrateError};
use vmferry_qemu::{QemuError, wait_until_gone};
use vmferry_sandbox::{Files, Work};

use super::fetching::ReceivingQemu;
use super::hook::{Call, Hook, HookRunner, Outcome};
use super::hooked::Hooked;
use crate::args::ReceiveOptions;
use crate::commands::reception::{announce, config, tell};
use crate::commands::{directories, prepared_directories};
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::restrict::restrict;

/// How long to keep trying to start a guest of this host in a QEMU that does not answer.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(3600);

/// Pause between these attempts.
pub(super) const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// Why a receiver stops waiting beside a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// QEMU has ended.
    QemuEnded,
    /// A signal arrived.
    Signaled,
}

/// Whether a process belongs to another user, so that connecting to its sockets needs a capability
/// of root. False if the process has ended.
pub(super) fn is_of_another_user(pid: u32) -> bool {
    std::fs::metadata(format!("/proc/{pid}"))
        .is_ok_and(|process| process.uid() != rustix::process::geteuid().as_raw())
}

/// A restricted receiver that waits for a guest, signals and the end of QEMU.
pub(super) struct Waiting {
    pub(super) config: DestinationConfig,
    hook: Option<Arc<HookRunner>>,
    /// How long to wait for the first source.
    wait: Option<Duration>,
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
        // Before the restrictions, which forbid to start programs.
        let hook = Hook::of(&options.hook)?.map(|hook| HookRunner::spawn(&hook)).transpose()?;
        let restrictions =
            restrict(options, listener.local_address(), Work::MemoryOnly, files, others_sockets)?;
        let (over, is_over) = channel();
        let stop = Stop::default();
        let (stopping, signaled) = (stop.clone(), over.clone());
        // Every signal counts: a second one ends the wait for a QEMU that does not exit.
        crate::signals::on_each(move || {
            stopping.stop();
            let _ = signaled.send(Over::Signaled);
        })?;
        announce(listener, &restrictions, output);
        let (hook, wait) = (hook.map(Arc::new), options.wait);
        Ok(Self { config, hook, wait, stop, over, is_over })
    }

    /// Runs the hook for guests that never run here. It runs in a separate thread, because a source
    /// in doubt keeps its guest paused until this host answers.
    pub(super) fn run_kept(&self, kept: Vec<Call>, output: &Output) -> Result<(), Failure> {
        let (Some(hook), false) = (self.hook.clone(), kept.is_empty()) else { return Ok(()) };
        let output = output.clone();
        let run = move || kept.iter().for_each(|call| hook.run_after(call, &output));
        std::thread::Builder::new().name("hook".into()).spawn(run)?;
        Ok(())
    }

    /// Runs the hook's `after`.
    pub(super) fn run_after(&self, call: Option<Call>, output: &Output) {
        if let (Some(hook), Some(call)) = (&self.hook, call) {
            hook.run_after(&call, output);
        }
    }

    pub(super) fn receive<V: DestinationVm + ReceivingQemu>(
        &self,
        listener: vmferry_transport::Listener,
        vm: V,
        output: &Output,
    ) -> Result<Owned<Hooked<V>>, Failure> {
        let vm = Hooked::new(vm, self.hook.clone(), output).shown_in(directories()?);
        let (come, has_come) = channel();
        if let Some(wait) = self.wait {
            let (stop, output) = (self.stop.clone(), output.clone());
            std::thread::Builder::new().name("first-source".into()).spawn(move || {
                if has_come.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                    let text = format!("no source has come within {} s", wait.as_secs());
                    let event = json!({ "event": "no-source", "message": text });
                    output.event(&event, || text.clone());
                    stop.stop();
                }
            })?;
        }
        let mut watch = |notice: &Notice| {
            if matches!(notice, Notice::Session(Report::Accepted { .. })) {
                let _ = come.send(());
            }
            tell(notice, output);
        };
        match receive(listener, vm, &self.config, &self.stop, &mut watch) {
            Received::Nothing { error, .. } => Err(error.into()),
            Received::Owns(owned) => Ok(*owned),
        }
    }

    /// Reports the received guest, and starts it if the handover could not. Returns an error with
    /// it if it does not start.
    pub(super) fn received<V: DestinationVm + ReceivingQemu>(
        &self,
        owned: Owned<Hooked<V>>,
        qmp: &Path,
        output: &Output,
    ) -> (V, Responder, Result<(), Failure>) {
        let Owned { mut vm, session, guest, paused, crash, stats, responder } = owned;
        if let Some(error @ MigrateError::CrashedLacking) = crash {
            vm.after(Outcome::Moved);
            return (vm.vm, responder, Err(error.into()));
        }
        if let Some(error) = crash
            && let Err(error) = self.insist(&mut vm, error, output)
        {
            let text = format!(
                "this host has the guest but could not start it: {}. It is paused in its QEMU: \
                 `cont` by QMP at {} starts it",
                vmferry::chain(&error),
                qmp.display()
            );
            return (vm.vm, responder, Err(Failure::new(Code::Corrupt, text)));
        }
        let event = json!({
            "event": "received", "guest": guest, "session": session, "stats": stats, "qmp": qmp,
            "paused": paused,
        });
        output.event(&event, || {
            let name = guest.as_ref().map_or_else(|| "the guest".to_owned(), ToString::to_string);
            format!(
                "{name} {}, QMP at {}. vmferry answers its source until its QEMU ends",
                if paused { "is here, paused as it was at the source" } else { "runs here" },
                qmp.display()
            )
        });
        vm.after(Outcome::Moved);
        (vm.vm, responder, Ok(()))
    }

    /// Retries to start a guest that this host owns while its QEMU does not answer. Meanwhile the
    /// source learns that this host has the guest.
    fn insist<V: DestinationVm>(
        &self,
        vm: &mut V,
        mut error: MigrateError,
        output: &Output,
    ) -> Result<(), MigrateError> {
        let until = Instant::now() + START_TIMEOUT;
        let mut reported = false;
        loop {
            let MigrateError::Vm { action, source } = &error else { return Err(error) };
            if !QemuError::is_timeout_of(source) || Instant::now() >= until {
                return Err(error);
            }
            if !std::mem::replace(&mut reported, true) {
                let event = json!({ "event": "not-started", "reason": source.to_string() });
                output.event(&event, || {
                    format!(
                        "{source}. This host has the guest, and vmferry keeps trying to start it"
                    )
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

    /// Waits until QEMU ends or a signal arrives. The guest survives this process. Call
    /// [`watch`](Self::watch) first.
    pub(super) fn await_end(&self, qmp: &Path, pid: Option<u32>, output: &Output) -> Over {
        match self.is_over.recv() {
            Ok(Over::QemuEnded) => {
                report_end(output, "its QEMU has ended");
                Over::QemuEnded
            }
            _ => {
                let pid = pid.map_or_else(|| "unknown".to_owned(), |pid| pid.to_string());
                let text = format!(
                    "the guest stays in its QEMU, process {pid}, which goes on: run this command \
                     again to answer its source; `quit` by QMP at {} ends it",
                    qmp.display()
                );
                report_end(output, &text);
                Over::Signaled
            }
        }
    }

    /// Starts to watch for the end of QEMU.
    pub(super) fn watch(&self, pid: Option<u32>, qmp: &Path) -> Result<(), Failure> {
        let (over, qmp) = (self.over.clone(), qmp.to_owned());
        std::thread::Builder::new().name("qemu-end".into()).spawn(move || {
            wait_until_gone(pid, &qmp);
            let _ = over.send(Over::QemuEnded);
        })?;
        Ok(())
    }
}

/// Reports the end of this command and the reason.
pub(super) fn report_end(output: &Output, why: &str) {
    output.event(&json!({ "event": "ended", "why": why }), || why.to_owned());
}
