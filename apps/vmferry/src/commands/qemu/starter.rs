//! The process that starts the QEMU of `vmferry receive --exec`, and that inspects the QEMU of
//! `vmferry receive --qemu`.
//!
//! The receiver reads from the network and is restricted: it can neither start programs nor inspect
//! other processes. This process reads only from the receiver. It is started before the receiver
//! restricts itself, with the one command that it may run or the one QEMU that it may inspect.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use vmferry_qemu::{LocalStarter, StarterProcess, serve_starter};

use crate::args::StarterOptions;
use crate::exit::Failure;

/// Spawns a starter for a QEMU with this command line and QMP socket.
pub fn spawn(command: &str, qmp: &Path) -> Result<StarterProcess, Failure> {
    let mut program = Command::new(std::env::current_exe()?);
    program.arg("start-qemu").arg("--qmp").arg(qmp).arg("--").arg(command);
    Ok(StarterProcess::spawn(program)?)
}

/// Spawns a process that inspects a running QEMU.
pub fn beside(pid: u32) -> Result<StarterProcess, Failure> {
    let mut program = Command::new(std::env::current_exe()?);
    program.arg("start-qemu").arg("--beside").arg(pid.to_string());
    Ok(StarterProcess::spawn(program)?)
}

/// `vmferry start-qemu`.
pub fn run(options: &StarterOptions) -> Result<(), Failure> {
    // It exits when the receiver closes the socket on standard input.
    crate::signals::ignore()?;
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let starter = match (options.beside, &options.command, &options.qmp) {
        (None, Some(command), Some(qmp)) => LocalStarter::new(command, qmp),
        (pid, ..) => LocalStarter::beside(pid.unwrap_or_default()),
    };
    Ok(serve_starter(&socket, starter)?)
}
