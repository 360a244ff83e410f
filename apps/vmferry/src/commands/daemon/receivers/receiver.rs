//! One receiver: started, listened to, and followed until nothing is left to do for its guest.

use std::io::BufReader;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use serde_json::Value;
use vmferry_qemu::{ProcessIdentity, wait_for_end};
use vmferry_wire::{Reason, ReasonCode};

use super::messages::{Order, Said};
use super::process::{Place, Shared};
use super::record::{self, Record};
use super::template::Purpose;
use crate::commands::daemon::lines::read_line;

/// How long a receiver may take until it waits for its source: QEMU may populate its memory first.
/// The source waits a little longer.
const START_TIMEOUT: Duration = Duration::from_secs(140);

/// Pause before a receiver that was killed is started again.
const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// Starts a receiver, and returns when it waits for its source.
pub fn start(order: Order, place: Place) -> Result<(), Reason> {
    let internal = |error: &std::io::Error| Reason::new(ReasonCode::Internal, &error.to_string());
    let spawned = spawn(&order, place.shared(), Purpose::Receive);
    let mut child = spawned.map_err(|error| internal(&error))?;
    let process = ProcessIdentity::of(child.id());
    let (ready, is_ready) = channel();
    let spawned = std::thread::Builder::new().name("receiver".into()).spawn(move || {
        let shared = place.shared();
        let written = write_record(&order, &child, shared);
        if let Err(error) = &written {
            let _ = ready.send(Err(internal(error)));
            let _ = child.kill();
        }
        let status = listen(&order, &mut child, shared, &ready);
        drop(ready);
        finish(&order, status, &place);
    });
    spawned.map_err(|error| internal(&error))?;
    match is_ready.recv_timeout(START_TIMEOUT) {
        Ok(ready) => ready,
        Err(RecvTimeoutError::Disconnected) => {
            let text = "the receiver there has ended before it waited for its source";
            Err(Reason::new(ReasonCode::VmRefused, text))
        }
        Err(RecvTimeoutError::Timeout) => {
            if let Ok(process) = process {
                kill(&process);
            }
            let text = format!(
                "the receiver there did not wait for its source within {} s",
                START_TIMEOUT.as_secs()
            );
            Err(Reason::new(ReasonCode::TimedOut, &text))
        }
    }
}

/// Follows a receiver that an earlier process has started.
pub fn follow(record: Record, place: Place) -> std::io::Result<()> {
    let follow = move || {
        while record.process.lives() {
            // An error means that it has ended.
            let _ = wait_for_end(record.process.pid);
        }
        // How it has ended is not known.
        finish(&record.order, None, &place);
    };
    std::thread::Builder::new().name("receiver".into()).spawn(follow).map(drop)
}

fn spawn(order: &Order, shared: &Shared, purpose: Purpose) -> std::io::Result<Child> {
    let socket = record::socket(&shared.directory, order.session);
    let unusable = || std::io::Error::other("the daemon's configuration can't be read");
    let arguments = shared.arguments(order, &socket, purpose).ok_or_else(unusable)?;
    Command::new("/proc/self/exe")
        .args(arguments)
        .env("VMFERRY_GUEST", &order.guest.name)
        .env("VMFERRY_UUID", order.guest.uuid.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
}

fn write_record(order: &Order, child: &Child, shared: &Shared) -> std::io::Result<()> {
    let process = ProcessIdentity::of(child.id()).map_err(std::io::Error::other)?;
    Record { order: order.clone(), process }.write(&shared.directory)
}

/// Passes on what a receiver says, until it has ended. Sends to `ready` whether it waits for its
/// source.
fn listen(
    order: &Order,
    child: &mut Child,
    shared: &Shared,
    ready: &Sender<Result<(), Reason>>,
) -> Option<ExitStatus> {
    if let Some(output) = child.stdout.take() {
        let mut reader = BufReader::new(output);
        while let Ok(Some(line)) = read_line(&mut reader) {
            let Ok(said) = serde_json::from_slice::<Value>(&line) else { continue };
            if said["event"] == "listening" {
                let _ = ready.send(Ok(()));
            } else if let Some(message) = said["error"]["message"].as_str() {
                let _ = ready.send(Err(Reason::new(ReasonCode::VmRefused, message)));
            }
            let (guest, session) = (order.guest.name.clone(), order.session);
            shared.tell(Said::Event { guest, session, said });
        }
    }
    child.wait().ok()
}

/// Looks after the guest of a receiver that has ended. One that has exited has done all that it
/// could. One that was killed may have left a guest that is paused, or whose source is in doubt.
fn finish(order: &Order, mut status: Option<ExitStatus>, place: &Place) {
    let shared = place.shared();
    while status.is_none_or(|status| status.code().is_none()) {
        // Whatever has killed it, such as a lack of memory, may do so again at once.
        std::thread::sleep(RETRY_PERIOD);
        let Ok(mut child) = spawn(order, shared, Purpose::Recover) else { continue };
        // Without a record the next daemon does not follow it.
        let _ = write_record(order, &child, shared);
        status = listen(order, &mut child, shared, &channel().0);
    }
    record::remove(&shared.directory, order.session);
}

/// Kills a receiver, unless it has ended.
fn kill(process: &ProcessIdentity) {
    let pid = rustix::process::Pid::from_raw(process.pid.cast_signed());
    if let Some(pid) = pid.filter(|_| process.lives()) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}
