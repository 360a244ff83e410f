//! What the helper does on this host.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::OnceLock;

use parking_lot::Mutex;
use vmferry_proxy::{
    Domains, HostAccess, HostReport, HostSockets, KeeperProgram, Places, SocketDone, SocketFile,
    SocketOrder, definition,
};
use vmferry_transport::Address;

use super::messages::{Ask, Said};
use crate::commands::daemon::config::Configuration;
use crate::commands::daemon::domains::{LibvirtDomains, abort_job};
use crate::commands::daemon::keeper::KeeperAt;
use crate::commands::daemon::report::DaemonHost;
use crate::commands::daemon::{LIBVIRT, keeper_socket, resources};
use crate::commands::prepared_directories;
use crate::exit::Failure;

/// This host. What may be done is decided by the configuration file, and never by the daemon.
#[derive(Debug)]
pub struct Host {
    config: PathBuf,
    configurations: Mutex<Configurations>,
    sockets: HostSockets,
    keeper: KeeperAt,
    report: OnceLock<DaemonHost>,
}

#[derive(Debug, Default)]
struct Configurations {
    in_use: Option<Configuration>,
    tried: Option<Configuration>,
}

/// An answer and its descriptor, or why there is none.
type Answer = Result<(Said, Option<OwnedFd>), String>;

impl Host {
    /// A host of which nothing is used yet.
    pub fn new(config: PathBuf) -> Result<Self, Failure> {
        let keeper = KeeperAt::new(keeper_socket(&prepared_directories()?));
        Ok(Self::with_keeper(config, keeper))
    }

    fn with_keeper(config: PathBuf, keeper: KeeperAt) -> Self {
        let sockets = HostSockets::new(Places::default());
        let (configurations, report) = (Mutex::default(), OnceLock::new());
        Self { config, configurations, sockets, keeper, report }
    }

    /// Carries out a request.
    ///
    /// # Errors
    /// Why it can't.
    pub fn carry_out(&self, ask: &Ask) -> Answer {
        let done = Said::Done { file: None };
        let said = match ask {
            Ask::Attempt => self.attempt()?,
            Ask::Adopt => {
                let mut configurations = self.configurations.lock();
                if let Some(tried) = configurations.tried.take() {
                    configurations.in_use = Some(tried);
                }
                self.sockets.adopt();
                done
            }
            Ask::Abandon => {
                self.configurations.lock().tried = None;
                self.sockets.abandon();
                done
            }
            Ask::Sockets(order) => {
                let carried_out = self.sockets.sockets(order);
                let SocketDone { descriptor, file } =
                    carried_out.map_err(|error| vmferry::chain(&error))?;
                return Ok((Said::Done { file }, descriptor));
            }
            Ask::Addresses(address) => self.addresses(address)?,
            Ask::Look(guest) => Said::Domain(LibvirtDomains.look(guest)),
            Ask::AbortJob(uuid) => abort_job(*uuid).map(|()| done)?,
            Ask::Facts => {
                let report = self.report.get_or_init(|| DaemonHost::new(LIBVIRT));
                Said::Facts(Box::new(report.facts()))
            }
            Ask::Resources => Said::Resources(resources::of_libvirt()?),
            Ask::Resolve(path) => {
                Said::Resolved(definition::resolve(path).map_err(|error| error.to_string())?)
            }
            Ask::ImageNames(path) => {
                let names = definition::image_names(path).map_err(|error| error.to_string());
                Said::ImageNames(names?)
            }
            Ask::Keeper => {
                let keeper = self.keeper.connect().map_err(|error| error.to_string())?;
                return Ok((done, Some(keeper)));
            }
        };
        Ok((said, None))
    }

    /// Removes the file of a socket that an order has made.
    pub fn remove(&self, file: SocketFile) {
        // It may be gone already.
        let _ = self.sockets.sockets(&SocketOrder::Remove(file));
    }

    fn attempt(&self) -> Result<Said, String> {
        let failed = |failure: Failure| failure.to_string();
        let fresh = Configuration::read(&self.config).map_err(failed)?;
        let places = fresh.places().map_err(failed)?;
        let mut configurations = self.configurations.lock();
        // A daemon that can be trusted does not ask for it.
        if let Some(in_use) = &configurations.in_use {
            in_use.check_change(&fresh).map_err(failed)?;
        }
        let qemu = places.qemu;
        self.sockets.attempt(places);
        configurations.tried = Some(fresh);
        Ok(Said::Configured { qemu })
    }

    fn addresses(&self, text: &str) -> Result<Said, String> {
        let unknown = || format!("the configuration names no peer at {text}");
        let address: Address = text.parse().map_err(|_| unknown())?;
        {
            let configurations = self.configurations.lock();
            let mut all = configurations.tried.iter().chain(&configurations.in_use);
            if !all.any(|configuration| configuration.has_address(&address)) {
                return Err(unknown());
            }
        }
        let found = self.sockets.addresses(&address);
        found.map(Said::Addresses).map_err(|error| vmferry::chain(&error))
    }
}

#[cfg(test)]
pub mod tests;
