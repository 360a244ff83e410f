//! The daemon's helper, a process that does on this host what a restricted daemon can't do itself.
//!
//! ```text
//!  peers -- daemon, restricted -- requests --> helper, root -- sockets, virsh, names, the keeper
//!                    <-- sockets, as descriptors --
//! ```
//! The daemon reads from the network, and the helper only from the daemon. The helper reads the
//! configuration itself. A request names peers, rules and guests. The only paths are those of
//! definitions: the helper says where they lead, and opens nothing there.

mod host;
pub mod messages;
mod places;
pub mod process;

use std::io::{self, BufReader, Read};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uuid::Uuid;
use vmferry::probe::{HostFacts, LibvirtFacts};
use vmferry_control::descriptors::{self, Receiver};
use vmferry_handover::{DomainSeen, GuestIdentity};
use vmferry_proxy::definition::{DefinitionFacts, ImageNames, LibvirtResources, Resolved};
use vmferry_proxy::{
    DomainState, Domains, HostAccess, HostReport, KeeperProgram, Owner, ProxyError, SocketDone,
    SocketOrder,
};
use vmferry_transport::Address;

use self::messages::{Ask, Said};
use super::lines;
use crate::exit::Failure;

/// How long a request may take: longer than `virsh`, which is killed after 45 s.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How long an answer about what libvirt offers is used.
const RESOURCES_STAY: Duration = Duration::from_secs(10);

/// Why the helper has not done something.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    /// It has ended or is stopped.
    #[error("the daemon's helper (`vmferry help-daemon`) does not answer")]
    Silent(#[source] io::Error),
    /// Its answer belongs to another request.
    #[error("the daemon's helper (`vmferry help-daemon`) answers another question")]
    OtherAnswer,
    /// The reason is the helper's.
    #[error("{problem}")]
    Failed {
        /// The reason.
        problem: String,
    },
}

/// The daemon's end.
#[derive(Debug)]
pub struct Helper {
    socket: Mutex<UnixStream>,
    /// What libvirt offered a moment ago: peers can have it asked often.
    resources: Mutex<Option<(Instant, LibvirtResources)>>,
    /// The process, until [`watch`](Self::watch).
    unwatched: Mutex<Option<Child>>,
}

impl Helper {
    /// Starts the process, and no thread. It ends with the daemon.
    pub fn spawn(config: &Path) -> Result<Self, Failure> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new("/proc/self/exe");
        command.args(["help-daemon", "--config"]).arg(std::path::absolute(config)?);
        // A signal for the daemon's process group must not reach it.
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).process_group(0);
        let child = command.spawn()?;
        ours.set_write_timeout(Some(TIMEOUT))?;
        Ok(Self {
            socket: Mutex::new(ours),
            resources: Mutex::default(),
            unwatched: Mutex::new(Some(child)),
        })
    }

    /// Calls `ended` when the process has ended, from a thread.
    pub fn watch(
        &self,
        ended: impl FnOnce(io::Result<ExitStatus>) + Send + 'static,
    ) -> Result<(), Failure> {
        let Some(mut child) = self.unwatched.lock().take() else { return Ok(()) };
        let mut socket = self.socket.lock().try_clone()?;
        let thread = std::thread::Builder::new().name("helper".into());
        thread.spawn(move || {
            // The helper writes nothing there, so this is its end.
            let _ = socket.read(&mut [0]);
            ended(child.wait());
        })?;
        Ok(())
    }

    /// The configuration file has changed: requests for what it names succeed too, until
    /// [`adopt`](Self::adopt) or [`abandon`](Self::abandon). Returns the user that QEMU runs as.
    pub fn attempt(&self) -> Result<Owner, HelperError> {
        match self.ask(&Ask::Attempt)? {
            (Said::Configured { qemu }, _) => Ok(qemu),
            _ => Err(HelperError::OtherAnswer),
        }
    }

    /// The configuration that was tried is in use.
    pub fn adopt(&self) -> Result<(), HelperError> {
        self.ask(&Ask::Adopt).map(drop)
    }

    /// The configuration that was tried is not used.
    pub fn abandon(&self) -> Result<(), HelperError> {
        self.ask(&Ask::Abandon).map(drop)
    }

    /// Aborts the job of a domain.
    pub fn abort_job(&self, uuid: Uuid) -> Result<(), HelperError> {
        self.ask(&Ask::AbortJob(uuid)).map(drop)
    }

    fn ask(&self, ask: &Ask) -> Result<(Said, Option<OwnedFd>), HelperError> {
        match self.exchange(ask).map_err(HelperError::Silent)? {
            (Said::Failed(problem), _) => Err(HelperError::Failed { problem }),
            answer => Ok(answer),
        }
    }

    fn exchange(&self, ask: &Ask) -> io::Result<(Said, Option<OwnedFd>)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(TIMEOUT))?;
        ours.set_write_timeout(Some(TIMEOUT))?;
        descriptors::send(&self.socket.lock(), &[0], &[theirs.into()])?;
        descriptors::send(&ours, &lines::line(ask)?, &[])?;
        let mut reader = BufReader::new(Receiver::new(&ours));
        let said = lines::read(&mut reader)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok((said, reader.get_mut().descriptors.pop()))
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // If it has ended already, so much the better.
        let _ = self.socket.lock().shutdown(std::net::Shutdown::Both);
    }
}

impl From<HelperError> for ProxyError {
    fn from(error: HelperError) -> Self {
        Self::Helper { problem: vmferry::chain(&error) }
    }
}

impl HostAccess for Helper {
    fn sockets(&self, order: &SocketOrder) -> Result<SocketDone, ProxyError> {
        match self.ask(&Ask::Sockets(order.clone()))? {
            (Said::Done { file }, descriptor) => Ok(SocketDone { descriptor, file }),
            _ => Err(HelperError::OtherAnswer.into()),
        }
    }

    fn addresses(&self, address: &Address) -> Result<Vec<IpAddr>, ProxyError> {
        match self.ask(&Ask::Addresses(address.to_string()))? {
            (Said::Addresses(found), _) => Ok(found),
            _ => Err(HelperError::OtherAnswer.into()),
        }
    }
}

impl Domains for Helper {
    fn look(&self, guest: &GuestIdentity) -> DomainState {
        match self.ask(&Ask::Look(guest.clone())) {
            Ok((Said::Domain(state), _)) => state,
            _ => DomainState::Seen(DomainSeen::NoAnswer),
        }
    }
}

impl DefinitionFacts for Helper {
    fn libvirt(&self) -> Result<LibvirtResources, String> {
        // Others that want to know it meanwhile wait for this answer.
        let mut known = self.resources.lock();
        if let Some((at, resources)) = &*known
            && at.elapsed() < RESOURCES_STAY
        {
            return Ok(resources.clone());
        }
        match self.ask(&Ask::Resources) {
            Ok((Said::Resources(resources), _)) => {
                *known = Some((Instant::now(), resources.clone()));
                Ok(resources)
            }
            Ok(_) => Err(vmferry::chain(&HelperError::OtherAnswer)),
            Err(error) => Err(vmferry::chain(&error)),
        }
    }

    fn image_names(&self, path: &Path) -> Result<ImageNames, String> {
        match self.ask(&Ask::ImageNames(path.to_owned())) {
            Ok((Said::ImageNames(names), _)) => Ok(names),
            Ok(_) => Err(vmferry::chain(&HelperError::OtherAnswer)),
            Err(error) => Err(vmferry::chain(&error)),
        }
    }

    fn resolve(&self, path: &Path) -> Result<Resolved, String> {
        match self.ask(&Ask::Resolve(path.to_owned())) {
            Ok((Said::Resolved(resolved), _)) => Ok(resolved),
            Ok(_) => Err(vmferry::chain(&HelperError::OtherAnswer)),
            Err(error) => Err(vmferry::chain(&error)),
        }
    }
}

impl KeeperProgram for Helper {
    fn connect(&self) -> io::Result<OwnedFd> {
        let (_, descriptor) = self.ask(&Ask::Keeper).map_err(io::Error::other)?;
        descriptor.ok_or_else(|| io::Error::other(HelperError::OtherAnswer))
    }
}

impl HostReport for Helper {
    fn facts(&self) -> HostFacts {
        let problem = match self.ask(&Ask::Facts) {
            Ok((Said::Facts(facts), _)) => return *facts,
            Ok(_) => HelperError::OtherAnswer,
            Err(error) => error,
        };
        let problem = Some(vmferry::chain(&problem));
        let libvirt = Some(LibvirtFacts { problem, ..LibvirtFacts::default() });
        HostFacts { libvirt, ..HostFacts::default() }
    }
}
