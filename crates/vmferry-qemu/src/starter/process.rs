//! A starter that is a process of its own, from both sides.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};

use super::messages::{Answer, Ask, receive, send};
use super::{LocalStarter, Starter, View, local};
use crate::error::QemuError;
use crate::process::Mapping;

/// A starter in another process, by the socket to it. When this is dropped, or this process dies, the other one ends; a
/// QEMU that it has started goes on.
pub struct StarterProcess(UnixStream);

impl StarterProcess {
    /// Begins it: `command` is to run [`serve`] on its standard input.
    ///
    /// # Errors
    /// What the system says.
    pub fn spawn(mut command: Command) -> Result<Self, QemuError> {
        let (ours, theirs) = UnixStream::pair().map_err(local("make a socket pair"))?;
        command
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            // It ends when this process does, and not with it by a signal of the terminal.
            .process_group(0)
            .spawn()
            .map_err(local("begin the process that starts QEMU"))?;
        Ok(Self(ours))
    }

    fn ask(&self, ask: &Ask) -> Result<(Answer, Option<OwnedFd>), QemuError> {
        let failed = local("ask the process that starts QEMU");
        let asked = send(&self.0, ask, None).and_then(|()| receive(&self.0));
        match asked {
            Ok(Some((Answer::Failed(_, Some(number)), _))) => {
                Err(failed(io::Error::from_raw_os_error(number)))
            }
            Ok(Some((Answer::Failed(why, None), _))) => Err(failed(io::Error::other(why))),
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(failed(io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(failed(error)),
        }
    }

    fn file(&self, ask: &Ask) -> Result<File, QemuError> {
        match self.ask(ask)? {
            (Answer::Done, Some(descriptor)) => Ok(descriptor.into()),
            _ => Err(unexpected()),
        }
    }
}

/// An answer to something else.
fn unexpected() -> QemuError {
    local("understand the process that starts QEMU")(io::ErrorKind::InvalidData.into())
}

impl View for StarterProcess {
    fn shared_mappings(&mut self, pid: u32) -> Result<Vec<Mapping>, QemuError> {
        match self.ask(&Ask::SharedMappings(pid))? {
            (Answer::Mappings(mappings), _) => Ok(mappings),
            _ => Err(unexpected()),
        }
    }

    fn pagemap(&mut self, pid: u32) -> Result<File, QemuError> {
        self.file(&Ask::Pagemap(pid))
    }

    fn open_file(&mut self, pid: u32, mapping: &Mapping) -> Result<File, QemuError> {
        self.file(&Ask::OpenFile(pid, mapping.clone()))
    }
}

impl Starter for StarterProcess {
    fn start(&mut self) -> Result<u32, QemuError> {
        match self.ask(&Ask::Start)? {
            (Answer::Started(pid), _) => Ok(pid),
            _ => Err(unexpected()),
        }
    }

    fn try_wait(&mut self) -> Result<Option<ExitStatus>, QemuError> {
        match self.ask(&Ask::TryWait)? {
            (Answer::Ended(ended), _) => Ok(ended.map(ExitStatus::from_raw)),
            _ => Err(unexpected()),
        }
    }

    fn wait(&mut self) -> Result<ExitStatus, QemuError> {
        match self.ask(&Ask::Wait)? {
            (Answer::Ended(Some(status)), _) => Ok(ExitStatus::from_raw(status)),
            _ => Err(unexpected()),
        }
    }

    fn end(&mut self) {
        // A starter that has died can't end it, and nobody else may.
        let _ = self.ask(&Ask::End);
    }
}

/// Does what is asked on `stream` until whoever asks is gone. A QEMU that runs then goes on.
///
/// # Errors
/// What the socket says, or a question that can't be read.
pub fn serve(stream: &UnixStream, mut starter: LocalStarter) -> io::Result<()> {
    while let Some((ask, _)) = receive::<Ask>(stream)? {
        let (answer, file) = match answer(&mut starter, ask) {
            Ok(answer) => answer,
            Err(error) => {
                let number = match &error {
                    QemuError::Local { source, .. } | QemuError::Process { source, .. } => {
                        source.raw_os_error()
                    }
                    _ => None,
                };
                (Answer::Failed(vmferry::chain(&error), number), None)
            }
        };
        send(stream, &answer, file.as_ref())?;
    }
    Ok(())
}

fn answer(starter: &mut LocalStarter, ask: Ask) -> Result<(Answer, Option<File>), QemuError> {
    // Whoever asks reads from the network: it learns nothing of other processes.
    if let Ask::SharedMappings(pid) | Ask::Pagemap(pid) | Ask::OpenFile(pid, _) = &ask
        && !starter.is_ours(*pid)
    {
        let source = io::ErrorKind::PermissionDenied.into();
        return Err(QemuError::Process {
            action: "look into a process that is none",
            pid: *pid,
            source,
        });
    }
    let raw = |status: ExitStatus| status.into_raw();
    Ok(match ask {
        Ask::Start => {
            // Only one at a time: what is left of another one is nobody's.
            starter.end();
            (Answer::Started(starter.start()?), None)
        }
        Ask::TryWait => (Answer::Ended(starter.try_wait()?.map(raw)), None),
        Ask::Wait => (Answer::Ended(Some(raw(starter.wait()?))), None),
        Ask::End => {
            starter.end();
            (Answer::Done, None)
        }
        Ask::SharedMappings(pid) => (Answer::Mappings(starter.shared_mappings(pid)?), None),
        Ask::Pagemap(pid) => (Answer::Done, Some(starter.pagemap(pid)?)),
        Ask::OpenFile(pid, mapping) => (Answer::Done, Some(starter.open_file(pid, &mapping)?)),
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A starter in a thread, and its QEMU: a shell that waits.
    fn served(command: &str) -> (StarterProcess, std::thread::JoinHandle<io::Result<()>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let starter = LocalStarter::new(command, Path::new("/nowhere/qmp"));
        (StarterProcess(ours), std::thread::spawn(move || serve(&theirs, starter)))
    }

    #[test]
    fn it_starts_looks_and_ends_at_another_s_word() {
        let (mut starter, serving) = served("sh -c 'sleep 1000' sh");
        let pid = starter.start().unwrap();
        assert_eq!(starter.try_wait().unwrap(), None);
        // The page table is open here, though it may be looked at there only.
        let pagemap = starter.pagemap(pid).unwrap();
        assert!(pagemap.metadata().unwrap().is_file());
        assert!(starter.shared_mappings(pid).is_ok());
        let own = std::process::id();
        assert!(starter.pagemap(own).unwrap_err().to_string().contains("ask the process"));
        assert!(starter.shared_mappings(own).is_err());
        let nowhere = Mapping {
            range: 0..4096,
            shared: true,
            offset: 0,
            file: (1, 1),
            path: "/dev/shm/x".into(),
        };
        assert!(starter.open_file(pid, &nowhere).is_err());
        starter.end();
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
        drop(starter);
        serving.join().unwrap().unwrap();
    }

    #[test]
    fn how_it_ended_is_told() {
        let (mut starter, _serving) = served("sh -c 'exit 7' sh");
        starter.start().unwrap();
        assert_eq!(starter.wait().unwrap().code(), Some(7));
        assert_eq!(starter.try_wait().unwrap().and_then(|status| status.code()), Some(7));
    }
}
