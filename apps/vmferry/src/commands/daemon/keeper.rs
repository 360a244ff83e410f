//! The keeper of a daemon's connections, a process of its own that outlives the daemon.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use parking_lot::Mutex;
use vmferry_proxy::{KeeperProgram, connect_to_keeper, serve_keeper};

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
    let mut said = [0; 6];
    let out = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let ready = { out }.read_exact(&mut said);
    if let Err(error) = ready {
        let _ = child.kill();
        let _ = child.wait();
        return Err(error);
    }
    Ok(child)
}
