//! Starting a proxy.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use parking_lot::{Mutex, RwLock};
use vmferry::config::compression::worker_threads;
use vmferry_transport::{Address, Listener};

use super::{Own, Proxy, Shared};
use crate::access::HostAccess;
use crate::config::ProxyConfig;
use crate::directory;
use crate::entrances::Entrances;
use crate::error::ProxyError;
use crate::event::Observer;
use crate::host_sockets::{HostSockets, Places};
use crate::incoming;
use crate::keeper::Keeper;
use crate::libvirt::{self, Migrations};
use crate::packers::Packers;
use crate::probes::Probes;

/// A proxy that listens for peers and accepts nothing yet. No thread was started, so the process
/// can restrict itself now.
#[derive(Debug)]
pub struct BoundProxy {
    config: ProxyConfig,
    listener: Listener,
    keeper: Option<Keeper>,
}

impl BoundProxy {
    /// Makes the directory of all directories, and listens for peers.
    ///
    /// # Errors
    /// An address or a directory that can't be used, or no keeper.
    pub fn bind(config: ProxyConfig) -> Result<Self, ProxyError> {
        directory::make_base(&config.directory)?;
        let listener =
            Listener::bind(&config.listen, config.tls.clone()).map_err(ProxyError::Listen)?;
        let keeper = match &config.keeper {
            Some(program) => Some(Keeper::start(Arc::clone(program)).map_err(|source| {
                ProxyError::System { action: "connect to the keeper", source }
            })?),
            None => None,
        };
        Ok(Self { config, listener, keeper })
    }

    /// Where other daemons connect to, with the actual port.
    #[must_use]
    pub fn address(&self) -> &Address {
        self.listener.local_address()
    }

    /// Accepts connections of peers and of local programs.
    ///
    /// # Errors
    /// A socket or a thread that can't be made.
    pub fn start(self, observer: Box<Observer>) -> Result<Proxy, ProxyError> {
        let Self { config, listener, keeper } = self;
        let (address, closer) = (listener.local_address().clone(), listener.closer());
        let no_thread = |source| ProxyError::System { action: "create a thread", source };
        let (access, own): (Arc<dyn HostAccess>, Own) = match &config.access {
            Some(access) => (Arc::clone(access), None),
            None => {
                let own = Arc::new(HostSockets::new(Places::of(&config)));
                (Arc::clone(&own) as _, Some(own))
            }
        };
        let compression = &config.compression;
        let workers = worker_threads(compression.workers);
        let packers = Packers::start(workers, &compression.compressors).map_err(no_thread)?;
        let shared = Arc::new(Shared {
            keeper,
            packers,
            access,
            own,
            config: RwLock::new(Arc::new(config)),
            observer,
            refusals: Mutex::default(),
            streams: Mutex::default(),
            numbers: AtomicU64::new(0),
            sessions: AtomicU64::new(0),
            limiters: Mutex::new(HashMap::new()),
            ending: AtomicBool::new(false),
            arrival_directories: Arc::default(),
            migrations: Migrations::default(),
            probes: Probes::default(),
        });
        let config = shared.config();
        let mut entrances = Entrances::default();
        let new = entrances.prepare(&shared, &config)?;
        entrances.adopt(&config, new);
        libvirt::take_over(&shared)?;
        libvirt::attend(&shared).map_err(no_thread)?;
        let accepting = std::thread::Builder::new().name("accept".into());
        let accepting = accepting
            .spawn({
                let shared = Arc::clone(&shared);
                move || incoming::accept(&shared, &listener)
            })
            .map_err(no_thread)?;
        let (entrances, accepting) = (Mutex::new(entrances), Some(accepting));
        Ok(Proxy { shared, entrances, address, closer, accepting })
    }
}
