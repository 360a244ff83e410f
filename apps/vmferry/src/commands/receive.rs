//! `vmferry receive`: waits for a guest and hosts it.

use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use serde_json::json;
use vmferry::destination::{FetchHandle, Owned, Received, Stop, receive};
use vmferry_control::Directories;
use vmferry_microvm::SharedMachine;
use vmferry_microvm::embed::IncomingMachine;
use vmferry_microvm::service::{End, peak_rss_bytes};
use vmferry_sandbox::{Files, Work};

use super::fleet::witness::of_new_session;
use super::host::{Ending, ending, host};
use super::reception::{announce, config, listen, tell};
use super::{directories, prepared_directories};
use crate::args::ReceiveOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::restrict::restrict;

/// Listens until a guest runs here, then hosts it.
pub fn run(options: &ReceiveOptions, output: &Output) -> Result<(), Failure> {
    super::qemu::note_crashed(&directories()?.journals(), output);
    match (&options.qemu, &options.exec) {
        (Some(qmp), _) => return super::qemu::receive::attached(qmp, options, output),
        (None, Some(command)) => return super::qemu::receive::started(command, options, output),
        (None, None) => super::qemu::hook::must_be_of_a_qemu(&options.hook)?,
    }
    let directory = prepared_directories()?;
    let listener = listen(options, output)?;
    let mut config = config(options, directory.journals(), output)?;
    config.witness = of_new_session(options.witness.witness.as_deref())?;
    let mut incoming = IncomingMachine {
        expect_name: options.expect_name.clone(),
        expect_uuid: options.expect_uuid,
        expect_memory: options.expect_memory,
        memory_kind: options.memory_kind,
        dirty_log: options.dirty_log,
        device_log: options.device_log,
        ..IncomingMachine::default()
    };
    // The second one is for pages that a guest lacks while it runs. The system call is only for
    // faults from user mode in the sandbox.
    let devices = vec!["/dev/kvm".into(), "/dev/userfaultfd".into()];
    let files = Files { devices, ..Files::default() };
    let restrictions = restrict(options, listener.local_address(), Work::Machine, files, false)?;
    let ending = ending();
    let (stop, ended) = (Stop::default(), ending.0.clone());
    let stopping = stop.clone();
    crate::signals::on_end(move || {
        stopping.stop();
        let _ = ended.send(End::Quit);
    })?;
    let hosting = Arc::new(Hosting {
        directory,
        output: output.clone(),
        ending: Mutex::new(Some(ending)),
        thread: Mutex::default(),
    });
    let hosts = Arc::clone(&hosting);
    incoming.on_fetch = Some(Box::new(move |machine, fetch| hosts.begin(machine, fetch)));
    announce(&listener, &restrictions, output);
    match receive(listener, incoming, &config, &stop, &mut |notice| tell(notice, output)) {
        Received::Nothing { error, .. } => Err(error.into()),
        Received::Owns(owned) => run_received(*owned, &hosting, output),
    }
}

/// Hosts a guest once it runs, which may be before its last page has arrived.
struct Hosting {
    directory: Directories,
    output: Output,
    /// Taken when the guest is hosted.
    ending: Mutex<Option<Ending>>,
    /// Hosts a guest that lacked pages when it was started.
    thread: Mutex<Option<JoinHandle<Result<(), Failure>>>>,
}

impl Hosting {
    /// Hosts a guest that runs and lacks pages, on a thread of its own.
    fn begin(self: &Arc<Self>, machine: SharedMachine, fetch: FetchHandle) {
        let hosting = Arc::clone(self);
        let hosts = move || hosting.host(&machine, Some(fetch));
        // Without a thread it is hosted when the last page has arrived.
        *self.thread.lock() = std::thread::Builder::new().name("host".into()).spawn(hosts).ok();
    }

    /// Hosts a guest that has all its pages, until it ends.
    fn finish(&self, machine: &SharedMachine) -> Result<(), Failure> {
        let Some(thread) = self.thread.lock().take() else { return self.host(machine, None) };
        let panicked = |_| Err(Failure::new(Code::Internal, "the thread that hosts it has ended"));
        thread.join().unwrap_or_else(panicked)
    }

    fn host(&self, machine: &SharedMachine, fetch: Option<FetchHandle>) -> Result<(), Failure> {
        let ending = self.ending.lock().take().unwrap_or_else(ending);
        host(machine, fetch, &self.directory, ending, &self.output)
    }
}

fn run_received(
    owned: Owned<IncomingMachine>,
    hosting: &Hosting,
    output: &Output,
) -> Result<(), Failure> {
    let Owned { vm, session, guest, crash, stats, responder, .. } = owned;
    let received = json!({
        "event": "received", "guest": guest, "session": session, "stats": stats,
        "peak_rss_bytes": peak_rss_bytes(),
    });
    output.event(&received, || {
        let name = guest.as_ref().map_or_else(|| "the guest".to_owned(), ToString::to_string);
        format!("{name} runs here: {} pages with content were received", stats.content_pages)
    });
    if let Some(error) = crash {
        let text = format!(
            "the guest was handed over but could not be started, and counts as crashed: {}",
            vmferry::chain(&error)
        );
        return Err(Failure::new(Code::Corrupt, text));
    }
    let machine = vm.machine.ok_or_else(|| Failure::new(Code::Internal, "there is no machine"))?;
    let hosted = hosting.finish(&machine);
    drop(responder);
    hosted
}
