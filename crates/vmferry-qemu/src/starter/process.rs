//! A starter that is a process of its own, from both sides.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use super::messages::{Answer, Ask, receive, send};
use super::{Keep, LocalStarter, Looker, Starter, View, local};
use crate::error::QemuError;
use crate::memory_file::{self, Examiner};
use crate::process::{Mapping, ProcessIdentity};
use crate::qmp::Qmp;

/// A starter in another process, by the socket to it. When this is dropped, or this process dies,
/// the other one ends with a QEMU that it has started. A QEMU that [has a
/// guest](Starter::keep_qemu) goes on, and the other process with it, which prints what QEMU
/// prints.
///
/// One question is asked at a time, whichever thread has it.
pub struct StarterProcess(Arc<Mutex<UnixStream>>);

impl StarterProcess {
    /// Begins it: `command` is to run [`serve`] on its standard input.
    ///
    /// # Errors
    /// What the system says.
    pub fn spawn(mut command: Command) -> Result<Self, QemuError> {
        let (ours, theirs) = UnixStream::pair().map_err(local("make a socket pair"))?;
        command
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            // It may outlive this process, whose output must end with it.
            .stdout(Stdio::null())
            // It ends when this process does, and not with it by a signal of the terminal.
            .process_group(0)
            .spawn()
            .map_err(local("begin the process that starts QEMU"))?;
        Ok(Self::by(ours))
    }

    /// One that is asked by this socket.
    pub(super) fn by(stream: UnixStream) -> Self {
        Self(Arc::new(Mutex::new(stream)))
    }

    fn ask(&self, ask: &Ask) -> Result<(Answer, Option<OwnedFd>), QemuError> {
        let failed = local("ask the process that starts QEMU");
        let stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = send(&stream, ask, None).and_then(|()| receive(&stream));
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
    /// A process that was restricted meanwhile sees no other: the starter knows whether the
    /// listener is its own.
    fn process(&self, qmp: &Qmp) -> Option<u32> {
        qmp.pid().or_else(|| qmp.listener())
    }

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

    fn identify(&mut self, pid: u32) -> Result<ProcessIdentity, QemuError> {
        match self.ask(&Ask::Identify(pid))? {
            (Answer::Identity(process), _) => Ok(process),
            _ => Err(unexpected()),
        }
    }

    fn looker(&self) -> Looker {
        let starter = Self(Arc::clone(&self.0));
        Arc::new(move |pid| {
            matches!(starter.ask(&Ask::IsStopped(pid)), Ok((Answer::Stopped(true), _)))
        })
    }

    fn examiner(&self) -> Examiner {
        let starter = Self(Arc::clone(&self.0));
        Arc::new(move |pid, mapping| match starter.ask(&Ask::Examine(pid, mapping.clone()))? {
            (Answer::Examined(sharing), _) => Ok(sharing),
            _ => Err(unexpected()),
        })
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

    fn last_words(&mut self) -> Option<String> {
        match self.ask(&Ask::LastWords) {
            Ok((Answer::Words(words), _)) => words,
            _ => None,
        }
    }

    fn keep_qemu(&mut self, keep: Keep) {
        // A starter that has died ends nothing.
        let _ = self.ask(&Ask::KeepQemu(keep == Keep::WithGuest));
    }
}

/// Does what is asked on `stream` until the receiver has ended. A QEMU that has a guest then goes
/// on, and what it prints is printed until it has ended; another is ended.
///
/// # Errors
/// What the socket says, or a question that can't be read.
pub fn serve(stream: &UnixStream, mut starter: LocalStarter) -> io::Result<()> {
    let served = answer_all(stream, &mut starter);
    starter.stay_with_guest();
    served
}

fn answer_all(stream: &UnixStream, starter: &mut LocalStarter) -> io::Result<()> {
    while let Some((ask, _)) = receive::<Ask>(stream)? {
        let (answer, file) = match answer(starter, ask) {
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
    let refused = |action, pid| {
        let source = io::ErrorKind::PermissionDenied.into();
        Err(QemuError::Process { action, pid, source })
    };
    if let Ask::SharedMappings(pid)
    | Ask::Pagemap(pid)
    | Ask::OpenFile(pid, _)
    | Ask::IsStopped(pid)
    | Ask::Identify(pid)
    | Ask::Examine(pid, _) = &ask
        && !starter.is_ours(*pid)
    {
        return refused("look into a process that is none", *pid);
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
        Ask::OpenFile(pid, asked) => {
            // Nor does it get more than the memory: QEMU has its disks open too, some of them for reading only.
            match memory_of(starter, pid, &asked)? {
                Some(memory) => (Answer::Done, Some(starter.open_file(pid, &memory)?)),
                None => return refused("open a file that is no memory", pid),
            }
        }
        Ask::Examine(pid, asked) => match memory_of(starter, pid, &asked)? {
            Some(memory) => {
                // The receiver has the memory mapped too.
                let ours = [std::process::id(), std::os::unix::process::parent_id()];
                (Answer::Examined(memory_file::examine(pid, &memory, &ours)?), None)
            }
            None => return refused("look at a file that is no memory", pid),
        },
        Ask::IsStopped(pid) => (Answer::Stopped(starter.is_stopped(pid)), None),
        Ask::Identify(pid) => (Answer::Identity(starter.identify(pid)?), None),
        Ask::LastWords => (Answer::Words(starter.last_words()), None),
        Ask::KeepQemu(keep) => {
            starter.keep_qemu(if keep { Keep::WithGuest } else { Keep::Nothing });
            (Answer::Done, None)
        }
    })
}

/// The mapping that is asked for, if a guest's memory may be there.
fn memory_of(
    starter: &mut LocalStarter,
    pid: u32,
    asked: &Mapping,
) -> Result<Option<Mapping>, QemuError> {
    let seen = starter.shared_mappings(pid)?;
    Ok(seen.into_iter().find(|seen| may_be_memory(seen) && is_same(seen, asked)))
}

/// Whether a guest's memory may be there. QEMU can write to the file already, then: whoever gets it gets no more than
/// QEMU has.
fn may_be_memory(mapping: &Mapping) -> bool {
    mapping.shared && mapping.writable && mapping.file.1 != 0
}

/// Whether what is asked for is what is there. The name is not looked at, which changes when somebody removes the file.
fn is_same(seen: &Mapping, asked: &Mapping) -> bool {
    (&seen.range, seen.file, seen.offset) == (&asked.range, asked.file, asked.offset)
}
