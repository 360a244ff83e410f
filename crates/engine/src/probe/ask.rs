//! The source's side of a probe.

use std::time::{Duration, Instant};

use serde::Serialize;
use vmferry_transport::{ChannelReader, ChannelWriter, Dialer, PeerIdentity};
use vmferry_wire::{Compared, GuestIdentity, MAX_PROBE_BYTES, ProbeMessage, ReasonCode, Role};

use super::answer::clock_us;
use super::{HostFacts, MOST_LOAD_BYTES, Messages, send};
use crate::config::PROTOCOL_VERSIONS;
use crate::driver::greeting::{Purpose, greet};
use crate::error::MigrateError;
use crate::vmm::GuestDescription;

/// Echoes that measure the round trip and the clock difference.
const ECHOES: u64 = 16;

/// The longest wait for any answer, including the one that follows all bytes on a slow link.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a probe failed.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The host is of a release that does not know probes.
    #[error("the other side is of a release that answers no probes")]
    Older,
    /// The host is answering another probe.
    #[error("the other side is answering another probe: try again in some seconds")]
    Busy,
    /// Any other failure: the host can't be reached, or is not trusted.
    #[error(transparent)]
    Failed(#[from] MigrateError),
}

/// The result of a probe.
#[derive(Clone, Debug)]
pub struct Probed {
    /// The host's identity, from its certificate.
    pub peer: PeerIdentity,
    /// Why the host would refuse this host or the guest; none if it would not.
    pub refusal: Option<String>,
    /// The facts about the host; empty if it does not disclose them to this host.
    pub host: HostFacts,
    /// Whether the VMM that waits there could take the guest's machine; none if no machine was
    /// described, or if the host does not compare machines.
    pub compared: Option<Compared>,
    /// The link's figures; none if they were not measured because this host may send nothing there.
    pub link: Option<LinkFigures>,
}

/// Measurements of a link.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LinkFigures {
    /// The shortest round trip, in milliseconds.
    pub round_trip_ms: f64,
    /// How far the other clock is ahead of this one, in milliseconds; negative if it is behind.
    pub clock_ahead_ms: f64,
    /// Bytes that were sent and that the other side has read.
    pub bytes: u64,
    /// From the first byte to the answer after the last one, in milliseconds.
    pub load_ms: f64,
}

impl LinkFigures {
    /// The throughput of one channel, in bytes per second.
    #[must_use]
    pub fn bytes_per_s(&self) -> f64 {
        // The answer arrives half a round trip after the last byte was read, and the first byte
        // arrives half a round trip after the start.
        let ms = (self.load_ms - self.round_trip_ms).max(self.load_ms / 2.0).max(1e-3);
        self.bytes as f64 / (ms / 1e3)
    }
}

/// The guest that a probe is about.
#[derive(Clone, Copy, Debug)]
pub enum About<'a> {
    /// No guest: the host alone.
    Host,
    /// A guest of which the identity is known.
    Guest(&'a GuestIdentity),
    /// A guest whose machine the other host's VMM shall compare with its own.
    Machine(&'a GuestDescription),
}

impl About<'_> {
    fn identity(&self) -> Option<&GuestIdentity> {
        match self {
            Self::Host => None,
            Self::Guest(identity) => Some(identity),
            Self::Machine(guest) => Some(&guest.identity),
        }
    }
}

/// Probes the host that `dialer` reaches, and loads the link for `load`, at most
/// [`LOAD_TIME`](super::LOAD_TIME). `watch` is called periodically with the time spent so far and
/// the number of bytes sent.
///
/// # Errors
/// See [`ProbeError`].
pub fn probe(
    dialer: &Dialer,
    about: About<'_>,
    load: Duration,
    watch: &mut dyn FnMut(Duration, u64),
) -> Result<Probed, ProbeError> {
    let channel = dialer.connect().map_err(MigrateError::from)?;
    let peer = channel.peer().clone();
    let (mut reader, mut writer) = channel.split();
    reader.set_timeout(Some(PATIENCE)).map_err(MigrateError::from)?;
    writer.set_timeout(Some(PATIENCE)).map_err(MigrateError::from)?;
    let purpose = Purpose::control(Role::Probe);
    greet(&mut reader, &mut writer, purpose, &PROTOCOL_VERSIONS, &peer.address)
        .map_err(not_greeted)?;
    send(&mut writer, &ProbeMessage::Ask { guest: about.identity().cloned() })?;
    let mut messages = Messages::new(&mut reader);
    let ProbeMessage::Tell { refusal, facts } = messages.receive()? else {
        return Err(messages.bad("it does not answer what it was asked").into());
    };
    // Facts of a newer release that this one can't parse count as no facts.
    let host: HostFacts = serde_json::from_slice(&facts).unwrap_or_default();
    let compared = match about {
        About::Machine(guest) if host.compares && refusal.is_none() => {
            Some(compare(&mut messages, &mut writer, guest)?)
        }
        _ => None,
    };
    let link = if facts.is_empty() && refusal.is_some() {
        None
    } else {
        Some(measure(&mut messages, &mut writer, load, watch)?)
    };
    let _ = writer.finish();
    // The peer admits the next probe before it closes the channel.
    let _ = messages.receive();
    Ok(Probed { peer, refusal, host, compared, link })
}

/// A refused role is one that the peer's release does not know.
fn not_greeted(error: MigrateError) -> ProbeError {
    match &error {
        MigrateError::Refused { reason, .. } => match reason.code {
            ReasonCode::Unauthorized => ProbeError::Older,
            ReasonCode::Busy => ProbeError::Busy,
            _ => error.into(),
        },
        _ => error.into(),
    }
}

fn compare(
    messages: &mut Messages<&mut ChannelReader>,
    writer: &mut ChannelWriter,
    guest: &GuestDescription,
) -> Result<Compared, MigrateError> {
    let GuestDescription { vmm, config, layout, .. } = guest.clone();
    send(writer, &ProbeMessage::Compare { vmm, config, layout })?;
    match messages.receive()? {
        ProbeMessage::Compared(compared) => Ok(compared),
        other => Err(messages.bad(&format!("{} is no answer to COMPARE", other.name()))),
    }
}

fn measure(
    messages: &mut Messages<&mut ChannelReader>,
    writer: &mut ChannelWriter,
    load: Duration,
    watch: &mut dyn FnMut(Duration, u64),
) -> Result<LinkFigures, MigrateError> {
    let mut best: Option<(Duration, f64)> = None;
    for nonce in 0..ECHOES {
        let (begun, ours) = (Instant::now(), clock_us());
        let theirs = echo(messages, writer, nonce)?;
        let took = begun.elapsed();
        // The other clock was presumably read in the middle of the round trip.
        let ahead = (theirs as f64 - ours as f64) / 1e3 - took.as_secs_f64() * 1e3 / 2.0;
        if best.is_none_or(|(shortest, _)| took < shortest) {
            best = Some((took, ahead));
        }
    }
    let (round_trip, clock_ahead_ms) = best.unwrap_or_default();
    // The filler must be incompressible and cheap to generate, so that neither affects the link's
    // figures.
    let mut filler = vec![0; MAX_PROBE_BYTES as usize / 2];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for chunk in filler.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes());
    }
    let mut message = Vec::new();
    let each = filler.len() as u64;
    ProbeMessage::Load { filler }.encode(&mut message);
    let begun = Instant::now();
    let (mut bytes, mut told) = (0, Duration::ZERO);
    let load = load.min(super::LOAD_TIME);
    while begun.elapsed() < load && bytes + each <= MOST_LOAD_BYTES {
        std::io::Write::write_all(writer, &message)
            .map_err(|error| crate::link::lost("probe", "loading the link", &error))?;
        bytes += each;
        let elapsed = begun.elapsed();
        if elapsed - told >= Duration::from_millis(100) {
            told = elapsed;
            watch(elapsed, bytes);
        }
    }
    echo(messages, writer, ECHOES)?;
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let load_ms = ms(begun.elapsed());
    Ok(LinkFigures { round_trip_ms: ms(round_trip), clock_ahead_ms, bytes, load_ms })
}

/// Reads the other clock with an echo.
fn echo(
    messages: &mut Messages<&mut ChannelReader>,
    writer: &mut ChannelWriter,
    nonce: u64,
) -> Result<u64, MigrateError> {
    send(writer, &ProbeMessage::Echo { nonce })?;
    match messages.receive()? {
        ProbeMessage::Echoed { nonce: echoed, clock_us } if echoed == nonce => Ok(clock_us),
        other => Err(messages.bad(&format!("{} is not the echo that was asked for", other.name()))),
    }
}
