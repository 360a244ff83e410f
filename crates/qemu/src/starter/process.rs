//! A starter in a process of its own: the client and the server.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;

use parking_lot::Mutex;

use super::messages::{Answer, Ask, receive, send};
use super::{Keep, LocalStarter, Starter, local};
use crate::error::QemuError;
use crate::fault_access::{self, FaultAccess};
use crate::identity::ProcessIdentity;
use crate::inventory::OpenImage;
use crate::memory_file::{self, Examiner};
use crate::process::Mapping;
use crate::qmp::Qmp;
use crate::sample::BlockReader;
use crate::view::{Looker, View};

/// A starter in another process, reached by a socket. When this is dropped, or this process dies,
/// the other process ends together with a QEMU that it has started. A QEMU that [has a
/// guest](Starter::keep_qemu) keeps running, and the other process with it, which forwards QEMU's
/// output.
///
/// One request is in flight at a time, across all threads.
pub struct StarterProcess(Arc<Mutex<UnixStream>>);

impl StarterProcess {
    /// Starts it: `command` must run [`serve`] on its standard input.
    ///
    /// # Errors
    /// System call errors.
    pub fn spawn(mut command: Command) -> Result<Self, QemuError> {
        let (ours, theirs) = UnixStream::pair().map_err(local("make a socket pair"))?;
        command
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            // It may outlive this process, but must not hold its output open.
            .stdout(Stdio::null())
            // It ends when this process does, and not by a signal from the terminal.
            .process_group(0)
            .spawn()
            .map_err(local("begin the process that starts QEMU"))?;
        Ok(Self::by(ours))
    }

    /// A client for this socket.
    pub(super) fn by(stream: UnixStream) -> Self {
        Self(Arc::new(Mutex::new(stream)))
    }

    fn ask(&self, ask: &Ask) -> Result<(Answer, Option<OwnedFd>), QemuError> {
        let failed = local("ask the process that starts QEMU");
        let stream = self.0.lock();
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

/// The error for an answer that does not match the request.
fn unexpected() -> QemuError {
    local("understand the process that starts QEMU")(io::ErrorKind::InvalidData.into())
}

impl View for StarterProcess {
    /// A process that has been sandboxed meanwhile sees no other process. The starter checks
    /// whether the listener is its own QEMU.
    fn process(&self, qmp: &Qmp) -> Option<u32> {
        qmp.pid().or_else(|| qmp.listener())
    }

    fn shared_mappings(&mut self, pid: u32) -> Result<Vec<Mapping>, QemuError> {
        match self.ask(&Ask::SharedMappings(pid))? {
            (Answer::Mappings(mappings), _) => Ok(mappings),
            _ => Err(unexpected()),
        }
    }

    fn open_images(&mut self, pid: u32) -> Result<Vec<OpenImage>, QemuError> {
        match self.ask(&Ask::OpenImages(pid))? {
            (Answer::Images(images), _) => Ok(images),
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

    fn gives_descriptors(&mut self, pid: u32) -> bool {
        matches!(self.ask(&Ask::GivesDescriptors(pid)), Ok((Answer::GivesDescriptors(true), _)))
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

    fn block_reader(&self) -> BlockReader {
        let starter = Self(Arc::clone(&self.0));
        Arc::new(move |pid, images| match starter.ask(&Ask::ReadBlocks(pid, images.to_vec()))? {
            (Answer::Blocks(blocks), _) => Ok(blocks),
            _ => Err(unexpected()),
        })
    }

    fn fault_access(&self) -> Arc<dyn FaultAccess> {
        Arc::new(Self(Arc::clone(&self.0)))
    }
}

impl FaultAccess for StarterProcess {
    fn device(&self) -> Result<File, QemuError> {
        self.file(&Ask::OpenFaultDevice).map_err(|error| match error {
            QemuError::Local { source, .. } => fault_access::not_opened(source),
            error => error,
        })
    }

    fn create(&self, pid: u32) -> Result<OwnedFd, QemuError> {
        self.file(&Ask::CreateFaults(pid)).map(OwnedFd::from)
    }

    fn close(&self) {
        // If the starter has died, QEMU keeps the descriptor, and missing pages stay missing.
        let _ = self.ask(&Ask::CloseFaults);
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
        // A starter that has died can't kill it, and no other process may.
        let _ = self.ask(&Ask::End);
    }

    fn last_words(&mut self) -> Option<String> {
        match self.ask(&Ask::LastWords) {
            Ok((Answer::Words(words), _)) => words,
            _ => None,
        }
    }

    fn keep_qemu(&mut self, keep: Keep) {
        // A starter that has died kills nothing.
        let _ = self.ask(&Ask::KeepQemu(keep == Keep::WithGuest));
    }
}

/// Answers requests on `stream` until the receiver has ended. A QEMU that has a guest then keeps
/// running, and its output is forwarded until it has ended. Any other QEMU is killed.
///
/// # Errors
/// Socket errors, or a request that can't be parsed.
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
    // The requester reads from the network: it must learn nothing about other processes.
    let refused = |action, pid| {
        let source = io::ErrorKind::PermissionDenied.into();
        Err(QemuError::Process { action, pid, source })
    };
    if let Ask::SharedMappings(pid)
    | Ask::OpenImages(pid)
    | Ask::ReadBlocks(pid, _)
    | Ask::Pagemap(pid)
    | Ask::OpenFile(pid, _)
    | Ask::IsStopped(pid)
    | Ask::Identify(pid)
    | Ask::GivesDescriptors(pid)
    | Ask::CreateFaults(pid)
    | Ask::Examine(pid, _) = &ask
        && !starter.is_ours(*pid)
    {
        return refused("look into a process that is none", *pid);
    }
    let raw = |status: ExitStatus| status.into_raw();
    Ok(match ask {
        Ask::Start => {
            // Only one at a time: a previous QEMU has no owner any more.
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
        Ask::OpenImages(pid) => (Answer::Images(starter.open_images(pid)?), None),
        // The requester gets hashes, and no descriptor of a disk.
        Ask::ReadBlocks(pid, images) => {
            (Answer::Blocks(starter.block_reader()(pid, &images)?), None)
        }
        Ask::Pagemap(pid) => (Answer::Done, Some(starter.pagemap(pid)?)),
        Ask::OpenFile(pid, asked) => {
            // The requester gets guest memory only: QEMU also has its disks open, some of them
            // read-only.
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
        Ask::GivesDescriptors(pid) => {
            (Answer::GivesDescriptors(starter.gives_descriptors(pid)), None)
        }
        Ask::OpenFaultDevice => (Answer::Done, Some(starter.fault_access().device()?)),
        Ask::CreateFaults(pid) => {
            (Answer::Done, Some(File::from(starter.fault_access().create(pid)?)))
        }
        Ask::CloseFaults => {
            starter.fault_access().close();
            (Answer::Done, None)
        }
        Ask::LastWords => (Answer::Words(starter.last_words()), None),
        Ask::KeepQemu(keep) => {
            starter.keep_qemu(if keep { Keep::WithGuest } else { Keep::Nothing });
            (Answer::Done, None)
        }
    })
}

/// The requested mapping, if it may hold guest memory.
fn memory_of(
    starter: &mut LocalStarter,
    pid: u32,
    asked: &Mapping,
) -> Result<Option<Mapping>, QemuError> {
    let seen = starter.shared_mappings(pid)?;
    Ok(seen.into_iter().find(|seen| may_be_memory(seen) && is_same(seen, asked)))
}

/// Whether a mapping may hold guest memory. QEMU can already write to the file then, so the
/// requester gets no more access than QEMU has.
fn may_be_memory(mapping: &Mapping) -> bool {
    mapping.shared && mapping.writable && mapping.file.1 != 0
}

/// Whether the request matches the mapping that exists. The name is not compared: it changes when
/// the file is unlinked.
fn is_same(seen: &Mapping, asked: &Mapping) -> bool {
    (&seen.range, seen.file, seen.offset) == (&asked.range, asked.file, asked.offset)
}
