//! `vmferry receive --qemu` and `--exec`: receives a guest into a waiting QEMU.

use std::path::{Path, PathBuf};

use serde_json::json;
use vmferry_qemu::{Expected, QemuDestination, StartedQemu, View};
use vmferry_sandbox::Files;
use vmferry_transport::Address;

use super::arrived::{self, Found, Left};
use super::hook::Hook;
use super::starter;
use super::waiting::{Over, Waiting, is_of_another_user};
use crate::args::ReceiveOptions;
use crate::commands::fleet::witness::of_new_session;
use crate::commands::prepared_directories;
use crate::commands::reception::listen;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Receives into a QEMU that is already running.
pub fn attached(qmp: &Path, options: &ReceiveOptions, output: &Output) -> Result<(), Failure> {
    let listener = listen(options, output)?;
    let receiver = format!("qemu {}", std::path::absolute(qmp)?.display());
    let Found { left, kept } = arrived::find(&receiver, Some(qmp), output)?;
    match left {
        Left::Guest(arrived) => {
            return arrived::answer_for(arrived, kept, listener, options, output);
        }
        Left::Lacking(arrived) => {
            return arrived::fetch_for(arrived, kept, listener, options, output);
        }
        Left::EndedQemu(pid) => {
            return arrived::answer_without_qemu(pid, qmp, kept, listener, options, output);
        }
        Left::Nothing => {}
    }
    let witness = of_new_session(options.witness.witness.as_deref())?;
    let mut destination = QemuDestination::attach(qmp, expected(options))?.received_by(&receiver);
    let pid = destination.pid();
    if pid.is_none() {
        report_unseen(qmp, output);
    }
    // After it restricts itself, this process can't look into others, so a helper examines which
    // processes use the memory files, makes QEMU report missing pages, and reads blocks of disks.
    if let Some(pid) = pid {
        let beside = starter::beside(pid)?;
        destination.examine_by(beside.examiner());
        destination.receive_faults_by(beside.fault_access());
        destination.read_blocks_by(beside.block_reader());
    }
    let mut files = files(destination.place());
    // Shows whether QEMU's process is stopped.
    files.read.extend(pid.map(|pid| PathBuf::from(format!("/proc/{pid}/stat"))));
    let others = pid.is_none_or(is_of_another_user);
    let mut waiting = Waiting::begin(&listener, options, files, others, output)?;
    waiting.config.witness = witness;
    waiting.watch(pid, qmp)?;
    waiting.run_kept(kept, output)?;
    let owned = waiting.receive(listener, destination, output)?;
    // Other clients may use QMP from now on.
    let (destination, responder, started) = waiting.received(owned, qmp, output);
    drop(destination);
    started?;
    waiting.await_end(qmp, pid, output);
    drop(responder);
    Ok(())
}

/// Reports the consequence of a QEMU process that is not visible from here.
fn report_unseen(qmp: &Path, output: &Output) {
    output.event(&json!({ "event": "qemu-unseen", "qmp": qmp }), || {
        "QEMU's process is not visible from here: a later receiver will not find the guest. Run \
         vmferry where that process is visible (in the host's PID namespace, or a shared one)"
            .to_owned()
    });
}

/// Starts a QEMU and receives into it.
pub fn started(command: &str, options: &ReceiveOptions, output: &Output) -> Result<(), Failure> {
    let listener = listen(options, output)?;
    let receiver = match listener.local_address() {
        // It is named after the session, and its template may have changed.
        Address::Passed(_) => format!("exec {}", options.listen),
        _ => format!("exec {} {command}", options.listen),
    };
    let Found { left, kept } = arrived::find(&receiver, None, output)?;
    match left {
        Left::Guest(arrived) => {
            return arrived::answer_for(arrived, kept, listener, options, output);
        }
        Left::Lacking(arrived) => {
            return arrived::fetch_for(arrived, kept, listener, options, output);
        }
        Left::EndedQemu(_) | Left::Nothing => {}
    }
    if options.found_only {
        if let Some(hook) = Hook::of(&options.hook)? {
            kept.iter().for_each(|call| hook.run_after(call, output));
        }
        return Ok(());
    }
    let witness = of_new_session(options.witness.witness.as_deref())?;
    let qmp = free_socket(prepared_directories()?.runtime());
    let starter = starter::spawn(command, &qmp)?;
    let destination =
        StartedQemu::start_by(Box::new(starter), &qmp, expected(options))?.received_by(&receiver);
    // The starter checks whether QEMU is stopped, because only it knows the current process.
    let files = files(destination.place());
    let mut waiting = Waiting::begin(&listener, options, files, false, output)?;
    waiting.config.witness = witness;
    waiting.run_kept(kept, output)?;
    let owned = waiting.receive(listener, destination, output)?;
    let (qemu, responder, started) = waiting.received(owned, &qmp, output);
    let pid = qemu.pid();
    // QEMU has a guest now and must survive this process.
    let mut starter =
        qemu.into_starter().ok_or_else(|| Failure::new(Code::Internal, "there is no QEMU"))?;
    started?;
    waiting.watch(Some(pid), &qmp)?;
    let over = waiting.await_end(&qmp, Some(pid), output);
    drop(responder);
    if over == Over::Signaled {
        return Ok(());
    }
    let status = starter.wait()?;
    // QEMU removes the socket itself on an orderly exit.
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

/// A free path for the QMP socket of a new QEMU. A QEMU of an earlier process with the same PID may
/// still use the first one.
fn free_socket(directory: &Path) -> PathBuf {
    let first = directory.join(format!("qemu-{}.qmp", std::process::id()));
    let others =
        (1..).map(|number| directory.join(format!("qemu-{}-{number}.qmp", std::process::id())));
    let is_free = |path: &PathBuf| std::os::unix::net::UnixStream::connect(path).is_err();
    std::iter::once(first.clone()).chain(others).find(is_free).unwrap_or(first)
}

/// Files that receiving into a QEMU needs in addition: the directory of the socket between vmferry
/// and QEMU, which is removed at the end. QEMU's memory files are open by now, or a starter opens
/// them.
pub fn files(place: Option<&Path>) -> Files {
    let within = place.map(Path::to_owned);
    Files {
        read: within.iter().cloned().collect(),
        remove_files: within.iter().cloned().collect(),
        remove_directories: within.iter().filter_map(|path| Some(path.parent()?.into())).collect(),
        ..Files::default()
    }
}

fn expected(options: &ReceiveOptions) -> Expected {
    Expected { name: options.expect_name.clone(), uuid: options.expect_uuid }
}
