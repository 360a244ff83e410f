//! Probes of other hosts: `vmferry doctor` there asks whether this host admits it and its guest,
//! and what this host is.

use std::fmt::Debug;
use std::io::Write;
use std::sync::{Arc, OnceLock};

use vmferry::MigrateError;
use vmferry::config::PROTOCOL_VERSIONS;
use vmferry::probe::{Gate, HostFacts, answer};
use vmferry_transport::{ChannelReader, ChannelWriter, PeerIdentity, TransportError};
use vmferry_wire::{Hello, HelloReply, HelloStatus, common_version};

use crate::proxy::Shared;

/// Reports this host to hosts that may send guests here.
pub trait HostReport: Debug + Send + Sync {
    /// The facts about this host and its libvirt, now.
    fn facts(&self) -> HostFacts;
}

/// What probes are answered with.
#[derive(Debug, Default)]
pub(crate) struct Probes {
    /// Admits one probe at a time, because a report costs time.
    gate: Gate,
    report: OnceLock<Arc<dyn HostReport>>,
}

impl Probes {
    /// Reports this host from now on. The first report stays.
    pub fn set_report(&self, report: Arc<dyn HostReport>) {
        let _ = self.report.set(report);
    }

    /// Answers a probe after its greeting, until the peer closes the channel.
    ///
    /// # Errors
    /// The policy does not admit the peer, the channel failed, or the peer violates the protocol.
    pub fn answer(
        &self,
        shared: &Shared,
        hello: &Hello,
        reader: &mut ChannelReader,
        writer: &mut ChannelWriter,
        peer: &PeerIdentity,
    ) -> Result<(), MigrateError> {
        let pass = self.gate.enter();
        let status = if pass.is_some() { HelloStatus::Ok } else { HelloStatus::Busy };
        let reply = reply(hello, status).encode();
        writer
            .write_all(&reply)
            .and_then(|()| writer.flush())
            .map_err(|error| TransportError::from_io(error, &peer.address))?;
        let Some(pass) = pass else {
            let _ = writer.finish();
            return Ok(());
        };
        let config = shared.config();
        let policy = config.policy.as_deref();
        // A peer that may send nothing here is told nothing about this host.
        let is_admitted = policy.is_none_or(|policy| policy.check_source(peer).is_ok());
        let report = self.report.get().filter(|_| is_admitted);
        let mut facts = report.map(|report| report.facts()).unwrap_or_default();
        if let Some(libvirt) = &mut facts.libvirt {
            libvirt.qemu_user = Some(config.qemu.uid);
            libvirt.directory = Some(config.directory.clone());
        }
        answer(reader, writer, peer, policy, &facts, None, pass)
    }
}

/// The reply to a greeting, with a version that both sides speak.
fn reply(hello: &Hello, status: HelloStatus) -> HelloReply {
    let (version_min, version_max) = (*PROTOCOL_VERSIONS.start(), *PROTOCOL_VERSIONS.end());
    let version = common_version(&PROTOCOL_VERSIONS, &hello.versions());
    let status = if version.is_some() { status } else { HelloStatus::Version };
    HelloReply { status, version_min, version_max, version: version.unwrap_or(0), placed: 0 }
}
