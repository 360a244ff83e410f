//! The keeper of a daemon's connections, a process of its own that outlives the daemon.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use vmferry_proxy::{Keeper, serve_keeper};

use crate::args::KeeperOptions;
use crate::exit::{Code, Failure};

/// Serves daemons until there is nothing to keep.
pub fn serve(options: &KeeperOptions) -> Result<(), Failure> {
    crate::signals::ignore()?;
    let ready = || {
        // The daemon that waits for this may have gone.
        let _ = io::Write::write_all(&mut io::stdout(), b"ready\n");
    };
    serve_keeper(&options.socket, ready).map_err(|error| Failure::of(Code::Internal, error))
}

/// Starts a keeper at `socket` unless one serves there.
pub fn start(socket: &Path) -> Result<(), Failure> {
    if Keeper::connect(socket).is_ok() {
        return Ok(());
    }
    let failed = |error: io::Error| {
        let text =
            format!("the process that keeps connections at {} can't be started", socket.display());
        Failure::of(Code::Internal, anyhow::Error::new(error).context(text))
    };
    // A keeper that was killed leaves its socket.
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(["keep-connections", "--socket"]).arg(socket).current_dir("/");
    // A signal for the daemon's process group must not reach it.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    let mut said = [0; 6];
    let ready = child.stdout.take().map(|mut out| out.read_exact(&mut said));
    match ready {
        Some(Ok(())) => Ok(()),
        Some(Err(error)) => Err(failed(error)),
        None => Err(failed(io::ErrorKind::BrokenPipe.into())),
    }
}
