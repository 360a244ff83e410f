//! vmferry's post-copy of an attached QEMU, by the library, with a thread in each namespace.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use vmferry::config::PostCopy;
use vmferry::config::compression::CompressionWay;
use vmferry::destination::{Received, Stop, receive};
use vmferry::source::{Orders, SourceOutcome, migrate as send};
use vmferry::stats::{DestinationStats, SourceStats};
use vmferry::{DestinationConfig, SourceConfig};
use vmferry_net_lab::{DESTINATION_ADDRESS, Namespaces, enter};
use vmferry_qemu::{Expected, QemuDestination, QemuSource};
use vmferry_transport::{Address, Dialer, Listener, TlsIdentity};

use super::DOWNTIME_LIMIT;
use super::observed::Sample;
use super::pair::Ends;
use crate::qemus::Lab;

/// Moves the guest over TLS, and switches it over after the first round.
pub fn migrate(
    lab: &Lab,
    namespaces: &Namespaces,
    ends: &Ends,
    compressed: bool,
) -> anyhow::Result<Sample> {
    let identity = Arc::new(identity(&lab.tls)?);
    let directory = tempfile::tempdir_in(lab.world.path_on_tmpfs(""))?;
    let (bound, address) = crossbeam_channel::bounded::<Address>(1);
    let (source, destination) = std::thread::scope(|scope| {
        let there = scope.spawn(|| -> anyhow::Result<DestinationStats> {
            enter(File::open(namespaces.destination_path())?.as_fd())?;
            let vm = QemuDestination::attach(&ends.there, Expected::default())?;
            let at = format!("tls:{DESTINATION_ADDRESS}:0").parse()?;
            let listener = Listener::bind(&at, Some(Arc::clone(&identity)))?;
            bound.send(listener.local_address().clone())?;
            let mut config = DestinationConfig::new(directory.path().join("there"));
            config.once = true;
            match receive(listener, vm, &config, &Stop::default(), &mut |_| {}) {
                Received::Owns(owned) => Ok(owned.stats),
                Received::Nothing { error, .. } => bail!("{}", vmferry::chain(&error)),
            }
        });
        let here = scope.spawn(|| -> anyhow::Result<SourceStats> {
            enter(File::open(namespaces.source_path())?.as_fd())?;
            let address = address.recv().context("the destination has not listened")?;
            let dialer = Dialer::new(address, Some(Arc::clone(&identity)));
            let mut config = SourceConfig::new(directory.path().join("here"));
            config.post_copy = PostCopy::Now;
            config.downtime_limit = DOWNTIME_LIMIT;
            if !compressed {
                config.compression.way = CompressionWay::Off;
                config.compression.delta_memory = 0;
            }
            let vm = QemuSource::attach(&ends.here)?;
            match send(vm, &dialer, config, &Orders::default(), &mut |_| {}) {
                SourceOutcome::Given { stats, .. } => Ok(*stats),
                SourceOutcome::Kept { error, .. } | SourceOutcome::Lost { error, .. } => {
                    bail!("{}", vmferry::chain(&error))
                }
            }
        });
        (here.join(), there.join())
    });
    let panicked = |_| anyhow!("a thread panicked");
    let destination = destination.map_err(panicked)?;
    let source = source.map_err(panicked)?.context("the source")?;
    let destination = destination.context("the destination")?;
    Sample::of(&serde_json::to_value(source)?, &serde_json::to_value(destination)?)
}

fn identity(directory: &Path) -> anyhow::Result<TlsIdentity> {
    let file = |name: &str| directory.join(name);
    Ok(TlsIdentity::load(&file("ca.pem"), &file("host.pem"), &file("host.key"))?)
}
