//! How many refusals of a peer are told. A peer that is refused again and again must not fill the
//! log.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use crate::greeting::origin;

/// Refusals of one peer that are told in quick succession, and how long it takes until one more is
/// told. A program such as `virsh` makes a few refused calls at once.
const TOLD_AT_ONCE: u32 = 20;
const ONE_MORE: Duration = Duration::from_secs(1);

/// How often the number of the others is told.
const COUNT_PERIOD: Duration = Duration::from_secs(10);

/// Peers that are told apart. More of them share one entry.
const MAX_PEERS: usize = 1024;

/// The entry that they share.
const OTHERS: &str = "other hosts";

/// The refusals of all peers.
#[derive(Debug, Default)]
pub struct Refusals(HashMap<String, OfPeer>);

#[derive(Debug)]
struct OfPeer {
    /// How many may be told now, at `at`.
    left: u32,
    at: Instant,
    /// Those that were not told, since `counting`.
    counted: u64,
    counting: Instant,
}

impl Refusals {
    /// Whether this refusal is told. If not, it is counted.
    pub fn is_told(&mut self, peer: &str, now: Instant) -> bool {
        let mut key = key(peer);
        if !self.0.contains_key(&key) && self.0.len() >= MAX_PEERS {
            key = OTHERS.to_owned();
        }
        let new = || OfPeer { left: TOLD_AT_ONCE, at: now, counted: 0, counting: now };
        let of_peer = self.0.entry(key).or_insert_with(new);
        of_peer.refill(now);
        if of_peer.left > 0 {
            of_peer.left -= 1;
            return true;
        }
        if of_peer.counted == 0 {
            of_peer.counting = now;
        }
        of_peer.counted += 1;
        false
    }

    /// The peers with refusals that were counted for a while, and their numbers. They begin at zero
    /// again.
    pub fn counted(&mut self, now: Instant) -> Vec<(String, u64)> {
        let mut counted = Vec::new();
        self.0.retain(|peer, of_peer| {
            of_peer.refill(now);
            let due = now.duration_since(of_peer.counting) >= COUNT_PERIOD;
            if of_peer.counted > 0 && due {
                counted.push((peer.clone(), std::mem::take(&mut of_peer.counted)));
            }
            of_peer.counted > 0 || of_peer.left < TOLD_AT_ONCE
        });
        counted
    }
}

impl OfPeer {
    fn refill(&mut self, now: Instant) {
        let more = now.duration_since(self.at).as_secs() / ONE_MORE.as_secs();
        let more = u32::try_from(more).unwrap_or(TOLD_AT_ONCE);
        self.left = self.left.saturating_add(more).min(TOLD_AT_ONCE);
        self.at += ONE_MORE * more;
        if self.left == TOLD_AT_ONCE {
            self.at = now;
        }
    }
}

/// What tells peers apart: the name in the certificate, or else the address without its port.
fn key(peer: &str) -> String {
    if let Some((_, name)) = peer.split_once(" (") {
        return name.trim_end_matches(')').to_owned();
    }
    let ip = peer.parse::<SocketAddr>().map(|address| address.ip());
    match ip.or_else(|_| peer.parse::<IpAddr>()) {
        Ok(ip) => origin(Some(ip)).map_or_else(|| peer.to_owned(), |ip| ip.to_string()),
        Err(_) => peer.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flood_of_refusals_is_told_as_a_number() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let mut told = 0;
        for step in 0..6000 {
            // Each connection has another port, for a minute.
            let now = start + Duration::from_millis(10 * step);
            let peer = format!("192.0.2.7:{}", 1024 + step);
            told += u64::from(refusals.is_told(&peer, now));
        }
        assert!((75..=81).contains(&told), "{told}");
        let counted = refusals.counted(start + Duration::from_secs(60));
        assert_eq!(counted, [("192.0.2.7".to_owned(), 6000 - told)]);
        assert!(refusals.is_told("192.0.2.8:1", start + Duration::from_secs(60)));
        // What is quiet is forgotten.
        assert_eq!(refusals.counted(start + Duration::from_secs(600)), []);
        assert!(refusals.0.is_empty());
    }

    #[test]
    fn peers_are_told_apart_by_name_and_network() {
        assert_eq!(key("192.0.2.7:99 (spiffe://vmferry/host/a)"), "spiffe://vmferry/host/a");
        assert_eq!(key("[2001:db8::1]:99"), key("[2001:db8::2]:7"));
        assert_ne!(key("192.0.2.7:99"), key("192.0.2.8:99"));
        assert_eq!(key("a local program"), "a local program");
    }

    #[test]
    fn number_of_peers_is_bounded() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        for number in 0..2 * MAX_PEERS {
            refusals.is_told(&format!("host-{number}"), now);
        }
        assert!(refusals.0.len() <= MAX_PEERS + 1, "{}", refusals.0.len());
    }
}
