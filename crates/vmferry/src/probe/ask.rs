//! The side that asks.

use std::time::{Duration, Instant};

use serde::Serialize;
use vmferry_transport::{ChannelReader, ChannelWriter, Dialer, PeerIdentity};
use vmferry_wire::{GuestIdentity, MAX_PROBE_BYTES, ProbeMessage, ReasonCode, Role};

use super::answer::clock_us;
use super::{HostFacts, MOST_LOAD_BYTES, Messages, send};
use crate::config::PROTOCOL_VERSIONS;
use crate::error::MigrateError;
use crate::greeting::{Purpose, greet};

/// Echoes by which the round trip and the other clock are measured.
const ECHOES: u64 = 16;

/// How long any answer may take, the one behind all bytes of a slow link included.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a host could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// It answers as releases do that know no probes.
    #[error("the other side is of a release that answers no probes")]
    Older,
    /// It answers another probe.
    #[error("the other side is being asked by somebody else: try again in some seconds")]
    Busy,
    /// Anything else: it can't be reached, or is not trusted.
    #[error(transparent)]
    Failed(#[from] MigrateError),
}

/// What a host has answered.
#[derive(Clone, Debug)]
pub struct Probed {
    /// Who it is, by its certificate.
    pub peer: PeerIdentity,
    /// Why it would refuse this host or the guest; none if it would not.
    pub refusal: Option<String>,
    /// What it has; empty if it tells nothing to this host.
    pub host: HostFacts,
    /// The link; none if it was not measured, since this host may send nothing there.
    pub link: Option<LinkFigures>,
}

/// What was measured of a link.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LinkFigures {
    /// The shortest round trip, in milliseconds.
    pub round_trip_ms: f64,
    /// What the other clock is ahead of this one, in milliseconds; behind, if it is below 0.
    pub clock_ahead_ms: f64,
    /// Bytes that were sent, and that the other side has read.
    pub bytes: u64,
    /// From the first byte to the answer behind the last one, in milliseconds.
    pub load_ms: f64,
}

impl LinkFigures {
    /// What one channel carries, in bytes per second.
    #[must_use]
    pub fn bytes_per_s(&self) -> f64 {
        // The answer is half a round trip behind the last byte, and the first byte as much behind
        // the start.
        let ms = (self.load_ms - self.round_trip_ms).max(self.load_ms / 2.0).max(1e-3);
        self.bytes as f64 / (ms / 1e3)
    }
}

/// Asks the host that `dialer` reaches, whether about a `guest` or not, and loads the link for
/// `load`, at most [`LOAD_TIME`](super::LOAD_TIME). `watch` is told now and then for how long that
/// has gone on, and how many bytes were sent.
///
/// # Errors
/// See [`ProbeError`].
pub fn probe(
    dialer: &Dialer,
    guest: Option<&GuestIdentity>,
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
    send(&mut writer, &ProbeMessage::Ask { guest: guest.cloned() })?;
    let mut messages = Messages::new(&mut reader);
    let ProbeMessage::Tell { refusal, facts } = messages.receive()? else {
        return Err(messages.bad("it does not answer what it was asked").into());
    };
    // A newer release may tell what this one can't read; then it tells nothing.
    let host = serde_json::from_slice(&facts).unwrap_or_default();
    let link = if facts.is_empty() && refusal.is_some() {
        None
    } else {
        Some(measure(&mut messages, &mut writer, load, watch)?)
    };
    let _ = writer.finish();
    Ok(Probed { peer, refusal, host, link })
}

/// A role that is not served is one that the release does not know.
fn not_greeted(error: MigrateError) -> ProbeError {
    match &error {
        MigrateError::Refused { reason, .. } => match reason.code {
            ReasonCode::Unauthorised => ProbeError::Older,
            ReasonCode::Busy => ProbeError::Busy,
            _ => error.into(),
        },
        _ => error.into(),
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
        // Theirs was read in the middle, as far as one can know.
        let ahead = (theirs as f64 - ours as f64) / 1e3 - took.as_secs_f64() * 1e3 / 2.0;
        if best.is_none_or(|(shortest, _)| took < shortest) {
            best = Some((took, ahead));
        }
    }
    let (round_trip, clock_ahead_ms) = best.unwrap_or_default();
    // Neither compressible nor costly to make: the link's figures must not depend on either.
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

/// The other clock, by an echo.
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
