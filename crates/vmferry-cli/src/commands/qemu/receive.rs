//! `vmferry receive --qemu` and `--exec`: a guest comes to a QEMU that waits for it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use serde_json::json;
use vmferry::destination::{Owned, Received, Stop, Witness, receive};
use vmferry::{DestinationConfig, DestinationVm, MigrateError};
use vmferry_qemu::{
    AbandonedQemu, Expected, QemuDestination, QemuError, StartedQemu, Starter, wait_for_end,
};
use vmferry_sandbox::{Files, Work};

use super::starter;
use crate::args::ReceiveOptions;
use crate::commands::directory;
use crate::commands::receive::{config, listen, tell};
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::restrict::restrict;

/// For how long a guest that is this host's is to be started in a QEMU that does not answer, and how often it is tried.
const START_TIMEOUT: Duration = Duration::from_secs(3600);
const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// How long a QEMU that was told to end may take: it writes out what its disks' caches hold.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// What ends the wait beside a guest.
enum Over {
    /// Its QEMU has ended.
    QemuEnded,
    /// A signal.
    Told,
}

/// Receives into a QEMU that somebody has started.
pub fn attached(qmp: &Path, options: &ReceiveOptions, output: &Output) -> Result<(), Failure> {
    let listener = listen(options, output)?;
    let destination = QemuDestination::attach(qmp, expected(options))?;
    let pid = destination.pid();
    let mut files = files(destination.place());
    // Whether its process is stopped.
    files.read.push(PathBuf::from(format!("/proc/{pid}/stat")));
    let waiting = Waiting::begin(&listener, options, files, is_of_another_user(pid), output)?;
    waiting.watch(pid)?;
    let owned = waiting.receive(listener, destination, output)?;
    // QMP is somebody else's from now on.
    let (destination, witness, started) = waiting.received(owned, qmp, output);
    drop(destination);
    started?;
    let ended = waiting.is_over.recv();
    drop(witness);
    match ended {
        Ok(Over::QemuEnded) => say_end(output, "its QEMU has ended"),
        _ => say_end(output, "left to its QEMU, which goes on"),
    }
    Ok(())
}

/// Starts a QEMU and receives into it.
pub fn started(command: &str, options: &ReceiveOptions, output: &Output) -> Result<(), Failure> {
    let listener = listen(options, output)?;
    let directory = directory()?;
    let qmp: PathBuf = directory.path().join(format!("qemu-{}.qmp", std::process::id()));
    let starter = starter::spawn(command, &qmp)?;
    let destination = StartedQemu::start_by(Box::new(starter), &qmp, expected(options))?;
    // Whether a QEMU is stopped the starter looks, which knows the next ones too.
    let files = files(destination.place());
    let waiting = Waiting::begin(&listener, options, files, false, output)?;
    let owned = waiting.receive(listener, destination, output)?;
    let (qemu, witness, started) = waiting.received(owned, &qmp, output);
    let pid = qemu.pid();
    // From here on it has a guest, and is not ended with this process.
    let mut starter =
        qemu.into_starter().ok_or_else(|| Failure::new(Code::Internal, "there is no QEMU"))?;
    started?;
    waiting.watch(pid)?;
    if let Ok(Over::Told) = waiting.is_over.recv() {
        // As Ctrl-C ends a guest that `vmferry run` has started.
        waiting.end(&qmp, pid, starter.as_ref())?;
    }
    let status = starter.wait()?;
    drop(witness);
    // QEMU removes it itself when it ends in order.
    let _ = std::fs::remove_file(&qmp);
    if status.success() {
        say_end(output, "its QEMU has ended");
        Ok(())
    } else {
        Err(Failure::new(Code::Internal, format!("the guest's QEMU has ended: {status}")))
    }
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
fn is_of_another_user(pid: u32) -> bool {
    std::fs::metadata(format!("/proc/{pid}"))
        .is_ok_and(|process| process.uid() != rustix::process::geteuid().as_raw())
}

fn expected(options: &ReceiveOptions) -> Expected {
    Expected { name: options.expect_name.clone(), uuid: options.expect_uuid }
}

/// Signals, and the end of the QEMU.
struct Waiting {
    config: DestinationConfig,
    stop: Stop,
    over: Sender<Over>,
    is_over: Receiver<Over>,
}

impl Waiting {
    fn begin(
        listener: &vmferry_transport::Listener,
        options: &ReceiveOptions,
        files: Files,
        others_sockets: bool,
        output: &Output,
    ) -> Result<Self, Failure> {
        let config = config(options, directory()?.journals(), output)?;
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
        Ok(Self { config, stop, over, is_over })
    }

    fn receive<V: DestinationVm>(
        &self,
        listener: vmferry_transport::Listener,
        vm: V,
        output: &Output,
    ) -> Result<Owned<V>, Failure> {
        match receive(listener, vm, &self.config, &self.stop, &mut |notice| tell(notice, output)) {
            Received::Nothing { error, .. } => Err(error.into()),
            Received::Owns(owned) => Ok(*owned),
        }
    }

    /// Tells of the guest that has come; with it comes whether it runs.
    fn received<V: DestinationVm>(
        &self,
        owned: Owned<V>,
        qmp: &Path,
        output: &Output,
    ) -> (V, Witness, Result<(), Failure>) {
        let Owned { mut vm, session, guest, crash, stats, witness } = owned;
        if let Some(error) = crash
            && let Err(error) = self.insist(&mut vm, error, output)
        {
            let text = format!(
                "the guest is this host's and could not be started: {}. It stands still in its QEMU: `cont` by QMP at {} \
                 starts it",
                vmferry::chain(&error),
                qmp.display()
            );
            return (vm, witness, Err(Failure::new(Code::Corrupt, text)));
        }
        let event = json!({
            "event": "received", "guest": guest, "session": session, "stats": stats, "qmp": qmp,
        });
        output.event(&event, || {
            let name = guest.as_ref().map_or_else(|| "the guest".to_owned(), ToString::to_string);
            format!(
                "{name} runs here, QMP at {}; this host's word about it is given until its QEMU ends",
                qmp.display()
            )
        });
        (vm, witness, Ok(()))
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

    /// Ends the QEMU that was started, whose end is [watched](Self::watch) for, and waits for that: not for ever, and not
    /// against a second signal. One that does not end is left as it is: to kill it could cost what its disks' caches hold.
    fn end(&self, qmp: &Path, pid: u32, starter: &dyn Starter) -> Result<(), Failure> {
        let why = match AbandonedQemu::new(qmp, None).quit() {
            Ok(()) => match self.is_over.recv_timeout(END_TIMEOUT) {
                Ok(Over::QemuEnded) => return Ok(()),
                Ok(Over::Told) => "it was told to end, and has not yet".to_owned(),
                Err(_) if starter.is_stopped(pid) => {
                    format!(
                        "it was told to end, and is stopped: it goes on with `kill -CONT {pid}`"
                    )
                }
                Err(_) => format!("it was told to end, and has not in {} s", END_TIMEOUT.as_secs()),
            },
            // One that ends by itself just now does not answer either.
            Err(mut error) => match self.is_over.recv_timeout(RETRY_PERIOD) {
                Ok(Over::QemuEnded) => return Ok(()),
                _ => {
                    error.look_again(starter);
                    vmferry::chain(&error)
                }
            },
        };
        let text = format!(
            "the guest's QEMU, process {pid}, is left to itself: {why}. `quit` by QMP at {} ends it, or `kill -KILL {pid}` \
             if nothing else does",
            qmp.display()
        );
        Err(Failure::new(Code::NotAnswering, text))
    }

    /// Hears of the end of QEMU from now on.
    fn watch(&self, pid: u32) -> Result<(), Failure> {
        let over = self.over.clone();
        std::thread::Builder::new().name("qemu-end".into()).spawn(move || {
            // A process that is gone already has ended too.
            let _ = wait_for_end(pid);
            let _ = over.send(Over::QemuEnded);
        })?;
        Ok(())
    }
}

fn say_end(output: &Output, why: &str) {
    output.event(&json!({ "event": "ended", "why": why }), || why.to_owned());
}
