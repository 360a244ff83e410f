//! The destination's side of a probe.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use vmferry_transport::{ChannelReader, ChannelWriter, PeerIdentity};
use vmferry_wire::{Compared, GuestIdentity, MAX_FACTS_BYTES, MAX_REFUSAL_BYTES, ProbeMessage};

use super::{HostFacts, LOAD_TIME, MOST_ECHOES, MOST_LOAD_BYTES, Messages, PROBE_TIME, send};
use crate::config::policy::Admission;
use crate::error::MigrateError;
use crate::vmm::GuestDescription;

/// Compares a machine with the VMM that waits, within a time limit.
pub type Comparer<'a> = &'a dyn Fn(GuestDescription, Duration) -> Compared;

/// Admits one probe at a time.
#[derive(Debug, Default)]
pub struct Gate(AtomicBool);

/// An admitted probe. The next one is admitted when this is dropped.
pub struct Pass<'a>(&'a AtomicBool);

impl Gate {
    /// Admits a probe, or returns none while another one is active.
    pub fn enter(&self) -> Option<Pass<'_>> {
        let free = self.0.compare_exchange(false, true, Ordering::AcqRel, Ordering::Acquire);
        free.is_ok().then(|| Pass(&self.0))
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Answers a probe after its greeting, until the peer closes the channel. Gives `pass` back before
/// the peer can see the end of the channel, so that the peer may ask again at once. Without a
/// `comparer`, the facts do not say that this host compares machines.
///
/// [`MigrateError::Refused`] for a source that the policy does not admit, which receives the
/// refusal and nothing else. Otherwise the error of the channel or the peer's violation of the
/// protocol.
pub fn answer(
    reader: &mut ChannelReader,
    writer: &mut ChannelWriter,
    peer: &PeerIdentity,
    policy: Option<&dyn Admission>,
    host: &HostFacts,
    comparer: Option<Comparer<'_>>,
    pass: Pass<'_>,
) -> Result<(), MigrateError> {
    let deadline = Instant::now() + PROBE_TIME;
    let mut budget = Budget::default();
    let mut messages = Messages::new(reader);
    let ProbeMessage::Ask { guest } = messages.receive()? else {
        return Err(messages.bad("a probe begins with ASK"));
    };
    let refused = policy.and_then(|policy| policy.check_source(peer).err());
    let is_refused = refused.is_some();
    let refusal = refused.or_else(|| check_guest(policy, peer, guest.as_ref()));
    // A peer that may send nothing here learns that and nothing about this host.
    let facts = if is_refused { Vec::new() } else { told(host, comparer.is_some()) };
    let mut may_compare = guest.filter(|_| refusal.is_none());
    let shown = refusal.as_deref().map(bounded);
    send(writer, &ProbeMessage::Tell { refusal: shown, facts })?;
    if is_refused {
        drop(pass);
        let _ = writer.finish();
        let text = refusal.unwrap_or_default();
        let reason = vmferry_wire::Reason::new(vmferry_wire::ReasonCode::Unauthorized, &text);
        return Err(MigrateError::Refused { peer: "destination", reason });
    }
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(messages.bad("the probe took too long"));
        }
        messages.reader.set_timeout(Some(left))?;
        let message = match messages.receive() {
            Ok(message) => message,
            // A peer that is done closes the channel.
            Err(MigrateError::LinkLost { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        match message {
            ProbeMessage::Echo { nonce } => {
                budget.echo().map_err(|reason| messages.bad(reason))?;
                send(writer, &ProbeMessage::Echoed { nonce, clock_us: clock_us() })?;
            }
            ProbeMessage::Load { filler } => {
                let bytes = filler.len() as u64;
                budget.load(bytes, Instant::now()).map_err(|reason| messages.bad(reason))?;
            }
            ProbeMessage::Compare { vmm, config, layout } => {
                let compared = match (may_compare.take(), comparer) {
                    (Some(identity), Some(compare)) => {
                        let guest = GuestDescription { identity, vmm, config, layout };
                        bounded_answer(compare(guest, left))
                    }
                    _ => Compared::Unknown("no guest that may come here was named before".into()),
                };
                send(writer, &ProbeMessage::Compared(compared))?;
            }
            other => return Err(messages.bad(&format!("{} is no question", other.name()))),
        }
    }
}

fn check_guest(
    policy: Option<&dyn Admission>,
    peer: &PeerIdentity,
    guest: Option<&GuestIdentity>,
) -> Option<String> {
    policy?.check_guest(peer, guest?).err()
}

/// What a probe has used up of its limits.
#[derive(Default)]
struct Budget {
    echoes: u32,
    loaded: u64,
    since: Option<Instant>,
}

impl Budget {
    fn echo(&mut self) -> Result<(), &'static str> {
        self.echoes += 1;
        if self.echoes <= MOST_ECHOES { Ok(()) } else { Err("it asks for too many echoes") }
    }

    fn load(&mut self, bytes: u64, now: Instant) -> Result<(), &'static str> {
        /// Time for data in flight when the other side stops, at 100 KB/s.
        const GRACE: Duration = Duration::from_secs(5);
        let since = *self.since.get_or_insert(now);
        self.loaded += bytes;
        if self.loaded > MOST_LOAD_BYTES {
            return Err("it loads the link with too many bytes");
        }
        if bytes == 0 || now.duration_since(since) > LOAD_TIME + GRACE {
            return Err("it loads the link for too long");
        }
        Ok(())
    }
}

/// The same with a text that fits into the message.
fn bounded_answer(compared: Compared) -> Compared {
    match compared {
        Compared::Fits => Compared::Fits,
        Compared::Differs(text) => Compared::Differs(bounded(&text)),
        Compared::Unknown(text) => Compared::Unknown(bounded(&text)),
    }
}

/// Truncates a text to the length limit of its message.
fn bounded(text: &str) -> String {
    let end = (0..=text.len().min(MAX_REFUSAL_BYTES)).rev().find(|end| text.is_char_boundary(*end));
    text[..end.unwrap_or(0)].to_owned()
}

/// The present facts about the host. Empty if they do not fit into the message.
fn told(host: &HostFacts, compares: bool) -> Vec<u8> {
    let host = HostFacts { compares, ..host.clone().with_memory() };
    let facts = serde_json::to_vec(&host).unwrap_or_default();
    if facts.len() > MAX_FACTS_BYTES { Vec::new() } else { facts }
}

/// Microseconds since 1970 by this host's clock; 0 if the clock is before 1970.
pub fn clock_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_admits_one_at_a_time() {
        let gate = Gate::default();
        let pass = gate.enter().expect("it is free");
        assert!(gate.enter().is_none());
        drop(pass);
        assert!(gate.enter().is_some());
    }

    #[test]
    fn budget_ends_with_its_bytes_its_time_and_its_echoes() {
        let now = Instant::now();
        let mut budget = Budget::default();
        for _ in 0..MOST_ECHOES {
            budget.echo().unwrap();
        }
        assert!(budget.echo().is_err());
        assert!(budget.load(0, now).is_err(), "messages without bytes would cost time only");
        budget.load(MOST_LOAD_BYTES, now).unwrap();
        assert!(budget.load(1, now).is_err());
        let mut budget = Budget::default();
        budget.load(1, now).unwrap();
        assert!(budget.load(1, now + LOAD_TIME + Duration::from_secs(6)).is_err());
    }

    #[test]
    fn bounded_cuts_between_characters() {
        assert_eq!(bounded("no"), "no");
        let cut = bounded(&"é".repeat(MAX_REFUSAL_BYTES));
        assert_eq!(cut.len(), MAX_REFUSAL_BYTES);
        assert_eq!(bounded(&format!("x{}", "é".repeat(600))).len(), MAX_REFUSAL_BYTES - 1);
    }
}
