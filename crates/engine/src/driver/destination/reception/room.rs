//! The room for connections that have not sent anything: limited in number, and fair between
//! addresses.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// The origin of a connection for the purpose of fairness: an IPv4 address, the /64 network of an
/// IPv6 address (all of which one host may control), or no address (a Unix socket).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin(Option<IpAddr>);

impl Origin {
    /// The origin for this peer address.
    pub fn of(peer: Option<IpAddr>) -> Self {
        Self(peer.map(|address| match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) & !u128::from(u64::MAX);
                IpAddr::V6(Ipv6Addr::from(network))
            }
            v4 => v4,
        }))
    }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(IpAddr::V6(network)) => write!(f, "{network}/64"),
            Some(address) => write!(f, "{address}"),
            None => f.write_str("the Unix socket"),
        }
    }
}

/// A waiting connection.
#[derive(Debug)]
pub struct Waiting<T> {
    /// Its origin.
    pub origin: Origin,
    /// When it arrived.
    pub since: Instant,
    /// The connection.
    pub guest: T,
}

/// The waiting connections.
#[derive(Debug)]
pub struct Room<T> {
    seats: usize,
    /// In order of arrival.
    waiting: Vec<Waiting<T>>,
}

impl<T> Room<T> {
    /// An empty room for this number of connections.
    pub fn new(seats: usize) -> Self {
        Self { seats, waiting: Vec::with_capacity(seats + 1) }
    }

    /// Adds a connection. If the room is full, the longest-waiting connection of the origin that
    /// has the most here is removed and returned; that may be the new connection itself.
    pub fn enter(&mut self, origin: Origin, now: Instant, guest: T) -> Option<Waiting<T>> {
        self.waiting.push(Waiting { origin, since: now, guest });
        if self.waiting.len() <= self.seats {
            return None;
        }
        let crowd = most(self.waiting.iter().map(|waiting| waiting.origin))?;
        let oldest = self.waiting.iter().position(|waiting| waiting.origin == crowd)?;
        Some(self.waiting.remove(oldest))
    }

    /// All waiting connections, the oldest first.
    pub fn waiting(&self) -> &[Waiting<T>] {
        &self.waiting
    }

    /// Removes the next connection to admit among those that are `ready`, in the order of
    /// [`waiting`](Self::waiting): one whose origin has the fewest in `busy`, and among these the
    /// one that has waited longest.
    pub fn call(&mut self, ready: &[bool], busy: impl Fn(Origin) -> usize) -> Option<Waiting<T>> {
        let those = self.waiting.iter().zip(ready).enumerate().filter(|(_, (_, ready))| **ready);
        let (next, _) = those.min_by_key(|(_, (waiting, _))| busy(waiting.origin))?;
        Some(self.waiting.remove(next))
    }

    /// Removes all connections that have been silent for this long.
    pub fn expire(&mut self, now: Instant, patience: Duration) -> Vec<Waiting<T>> {
        let stay = |waiting: &Waiting<T>| now.saturating_duration_since(waiting.since) < patience;
        // They are in order of arrival.
        let gone = self.waiting.iter().position(stay).unwrap_or(self.waiting.len());
        self.waiting.drain(..gone).collect()
    }

    /// When [`expire`](Self::expire) has a connection to remove.
    pub fn next_expiry(&self, patience: Duration) -> Option<Instant> {
        self.waiting.first().map(|waiting| waiting.since + patience)
    }
}

/// The most frequent origin; among several, the one that came first.
pub fn most(origins: impl Iterator<Item = Origin>) -> Option<Origin> {
    let mut counts: BTreeMap<Origin, (usize, usize)> = BTreeMap::new();
    for (place, origin) in origins.enumerate() {
        counts.entry(origin).or_insert((0, place)).0 += 1;
    }
    let rank = |(count, place): (usize, usize)| (count, std::cmp::Reverse(place));
    counts.into_iter().max_by_key(|(_, found)| rank(*found)).map(|(origin, _)| origin)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(last: u8) -> Origin {
        Origin::of(Some(IpAddr::from([127, 0, 0, last])))
    }

    #[test]
    fn room_displaces_only_the_crowding_address() {
        let now = Instant::now();
        let mut room = Room::new(3);
        assert!(room.enter(from(1), now, "honest").is_none());
        assert!(room.enter(from(2), now, "a").is_none());
        assert!(room.enter(from(2), now, "b").is_none());
        for (next, gone) in [("c", "a"), ("d", "b"), ("e", "c")] {
            assert_eq!(room.enter(from(2), now, next).unwrap().guest, gone);
        }
        assert_eq!(room.enter(from(3), now, "late").unwrap().guest, "d");
        let left: Vec<&str> = room.waiting().iter().map(|waiting| waiting.guest).collect();
        assert_eq!(left, ["honest", "e", "late"]);
    }

    #[test]
    fn room_serves_the_least_crowded_address_first() {
        let now = Instant::now();
        let mut room = Room::new(9);
        for (origin, guest) in [(1, "silent"), (2, "a"), (2, "b"), (3, "c")] {
            room.enter(from(origin), now, guest);
        }
        let mut called = Vec::new();
        loop {
            let ready: Vec<bool> = room.waiting().iter().map(|w| w.guest != "silent").collect();
            match room.call(&ready, |origin| usize::from(origin == from(2))) {
                Some(next) => called.push(next.guest),
                None => break,
            }
        }
        assert_eq!(called, ["c", "a", "b"]);
    }

    #[test]
    fn room_limits_silence() {
        let now = Instant::now();
        let patience = Duration::from_secs(10);
        let mut room = Room::new(9);
        room.enter(from(1), now, "early");
        room.enter(from(1), now + Duration::from_secs(1), "later");
        assert_eq!(room.next_expiry(patience), Some(now + patience));
        assert!(room.expire(now + patience - Duration::from_millis(1), patience).is_empty());
        assert_eq!(room.expire(now + patience, patience)[0].guest, "early");
        assert_eq!(room.waiting().len(), 1);
    }

    #[test]
    fn room_counts_an_ipv6_host_by_its_network() {
        let origin = |text: &str| Origin::of(Some(text.parse().unwrap()));
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::ffff:1"));
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:1::1"));
        assert_eq!(origin("::ffff:192.0.2.1"), origin("192.0.2.1"));
        assert_eq!(origin("2001:db8::1").to_string(), "2001:db8::/64");
    }
}
