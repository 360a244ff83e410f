//! `vmferry receive --qemu` and `--exec`: a guest comes to a QEMU that waits for it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use serde_json::json;
use vmferry::destination::{Owned, Received, Stop, Witness, receive};
use vmferry::{DestinationConfig, DestinationVm, MigrateError};
use vmferry_qemu::{Expected, QemuDestination, QemuError, StartedQemu, View, wait_until_gone};
use vmferry_sandbox::{Files, Work};

use super::arrived::{self, Found, Left};
use super::hook::{Call, Hook, HookRunner, Outcome};
use super::hooked::Hooked;
use super::starter;
use crate::args::ReceiveOptions;
use crate::commands::prepared_directories;
use crate::commands::receive::{config, listen, tell};
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

/// Receives into a QEMU that somebody has started.
pub fn attached(qmp: &Path, options: &ReceiveOptions, output: &Output) -> Result<(), Failure> {
    let listener = listen(options, output)?;
    let receiver = format!("qemu {}", std::path::absolute(qmp)?.display());
    let Found { left, kept } = arrived::find(&receiver, Some(qmp), output)?;
    match left {
        Left::Guest(arrived) => {
            return arrived::answer_for((arrived, kept), listener, options, output);
        }
        Left::EndedQemu(pid) => {
            return arrived::answer_without_qemu((pid, qmp, kept), listener, options, output);
        }
        Left::Nothing => {}
    }
    let mut destination = QemuDestination::attach(qmp, expected(options))?.received_by(&receiver);
    let pid = destination.pid();
    if pid.is_none() {
        tell_unseen(qmp, output);
    }
    // Once restricted, this process sees no other one: whose the memory files are then, another one
    // looks.
    if let Some(pid) = pid {
        destination.examine_by(starter::beside(pid)?.examiner());
    }
    let mut files = files(destination.place());
    // Whether its process is stopped.
    files.read.extend(pid.map(|pid| PathBuf::from(format!("/proc/{pid}/stat"))));
    let others = pid.is_none_or(is_of_another_user);
    let waiting = Waiting::begin(&listener, options, files, others, output)?;
    waiting.watch(pid, qmp)?;
    waiting.tell_kept(kept, output)?;
    let owned = waiting.receive(listener, destination, output)?;
    // QMP is somebody else's from now on.
    let (destination, witness, started) = waiting.received(owned, qmp, output);
    drop(destination);
    started?;
    waiting.await_end(qmp, pid, output);
    drop(witness);
    Ok(())
}

/// Says what is lost where QEMU's process is not seen.
fn tell_unseen(qmp: &Path, output: &Output) {
    output.event(&json!({ "event": "qemu-unseen", "qmp": qmp }), || {
        "QEMU's process is not seen from here: a receiver that is started after this one does not \
         find the guest. Run vmferry where that process is seen (the host's PID namespace, or one \
         that is shared)"
            .to_owned()
    });
}

/// Starts a QEMU and receives into it.
pub fn started(command: &str, options: &ReceiveOptions, output: &Output) -> Result<(), Failure> {
    let listener = listen(options, output)?;
    let receiver = format!("exec {} {command}", options.listen);
    let Found { left, kept } = arrived::find(&receiver, None, output)?;
    if let Left::Guest(arrived) = left {
        return arrived::answer_for((arrived, kept), listener, options, output);
    }
    let qmp = free_socket(prepared_directories()?.runtime());
    let starter = starter::spawn(command, &qmp)?;
    let destination =
        StartedQemu::start_by(Box::new(starter), &qmp, expected(options))?.received_by(&receiver);
    // Whether a QEMU is stopped the starter looks, which knows the next ones too.
    let files = files(destination.place());
    let waiting = Waiting::begin(&listener, options, files, false, output)?;
    waiting.tell_kept(kept, output)?;
    let owned = waiting.receive(listener, destination, output)?;
    let (qemu, witness, started) = waiting.received(owned, &qmp, output);
    let pid = qemu.pid();
    // From here on it has a guest, and is not ended with this process.
    let mut starter =
        qemu.into_starter().ok_or_else(|| Failure::new(Code::Internal, "there is no QEMU"))?;
    started?;
    waiting.watch(Some(pid), &qmp)?;
    let over = waiting.await_end(&qmp, Some(pid), output);
    drop(witness);
    if over == Over::Told {
        return Ok(());
    }
    let status = starter.wait()?;
    // QEMU removes it itself when it ends in order.
    let _ = std::fs::remove_file(&qmp);
    if status.success() {
        return Ok(());
    }
    let how = match starter.last_words() {
        Some(words) => format!("{status}: QEMU has printed: {words}"),
        None => status.to_string(),
    };
    Err(Failure::new(Code::Internal, format!("the guest's QEMU has ended: {how}")))
}

/// A name for the QMP socket of a QEMU to start. One that outlived a process of this
/// number has its own still.
fn free_socket(directory: &Path) -> PathBuf {
    let first = directory.join(format!("qemu-{}.qmp", std::process::id()));
    let others =
        (1..).map(|number| directory.join(format!("qemu-{}-{number}.qmp", std::process::id())));
    let is_free = |path: &PathBuf| std::os::unix::net::UnixStream::connect(path).is_err();
    std::iter::once(first.clone()).chain(others).find(is_free).unwrap_or(first)
}

/// What receiving into a QEMU needs beside what every receiver does: to tidy up the directory of the socket that is
/// between the two. QEMU's memory files are open by now, or a starter opens them.
fn files(place: Option<&Path>) -> Files {
    let within = place.map(Path::to_owned);
    Files {
        read: within.iter().cloned().collect(),
        remove_files: within.iter().cloned().collect(),
        remove_directories: within.iter().filter_map(|path| Some(path.parent()?.into())).collect(),
        ..Files::default()
    }
}

/// Whether a process is another user's, whose sockets only root may connect to, and only by a capability. One that is gone
/// is nobody's.
pub(super) fn is_of_another_user(pid: u32) -> bool {
    std::fs::metadata(format!("/proc/{pid}"))
        .is_ok_and(|process| process.uid() != rustix::process::geteuid().as_raw())
}

fn expected(options: &ReceiveOptions) -> Expected {
    Expected { name: options.expect_name.clone(), uuid: options.expect_uuid }
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
        crate::commands::receive::announce(listener, &restrictions, output);
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

    fn receive<V: DestinationVm>(
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
    fn received<V: DestinationVm>(
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
