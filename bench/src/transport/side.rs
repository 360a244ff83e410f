//! One side of the migrations in its own process. The process keeps its memory, and its CPU time is
//! that of the migration.

use std::fs::File;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use vmferry::config::compression::{CompressionConfig, CompressionWay};
use vmferry::config::{BandwidthCap, ChannelCount};
use vmferry::destination::{Notice, Received as Outcome, Stop, receive};
use vmferry::source::{Orders, Report, SourceOutcome, migrate};
use vmferry::{DestinationConfig, SourceConfig};
use vmferry_memory::{GuestMemory, whole_hash};
use vmferry_transport::{Dialer, Listener, TlsIdentity};

use super::Role;
use super::attacker::Attacker;
use super::certificates;
use super::orders::{Content, Order, Received, Reply, Sent, Transport};
use crate::guest::{Incoming, MemoryGuest, clear, fill_incompressible, memory};
use crate::machine::process_cpu_s;
use crate::raw::{self, Copied, Sockets, Tls};
use vmferry_net_lab::{enter, own};

/// Executes the orders from standard input until it ends, and replies on standard output.
///
/// # Errors
/// An order or a certificate cannot be read. Errors of a run are sent as replies.
pub fn run(role: Role, directory: &Path) -> anyhow::Result<()> {
    // This process must not outlive the benchmark.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let mut side = Side {
        role,
        directory: directory.to_owned(),
        identity: Arc::new(certificates::identity(directory)?),
        raw_tls: Tls::load(&certificates::host(directory))?,
        home: own()?,
        memory: None,
        attacker: None,
    };
    for line in std::io::stdin().lines() {
        let order: Order = serde_json::from_str(&line?)?;
        let reply = side.execute(order).unwrap_or_else(|error| Reply::Failed(format!("{error:#}")));
        reply_with(&reply)?;
    }
    Ok(())
}

fn reply_with(reply: &Reply) -> anyhow::Result<()> {
    let mut line = serde_json::to_string(reply)?;
    line.push('\n');
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes())?;
    Ok(out.flush()?)
}

struct Side {
    role: Role,
    directory: PathBuf,
    identity: Arc<TlsIdentity>,
    raw_tls: Tls,
    /// The network namespace in which the process started.
    home: File,
    memory: Option<GuestMemory>,
    attacker: Option<Attacker>,
}

impl Side {
    fn execute(&mut self, order: Order) -> anyhow::Result<Reply> {
        Ok(match order {
            Order::Prepare { pages } => Reply::Prepared(self.prepare(pages)?),
            Order::Receive { transport, channels, namespace } => {
                self.go_to(namespace.as_deref())?;
                Reply::Received(self.receive(transport, channels)?)
            }
            Order::Send { transport, channels, cap, namespace } => {
                self.go_to(namespace.as_deref())?;
                Reply::Sent(self.send(transport, channels, cap)?)
            }
            Order::Inspect => {
                let content = content(self.memory()?)?;
                clear(self.memory()?)?;
                Reply::Inspected(content)
            }
            Order::Attack { address, idle_connections, namespace } => {
                self.go_to(namespace.as_deref())?;
                let stranger = certificates::stranger(&self.directory)?;
                self.attacker = Some(Attacker::start(&address, idle_connections, stranger)?);
                Reply::Attacking
            }
            Order::Cease => {
                let attacker = self.attacker.take().context("no attack is running")?;
                Reply::Ceased(attacker.cease()?)
            }
        })
    }

    fn prepare(&mut self, pages: u64) -> anyhow::Result<Content> {
        let memory = self.memory.insert(memory(pages)?);
        if self.role == Role::Source {
            fill_incompressible(memory)?;
        }
        content(memory)
    }

    fn memory(&self) -> anyhow::Result<&GuestMemory> {
        self.memory.as_ref().context("the memory was not prepared")
    }

    /// Enters a namespace with the current thread. Sockets belong to the namespace of the thread
    /// that creates them, and new threads inherit it.
    fn go_to(&self, namespace: Option<&Path>) -> anyhow::Result<()> {
        match namespace {
            None => enter(self.home.as_fd()),
            Some(path) => {
                let name = || format!("could not open {}", path.display());
                enter(File::open(path).with_context(name)?.as_fd())
            }
        }
    }

    fn receive(&self, transport: Transport, channels: u8) -> anyhow::Result<Received> {
        let memory = self.memory()?;
        match transport {
            Transport::Engine(address) => self.receive_guest(memory, &address),
            Transport::RawSocket(at) => receive_raw(memory, at, channels, None),
            Transport::RawRustls(at) => receive_raw(memory, at, channels, Some(&self.raw_tls)),
        }
    }

    fn receive_guest(&self, memory: &GuestMemory, address: &str) -> anyhow::Result<Received> {
        let listener = Listener::bind(&address.parse()?, Some(Arc::clone(&self.identity)))?;
        let mut config = DestinationConfig::new(self.directory.join("destination"));
        config.once = true;
        reply_with(&Reply::Listening(Transport::Engine(listener.local_address().to_string())))?;
        let cpu_before = process_cpu_s();
        let mut turned_away = 0;
        let incoming = Incoming(memory.clone());
        let outcome = receive(listener, incoming, &config, &Stop::default(), &mut |notice| {
            if matches!(notice, Notice::TurnedAway { .. }) {
                turned_away += 1;
            }
        });
        let cpu_s = process_cpu_s() - cpu_before;
        match outcome {
            Outcome::Owns(_) => Ok(Received { cpu_s, turned_away }),
            Outcome::Nothing { error, .. } => {
                Err(error).context("the destination does not own the guest")
            }
        }
    }

    fn send(&self, transport: Transport, channels: u8, cap: Option<u64>) -> anyhow::Result<Sent> {
        let memory = self.memory()?;
        match transport {
            Transport::Engine(address) => self.send_guest(memory, &address, channels, cap),
            Transport::RawSocket(to) => send_raw(memory, to, channels, None),
            Transport::RawRustls(to) => send_raw(memory, to, channels, Some(&self.raw_tls)),
        }
    }

    fn send_guest(
        &self,
        memory: &GuestMemory,
        address: &str,
        channels: u8,
        cap: Option<u64>,
    ) -> anyhow::Result<Sent> {
        let dialer = Dialer::new(address.parse()?, Some(Arc::clone(&self.identity)));
        let mut config = SourceConfig::new(self.directory.join("source"));
        config.channels = ChannelCount::new(channels)?;
        config.max_bandwidth = cap.map(BandwidthCap::new).transpose()?;
        // Transports are compared. The search for compressible pages would cost all of them the
        // same time.
        config.compression =
            CompressionConfig { way: CompressionWay::Off, ..CompressionConfig::default() };
        let vm = MemoryGuest::idle(memory);
        let (cpu_before, begun) = (process_cpu_s(), Instant::now());
        let mut notified = Ok(());
        let outcome = migrate(vm, &dialer, config, &Orders::new(), &mut |report| {
            if matches!(report, Report::RoundStarted { round: 1, .. }) {
                notified = reply_with(&Reply::UnderWay);
            }
        });
        let (whole_s, cpu_s) = (begun.elapsed().as_secs_f64(), process_cpu_s() - cpu_before);
        notified?;
        match outcome {
            SourceOutcome::Given { stats, .. } => {
                Ok(Sent { total_s: stats.total_ms / 1e3, whole_s, cpu_s })
            }
            SourceOutcome::Kept { error, .. } | SourceOutcome::Lost { error, .. } => {
                Err(error).context("the migration failed")
            }
        }
    }
}

fn content(memory: &GuestMemory) -> anyhow::Result<Content> {
    let whole = whole_hash(memory)?;
    Ok(Content { hash: whole.hash, pages: whole.pages })
}

fn receive_raw(
    memory: &GuestMemory,
    at: SocketAddr,
    channels: u8,
    tls: Option<&Tls>,
) -> anyhow::Result<Received> {
    let listener = TcpListener::bind(at)?;
    let at = listener.local_addr()?;
    reply_with(&Reply::Listening(match tls {
        None => Transport::RawSocket(at),
        Some(_) => Transport::RawRustls(at),
    }))?;
    let Copied { cpu_s, .. } = raw::receive(memory, raw::accept(&listener, channels)?, tls)?;
    Ok(Received { cpu_s, turned_away: 0 })
}

fn send_raw(
    memory: &GuestMemory,
    to: SocketAddr,
    channels: u8,
    tls: Option<&Tls>,
) -> anyhow::Result<Sent> {
    let begun = Instant::now();
    let streams = raw::connect(to, channels)?;
    reply_with(&Reply::UnderWay)?;
    let Copied { total_s, cpu_s } = raw::send(memory, streams, tls, Sockets::Default)?;
    Ok(Sent { total_s, whole_s: begun.elapsed().as_secs_f64(), cpu_s })
}
