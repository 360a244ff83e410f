//! `vmferry run`: starts a guest of the built-in VMM and hosts it.

use vmferry_microvm::config::{GuestConfig, check_name};
use vmferry_microvm::service::End;
use vmferry_microvm::{Machine, MachineConfig, MachineError};

use super::host::{ending, host};
use super::{guest_identity, prepared_directories};
use crate::args::{MachineOptions, RunOptions};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Creates the guest, starts it and hosts it until it ends.
pub fn run(options: &RunOptions, output: &Output) -> Result<(), Failure> {
    check_name(&options.name).map_err(|error| Failure::of(Code::Usage, error))?;
    let directory = prepared_directories()?;
    if vmferry_control::is_live(&directory.socket(&options.name)) {
        let text = format!(
            "a guest {} runs already: choose another name, or quit that guest with `vmferry quit`",
            options.name
        );
        return Err(Failure::new(Code::Busy, text));
    }
    let machine = Machine::shared(MachineConfig {
        identity: guest_identity(&options.name, options.uuid),
        guest: guest_config(&options.machine, &options.workload),
        kind: options.machine.guest,
        memory_kind: options.machine.memory_kind,
        dirty_log: options.machine.dirty_log,
        device_log: options.machine.device_log,
    })
    .map_err(machine_failure)?;
    let ending = ending();
    let ended = ending.0.clone();
    crate::signals::on_end(move || {
        let _ = ended.send(End::Quit);
    })?;
    {
        let mut machine = machine.lock();
        // An unusable dirty log is reported now, not when the guest is migrated.
        machine.dirty_log().map_err(machine_failure)?;
        machine.start().map_err(machine_failure)?;
    }
    host(&machine, None, &directory, ending, output)
}

/// The hardware and workload of the guest.
pub fn guest_config(options: &MachineOptions, workload: &str) -> GuestConfig {
    GuestConfig {
        memory_bytes: options.memory,
        vcpus: options.vcpus,
        command_line: workload.to_owned(),
        balloon: options.balloon,
    }
}

fn machine_failure(error: MachineError) -> Failure {
    let code = match &error {
        MachineError::Config { .. } => Code::Usage,
        _ => Code::Internal,
    };
    Failure::of(code, error)
}
