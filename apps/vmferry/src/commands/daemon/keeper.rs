//! The keeper of a daemon's connections, a process of its own that outlives the daemon.

use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmferry_proxy::{KeeperProgram, connect_to_keeper, serve_keeper};

use crate::args::KeeperOptions;
use crate::exit::{Code, Failure};

/// How long a keeper may take until it serves. It does next to nothing before, on a machine that
/// may have just started.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves daemons until there is nothing to keep.
pub fn serve(options: &KeeperOptions) -> Result<(), Failure> {
    crate::signals::ignore()?;
    let ready = || {
        // The daemon that waits for this may have gone.
        let _ = io::Write::write_all(&mut io::stdout(), b"ready\n");
    };
    serve_keeper(&options.socket, ready).map_err(|error| Failure::of(Code::Internal, error))
}

/// The keeper that listens at a path. It is started whenever none serves there.
#[derive(Debug)]
pub struct KeeperAt {
    socket: PathBuf,
    /// The keeper that this process has started last.
    child: Mutex<Option<Child>>,
}

impl KeeperAt {
    /// The keeper of this path, which is started by the first connection.
    pub fn new(socket: PathBuf) -> Self {
        Self { socket, child: Mutex::default() }
    }
}

impl KeeperProgram for KeeperAt {
    fn connect(&self) -> io::Result<OwnedFd> {
        match connect_to_keeper(&self.socket) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) => {}
            connected => return connected,
        }
        let mut child = self.child.lock();
        if let Some(mut ended) = child.take() {
            // Nothing is left of it then.
            let _ = ended.try_wait();
        }
        *child = Some(start(&self.socket)?);
        connect_to_keeper(&self.socket)
    }
}

/// Starts a keeper at `socket`, and waits until it serves.
fn start(socket: &Path) -> io::Result<Child> {
    // A keeper that was killed leaves its socket.
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["keep-connections", "--socket"]).arg(socket).current_dir("/");
    // A signal for the daemon's process group must not reach it.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let out = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    if let Err(error) = await_ready(out, START_TIMEOUT) {
        let _ = child.kill();
        let _ = child.wait();
        return Err(error);
    }
    Ok(child)
}

/// Reads the word that the keeper serves.
fn await_ready(mut out: impl Read + AsFd, timeout: Duration) -> io::Result<()> {
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    let polled =
        rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(&out, PollFlags::IN)], Some(&timeout)));
    if polled? == 0 {
        let text = format!(
            "`vmferry keep-connections` did not begin to serve within {} s",
            timeout.tv_sec
        );
        return Err(io::Error::new(io::ErrorKind::TimedOut, text));
    }
    // It writes all at once, or nothing.
    out.read_exact(&mut [0; 6])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that was started and says nothing.
    #[test]
    fn keeper_that_says_nothing_has_a_time_limit() {
        let mut silent = Command::new("sleep").arg("1000").stdout(Stdio::piped()).spawn().unwrap();
        let out = silent.stdout.take().unwrap();
        let error = await_ready(out, Duration::from_millis(1)).unwrap_err();
        silent.kill().unwrap();
        silent.wait().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
