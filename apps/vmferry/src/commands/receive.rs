//! `vmferry receive`: waits for a guest and hosts it.

use serde_json::json;
use vmferry::destination::{Owned, Received, Stop, receive};
use vmferry_microvm::embed::IncomingMachine;
use vmferry_microvm::service::{End, peak_rss_bytes};
use vmferry_sandbox::{Files, Work};

use super::host::{ending, host};
use super::prepared_directories;
use super::reception::{announce, config, listen, tell};
use crate::args::ReceiveOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::restrict::restrict;

/// Listens until a guest runs here, then hosts it.
pub fn run(options: &ReceiveOptions, output: &Output) -> Result<(), Failure> {
    match (&options.qemu, &options.exec) {
        (Some(qmp), _) => return super::qemu::receive::attached(qmp, options, output),
        (None, Some(command)) => return super::qemu::receive::started(command, options, output),
        (None, None) => super::qemu::hook::must_be_of_a_qemu(&options.hook)?,
    }
    let directory = prepared_directories()?;
    let listener = listen(options, output)?;
    let config = config(options, directory.journals(), output)?;
    let incoming = IncomingMachine {
        expect_name: options.expect_name.clone(),
        expect_uuid: options.expect_uuid,
        expect_memory: options.expect_memory,
        memory_kind: options.memory_kind,
        dirty_log: options.dirty_log,
        device_log: options.device_log,
        machine: None,
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
    announce(&listener, &restrictions, output);
    match receive(listener, incoming, &config, &stop, &mut |notice| tell(notice, output)) {
        Received::Nothing { error, .. } => Err(error.into()),
        Received::Owns(owned) => run_received(*owned, &directory, ending, output),
    }
}

fn run_received(
    owned: Owned<IncomingMachine>,
    directory: &vmferry_control::Directories,
    ending: super::host::Ending,
    output: &Output,
) -> Result<(), Failure> {
    let Owned { vm, session, guest, crash, stats, witness, .. } = owned;
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
    let hosted = host(&machine, directory, ending, output);
    drop(witness);
    hosted
}
