//! One run: sends a guest from one process to the other and compares its memory.

use anyhow::{Context, anyhow, bail, ensure};
use tempfile::TempDir;
use vmferry_transport::Listener;

use super::case::{Case, Place, Way};
use super::hosts::{Interrupt, Process};
use super::idle::{Idle, IdleWatch};
use super::orders::{Attack, Content, Order, Received, Reply, Sent, Transport};
use super::{Role, certificates};
use vmferry_net_lab::Namespaces;

/// The cost of one run.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// From the start of the dirty log until the guest runs at the destination, in seconds.
    pub total_s: f64,
    /// Additional time for connecting, handshakes and closing.
    pub connect_s: f64,
    /// CPU seconds of the source's process.
    pub source_cpu_s: f64,
    /// CPU seconds of the destination's process.
    pub destination_cpu_s: f64,
    /// Idle time of the machine.
    pub idle: Idle,
    /// Rejected connections that the destination reported.
    pub turned_away: u64,
    /// The attacker's activity.
    pub attack: Option<Attack>,
}

/// The processes and their environment. The processes are the first fields, so they are dropped
/// first.
pub struct Bench {
    source: Process,
    destination: Process,
    attacker: Process,
    /// The content that the destination must have after a run.
    content: Content,
    namespaces: Option<Namespaces>,
    directory: TempDir,
}

impl Bench {
    /// Starts the processes with memory of `pages` pages each.
    ///
    /// # Errors
    /// The processes or their memory could not be set up.
    pub fn start(pages: u64) -> anyhow::Result<Self> {
        let interrupt = Interrupt::listen()?;
        let directory = tempfile::tempdir()?;
        certificates::make(directory.path())?;
        let start = |role| Process::start(role, directory.path(), &interrupt);
        let (mut source, mut destination) = (start(Role::Source)?, start(Role::Destination)?);
        let attacker = start(Role::Attacker)?;
        source.order(&Order::Prepare { pages })?;
        destination.order(&Order::Prepare { pages })?;
        let prepared = |process: &mut Process| match process.reply()? {
            Reply::Prepared(content) => Ok(content),
            other => Err(unexpected(&other)),
        };
        let (content, empty) = (prepared(&mut source)?, prepared(&mut destination)?);
        ensure!(
            content.pages == pages && empty.pages == 0,
            "the processes' memory has the wrong content"
        );
        let namespaces = Namespaces::make().inspect_err(|error| {
            eprintln!(
                "transport: no network namespaces, so loopback only (are you root?): {error:#}"
            );
        });
        Ok(Self { source, destination, attacker, content, namespaces: namespaces.ok(), directory })
    }

    /// The available places. Ratios without a place in the name are for the first one.
    pub fn places(&self) -> Vec<Place> {
        let all = [Place::Namespaces, Place::Loopback];
        all.into_iter()
            .filter(|place| *place == Place::Loopback || self.namespaces.is_some())
            .collect()
    }

    /// The available methods. Transports that were not compiled in are skipped with a message.
    ///
    /// # Errors
    /// The certificates cannot be read.
    pub fn ways(&self) -> anyhow::Result<Vec<Way>> {
        let identity = std::sync::Arc::new(certificates::identity(self.directory.path())?);
        let is_there = |way: &Way| {
            let optional = matches!(way, Way::GrpcAcknowledged | Way::GrpcStreamed);
            let Transport::Engine(address) = way.transport(Place::Loopback, self.directory.path())
            else {
                return true;
            };
            let bind = || -> anyhow::Result<_> {
                Ok(Listener::bind(&address.parse()?, Some(std::sync::Arc::clone(&identity)))?)
            };
            match bind() {
                Err(error) if optional => {
                    eprintln!("transport: {} is not compiled in: {error:#}", way.name());
                    false
                }
                _ => true,
            }
        };
        Ok(Way::ALL.into_iter().filter(is_there).collect())
    }

    /// Moves the memory once with a cap in bytes per second. If `idle_connections` is not 0, an
    /// attacker with this number of idle connections starts when the first page is about to be
    /// sent.
    ///
    /// # Errors
    /// A side failed, or the destination's memory differs.
    pub fn run(
        &mut self,
        case: Case,
        cap: Option<u64>,
        idle_connections: usize,
    ) -> anyhow::Result<Run> {
        self.migrate(case, cap, idle_connections).with_context(|| case.to_string())
    }

    fn migrate(
        &mut self,
        case: Case,
        cap: Option<u64>,
        idle_connections: usize,
    ) -> anyhow::Result<Run> {
        let namespaces = self.namespaces.as_ref().filter(|_| case.place == Place::Namespaces);
        let here = namespaces.map(Namespaces::source_path);
        let there = namespaces.map(Namespaces::destination_path);
        let channels = case.channels;
        let transport = case.way.transport(case.place, self.directory.path());
        self.destination.order(&Order::Receive { transport, channels, namespace: there })?;
        let transport = match self.destination.reply()? {
            Reply::Listening(transport) => transport,
            other => return Err(unexpected(&other)),
        };
        let address = transport.clone();
        let watch = IdleWatch::start();
        self.source.order(&Order::Send { transport, channels, cap, namespace: here.clone() })?;
        let sent = self.wait_until_sent(|attacker| {
            if idle_connections > 0 {
                let Transport::Engine(address) = address else {
                    bail!("only the engine's transports can be attacked")
                };
                attacker.order(&Order::Attack { address, idle_connections, namespace: here })?;
                expect_attacking(attacker)?;
            }
            Ok(())
        });
        let idle = watch.finish()?;
        let sent = match sent {
            Ok(sent) => sent,
            Err(error) => match self.destination.complaint() {
                Some(complaint) => return Err(error.context(complaint)),
                None => return Err(error),
            },
        };
        let attack = if idle_connections > 0 { Some(self.cease()?) } else { None };
        let Received { cpu_s, turned_away } = match self.destination.reply()? {
            Reply::Received(received) => received,
            other => return Err(unexpected(&other)),
        };
        self.destination.order(&Order::Inspect)?;
        match self.destination.reply()? {
            Reply::Inspected(content) => {
                ensure!(
                    content == self.content,
                    "the destination's memory differs from the source's"
                );
            }
            other => return Err(unexpected(&other)),
        }
        Ok(Run {
            total_s: sent.total_s,
            connect_s: sent.whole_s - sent.total_s,
            source_cpu_s: sent.cpu_s,
            destination_cpu_s: cpu_s,
            idle,
            turned_away,
            attack,
        })
    }

    /// Waits until the source has sent the guest. Runs `under_way` when the first page is about to
    /// be sent.
    fn wait_until_sent(
        &mut self,
        under_way: impl FnOnce(&mut Process) -> anyhow::Result<()>,
    ) -> anyhow::Result<Sent> {
        match self.source.reply()? {
            Reply::UnderWay => under_way(&mut self.attacker)?,
            other => return Err(unexpected(&other)),
        }
        match self.source.reply()? {
            Reply::Sent(sent) => Ok(sent),
            other => Err(unexpected(&other)),
        }
    }

    fn cease(&mut self) -> anyhow::Result<Attack> {
        self.attacker.order(&Order::Cease)?;
        match self.attacker.reply()? {
            Reply::Ceased(attack) => Ok(attack),
            other => Err(unexpected(&other)),
        }
    }
}

fn expect_attacking(attacker: &mut Process) -> anyhow::Result<()> {
    match attacker.reply()? {
        Reply::Attacking => Ok(()),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(reply: &Reply) -> anyhow::Error {
    anyhow!("unexpected reply: {reply:?}")
}
