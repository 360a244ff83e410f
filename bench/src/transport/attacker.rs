//! Somebody who may reach the destination's port, but has no certificate of its authority: connections that
//! never say anything, and handshakes that fail, one after the other.

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vmferry_transport::{Address, Dialer, TlsIdentity};

use super::orders::Attack;
use crate::machine::process_cpu_s;

/// Between two failed handshakes. An attacker of this machine takes its processors from the migration, which one
/// on the network does not: at a hundred in a second that is some per cent of one.
const PAUSE: Duration = Duration::from_millis(10);

/// For a connection or a refusal.
const PATIENCE: Duration = Duration::from_secs(2);

/// Descriptors beside those of idle connections.
const SPARE_DESCRIPTORS: u64 = 64;

/// An attack under way.
pub struct Attacker {
    ending: Arc<AtomicBool>,
    idle: JoinHandle<Vec<TcpStream>>,
    failing: JoinHandle<anyhow::Result<u64>>,
    cpu_before: f64,
}

impl Attacker {
    /// Begins, from the calling thread's network namespace.
    ///
    /// # Errors
    /// An address that is not TLS's, and a system that allows too few descriptors.
    pub fn start(address: &str, connections: usize, stranger: TlsIdentity) -> anyhow::Result<Self> {
        allow_descriptors(connections as u64 + SPARE_DESCRIPTORS)?;
        let address: Address = address.parse()?;
        let Address::Tls { host, port } = &address else { bail!("{address} has no handshakes") };
        let to = SocketAddr::new(host.parse().context("no IP address")?, *port);
        let mut dialer = Dialer::new(address, Some(Arc::new(stranger)));
        dialer.connect_timeout = PATIENCE;
        let (ending, cpu_before) = (Arc::new(AtomicBool::new(false)), process_cpu_s());
        let (end, end_too) = (Arc::clone(&ending), Arc::clone(&ending));
        Ok(Self {
            ending,
            idle: std::thread::spawn(move || stay_idle(to, connections, &end)),
            failing: std::thread::spawn(move || fail(&dialer, &end_too)),
            cpu_before,
        })
    }

    /// Ends it.
    ///
    /// # Errors
    /// A handshake that was not refused.
    pub fn cease(self) -> anyhow::Result<Attack> {
        self.ending.store(true, Ordering::Relaxed);
        let cpu_s = process_cpu_s() - self.cpu_before;
        let idle = self.idle.join().map_err(|_| anyhow!("a thread has failed"))?;
        let failed = self.failing.join().map_err(|_| anyhow!("a thread has failed"))?;
        let idle_connections = idle.len() as u64;
        Ok(Attack { idle_connections, failed_handshakes: failed?, cpu_s })
    }
}

/// Connections, whether the destination has closed them since or not.
fn stay_idle(to: SocketAddr, connections: usize, ending: &AtomicBool) -> Vec<TcpStream> {
    let mut idle = Vec::with_capacity(connections);
    while idle.len() < connections && !ending.load(Ordering::Relaxed) {
        match TcpStream::connect_timeout(&to, PATIENCE) {
            Ok(stream) => idle.push(stream),
            // Not at once again: a destination that takes no more will not do so now.
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
    idle
}

/// How many were refused.
fn fail(dialer: &Dialer, ending: &AtomicBool) -> anyhow::Result<u64> {
    let mut failed = 0;
    while !ending.load(Ordering::Relaxed) {
        if let Ok(channel) = dialer.connect() {
            // In TLS 1.3 the client is ready before the server has looked at its certificate.
            let (mut reader, _writer) = channel.split();
            reader.set_timeout(Some(PATIENCE))?;
            if reader.read(&mut [0]).is_ok_and(|bytes| bytes > 0) {
                bail!("the destination has talked to a stranger");
            }
        }
        failed += 1;
        std::thread::sleep(PAUSE);
    }
    Ok(failed)
}

fn allow_descriptors(wanted: u64) -> anyhow::Result<()> {
    let now = getrlimit(Resource::Nofile);
    if now.current.is_some_and(|current| current < wanted) {
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..now })
            .with_context(|| format!("{wanted} open files are not allowed"))?;
    }
    Ok(())
}
