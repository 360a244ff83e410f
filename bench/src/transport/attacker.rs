//! An attacker that can reach the destination's port but has no certificate of its authority. It
//! opens connections that send nothing, and starts handshakes that fail_handshakes.

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

/// Pause between two failed handshakes. Unlike a remote attacker, this one takes CPU time from the
/// migration. At a hundred handshakes per second that is a few percent of a processor.
const PAUSE: Duration = Duration::from_millis(10);

/// Timeout for a connection or a rejection.
const TIMEOUT: Duration = Duration::from_secs(2);

/// File descriptors in addition to those of idle connections.
const SPARE_DESCRIPTORS: u64 = 64;

/// A running attack.
pub struct Attacker {
    ending: Arc<AtomicBool>,
    idle: JoinHandle<Vec<TcpStream>>,
    failing: JoinHandle<anyhow::Result<u64>>,
    cpu_before: f64,
}

impl Attacker {
    /// Starts the attack from the calling thread's network namespace.
    ///
    /// # Errors
    /// The address is not a TLS address, or the system allows too few file descriptors.
    pub fn start(address: &str, connections: usize, stranger: TlsIdentity) -> anyhow::Result<Self> {
        allow_descriptors(connections as u64 + SPARE_DESCRIPTORS)?;
        let address: Address = address.parse()?;
        let Address::Tls { host, port } = &address else { bail!("{address} is not a TLS address") };
        let to = SocketAddr::new(host.parse().context("the address is not an IP address")?, *port);
        let mut dialer = Dialer::new(address, Some(Arc::new(stranger)));
        dialer.connect_timeout = TIMEOUT;
        let (ending, cpu_before) = (Arc::new(AtomicBool::new(false)), process_cpu_s());
        let (end, end_too) = (Arc::clone(&ending), Arc::clone(&ending));
        Ok(Self {
            ending,
            idle: std::thread::spawn(move || stay_idle(to, connections, &end)),
            failing: std::thread::spawn(move || fail_handshakes(&dialer, &end_too)),
            cpu_before,
        })
    }

    /// Stops the attack.
    ///
    /// # Errors
    /// The destination did not reject a handshake.
    pub fn cease(self) -> anyhow::Result<Attack> {
        self.ending.store(true, Ordering::Relaxed);
        let cpu_s = process_cpu_s() - self.cpu_before;
        let idle = self.idle.join().map_err(|_| anyhow!("a thread panicked"))?;
        let failed = self.failing.join().map_err(|_| anyhow!("a thread panicked"))?;
        let idle_connections = idle.len() as u64;
        Ok(Attack { idle_connections, failed_handshakes: failed?, cpu_s })
    }
}

/// Opens connections that send nothing. The destination may have closed some of them since.
fn stay_idle(to: SocketAddr, connections: usize, ending: &AtomicBool) -> Vec<TcpStream> {
    let mut idle = Vec::with_capacity(connections);
    while idle.len() < connections && !ending.load(Ordering::Relaxed) {
        match TcpStream::connect_timeout(&to, TIMEOUT) {
            Ok(stream) => idle.push(stream),
            // A destination that refuses connections will not accept one immediately afterwards.
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
    idle
}

/// Starts handshakes and returns how many were rejected.
fn fail_handshakes(dialer: &Dialer, ending: &AtomicBool) -> anyhow::Result<u64> {
    let mut failed = 0;
    while !ending.load(Ordering::Relaxed) {
        if let Ok(channel) = dialer.connect() {
            // In TLS 1.3 the client is ready before the server has checked its certificate.
            let (mut reader, _writer) = channel.split();
            reader.set_timeout(Some(TIMEOUT))?;
            if reader.read(&mut [0]).is_ok_and(|bytes| bytes > 0) {
                bail!("the destination sent data to a client without a trusted certificate");
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
            .with_context(|| format!("could not raise the limit of open files to {wanted}"))?;
    }
    Ok(())
}
