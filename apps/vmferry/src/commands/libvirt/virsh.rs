//! libvirt's client program: runs it and reads what it prints.
//!
//! Every command runs with `LC_ALL=C`, so that words can be compared.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::commands::await_child;

/// How long a question may take. libvirt itself waits up to 30 s for another job of the domain.
const PATIENCE: Duration = Duration::from_secs(40);

/// How to run `virsh` for one libvirt.
#[derive(Clone, Debug)]
pub struct Virsh {
    program: PathBuf,
    uri: String,
    patience: Duration,
}

/// Why `virsh` did not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum VirshError {
    /// It can't be started.
    #[error(
        "`{program}` can't be started: install libvirt's client program (Debian and Ubuntu: \
         libvirt-clients; Fedora: libvirt-client)"
    )]
    Missing {
        /// The program.
        program: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// It did not end.
    #[error("libvirt does not answer: `virsh {command}` did not end within {after:?}")]
    Silent {
        /// The subcommand.
        command: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// It failed.
    #[error("`virsh {command}` failed: {message}")]
    Failed {
        /// The subcommand.
        command: String,
        /// What it printed on standard error, in one line.
        message: String,
    },
    /// The system failed.
    #[error("`virsh {command}` can't be run")]
    System {
        /// The subcommand.
        command: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// A `virsh` that runs.
#[derive(Debug)]
pub struct Running {
    child: Child,
    command: String,
    out: File,
    errors: File,
}

impl Virsh {
    /// For the libvirt at a connection URI.
    pub fn new(uri: &str) -> Self {
        Self { program: "virsh".into(), uri: uri.to_owned(), patience: PATIENCE }
    }

    /// The same with another limit for each question.
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Runs a command to its end. Returns what it prints.
    pub fn run<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Result<String, VirshError> {
        let mut running = self.start(arguments)?;
        match await_child(&mut running.child, self.patience) {
            Ok(Some(status)) => running.result(status),
            Ok(None) => {
                running.kill();
                Err(VirshError::Silent { command: running.command, after: self.patience })
            }
            Err(source) => Err(VirshError::System { command: running.command, source }),
        }
    }

    /// Starts a command. A signal of the terminal does not reach it.
    pub fn start<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Result<Running, VirshError> {
        let name = arguments.first().map(|first| first.as_ref().to_string_lossy().into_owned());
        let command = name.unwrap_or_default();
        let system = |source| VirshError::System { command: command.clone(), source };
        let (out, stdout) = output_file().map_err(system)?;
        let (errors, stderr) = output_file().map_err(system)?;
        let mut connect = OsString::from("--connect=");
        connect.push(&self.uri);
        let child = Command::new(&self.program)
            .args([OsStr::new("--quiet"), &connect])
            .args(arguments)
            .env("LC_ALL", "C")
            .env_remove("LANGUAGE")
            .env_remove("VIRSH_DEBUG")
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .process_group(0)
            .spawn();
        let child = child.map_err(|source| {
            let program = self.program.display().to_string();
            VirshError::Missing { program, source }
        })?;
        Ok(Running { child, command, out, errors })
    }
}

/// A file in memory that a child prints into. A pipe would have to be read while the child runs.
fn output_file() -> io::Result<(File, File)> {
    let file = File::from(memfd_create("virsh", MemfdFlags::CLOEXEC)?);
    let of_child = file.try_clone()?;
    Ok((file, of_child))
}

impl Running {
    /// Calls `ended` with what it has printed, or its failure, when it ends.
    pub fn on_end(
        mut self,
        ended: impl FnOnce(Result<String, VirshError>) + Send + 'static,
    ) -> Result<(), VirshError> {
        let command = self.command.clone();
        let wait = move || {
            ended(match self.child.wait() {
                Ok(status) => self.result(status),
                Err(source) => Err(VirshError::System { command: self.command, source }),
            });
        };
        let waiter = std::thread::Builder::new().name("virsh".into()).spawn(wait);
        waiter.map(drop).map_err(|source| VirshError::System { command, source })
    }

    /// What it has printed, if it ends successfully within this time. Otherwise it is killed.
    pub fn output_within(mut self, patience: Duration) -> Option<String> {
        match await_child(&mut self.child, patience) {
            Ok(Some(status)) => self.result(status).ok(),
            _ => {
                self.kill();
                None
            }
        }
    }

    /// What it has printed, or its failure.
    fn result(mut self, status: ExitStatus) -> Result<String, VirshError> {
        let text = printed(&mut self.out);
        if status.success() {
            return Ok(text);
        }
        let message = match printed(&mut self.errors) {
            nothing if nothing.trim().is_empty() => format!("it ended with {status}"),
            errors => one_line(&errors),
        };
        Err(VirshError::Failed { command: self.command, message })
    }

    /// Ends it.
    pub fn kill(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn printed(file: &mut File) -> String {
    let mut bytes = Vec::new();
    // What can't be read is missing from a message at most.
    let _ = file.rewind().and_then(|()| file.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// `virsh` prints a line with `error: ` for each error, the most general one first.
fn one_line(errors: &str) -> String {
    let lines = errors.lines().map(str::trim).filter(|line| !line.is_empty());
    let lines: Vec<&str> = lines.map(|line| line.strip_prefix("error: ").unwrap_or(line)).collect();
    lines.join(": ")
}

/// The value of a line such as `Max memory:     262144 KiB`.
pub fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `virsh` that is a shell script. Another process writes it: a descriptor of this one could
    /// be inherited by a child of another test, and a file that is open for writing can't be run.
    fn scripted(directory: &tempfile::TempDir, script: &str) -> Virsh {
        let program = directory.path().join("virsh");
        let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$2\" && chmod 755 \"$2\"";
        let mut command = Command::new("sh");
        command.args(["-c", write, "sh", script]).arg(&program);
        assert!(command.status().unwrap().success());
        Virsh { program, ..Virsh::new("qemu:///system") }
    }

    #[test]
    fn run_passes_arguments_and_returns_the_output() {
        let directory = tempfile::tempdir().unwrap();
        let virsh = scripted(&directory, "echo \"$LC_ALL $*\"");
        let said = virsh.run(&["domstate", "a b"]).unwrap();
        assert_eq!(said, "C --quiet --connect=qemu:///system domstate a b\n");
    }

    #[test]
    fn run_reads_more_than_a_pipe_holds() {
        let directory = tempfile::tempdir().unwrap();
        let virsh = scripted(&directory, "head -c 300000 /dev/zero");
        assert_eq!(virsh.run(&["dumpxml"]).unwrap().len(), 300_000);
    }

    #[test]
    fn failure_has_the_errors_in_one_line() {
        let directory = tempfile::tempdir().unwrap();
        let script = "echo 'error: failed to connect' >&2; echo 'error: no such file' >&2; exit 1";
        let error = scripted(&directory, script).run(&["list"]).unwrap_err();
        assert_eq!(error.to_string(), "`virsh list` failed: failed to connect: no such file");
        let error = scripted(&directory, "exit 3").run(&["list"]).unwrap_err();
        assert!(error.to_string().contains("exit status: 3"), "{error}");
    }

    #[test]
    fn program_that_does_not_end_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let virsh = scripted(&directory, "exec sleep 600").with_patience(Duration::ZERO);
        let error = virsh.run(&["version"]).unwrap_err();
        assert!(matches!(error, VirshError::Silent { after: Duration::ZERO, .. }), "{error}");
    }

    #[test]
    fn missing_program_is_reported_with_its_package() {
        let virsh = Virsh { program: "/nonexistent/virsh".into(), ..Virsh::new("") };
        let error = virsh.run(&["list"]).unwrap_err();
        assert!(matches!(error, VirshError::Missing { .. }), "{error}");
        assert!(error.to_string().contains("libvirt-clients"), "{error}");
    }

    #[test]
    fn field_finds_a_line_by_its_name() {
        let printed = "Id:             -\nName:           web: two\nUUID:  6c34\n";
        assert_eq!(field(printed, "Id"), Some("-"));
        assert_eq!(field(printed, "Name"), Some("web: two"));
        assert_eq!(field(printed, "OS Type"), None);
    }
}
