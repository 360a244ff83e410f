//! Migration by the engine: an idle guest moves between two threads of this process over real
//! sockets.

use std::sync::Arc;

use tempfile::TempDir;
use vmferry::config::ChannelCount;
use vmferry::{DestinationConfig, SourceConfig};
use vmferry_memory::GuestMemory;
use vmferry_transport::{Address, Dialer, Listener, TlsIdentity, pki};

use super::Sample;
use crate::guest::{Incoming, MemoryGuest, migrate_here};
use crate::machine::process_cpu_s;
use crate::raw::Tls;

/// Certificates and journals for the runs.
pub struct Links {
    pub directory: TempDir,
    pub identity: Arc<TlsIdentity>,
    pub raw: Tls,
}

impl Links {
    pub fn new() -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let (authority, host) = (directory.path().join("ca"), directory.path().join("host"));
        pki::init(&authority, "bench", pki::Validity::days(1))?;
        let mut request = pki::IssueRequest::new("bench", pki::Validity::days(1));
        request.addresses.push("127.0.0.1".into());
        pki::issue(&authority, &host, &request)?;
        let identity = TlsIdentity::load(
            &host.join("ca.pem"),
            &host.join("host.pem"),
            &host.join("host.key"),
        )?;
        let raw = Tls::load(&host)?;
        Ok(Self { directory, identity: Arc::new(identity), raw })
    }
}

/// Migrates the memory once.
pub fn migrate(
    source: &GuestMemory,
    destination: &GuestMemory,
    channels: u8,
    links: &Links,
    tls: bool,
) -> anyhow::Result<Sample> {
    let (host, port) = ("127.0.0.1".to_owned(), 0);
    let address = if tls { Address::Tls { host, port } } else { Address::Tcp { host, port } };
    let identity = tls.then(|| Arc::clone(&links.identity));
    let listener = Listener::bind(&address, identity.clone())?;
    let dialer = Dialer::new(listener.local_address().clone(), identity);
    let mut config = SourceConfig::new(links.directory.path().join("source"));
    config.channels = ChannelCount::new(channels)?;
    let there = DestinationConfig::new(links.directory.path().join("destination"));
    let vm = MemoryGuest::idle(source);
    let incoming = Incoming(destination.clone());
    let cpu_before = process_cpu_s();
    let (stats, owned) = migrate_here((vm, &dialer, config), (incoming, listener, &there))?;
    let cpu_s = process_cpu_s() - cpu_before;
    Ok(Sample {
        total_s: stats.total_ms / 1e3,
        cpu_s,
        sides_cpu_s: Some((stats.engine_cpu_s, owned.stats.engine_cpu_s)),
    })
}
