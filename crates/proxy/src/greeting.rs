//! Connections of peers that greet: limited in number and in time, and fair between addresses.
//!
//! A connection is a thread, and a peer without a certificate can make one. So connections greet in
//! limited places, and a slow one loses its place to a new one.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmferry_transport::ChannelCloser;

/// Connections that greet at the same time.
const MAX_GREETING: usize = 64;

/// Connections from one address that greet at the same time. A host whose links have all been cut
/// dials again after a moment if it gets no place.
const MAX_OF_ONE: usize = 16;

/// How long a connection keeps its place while others need one. A handshake takes two round trips.
const KEPT: Duration = Duration::from_secs(1);

/// Streams that one authenticated peer may be opening at the same time, with a local program that
/// may be slow.
const MAX_OPENING_OF_ONE: usize = 32;

/// Connections that were closed for others and whose threads have not ended yet, at most.
const MAX_CLOSED: usize = 64;

/// What counts as one address: an IPv4 address, or the /64 network of an IPv6 address, all of which
/// one host may have. `None` for a Unix socket.
pub fn origin(address: Option<IpAddr>) -> Option<IpAddr> {
    address.map(|address| match address.to_canonical() {
        IpAddr::V6(address) => {
            IpAddr::V6(Ipv6Addr::from(u128::from(address) & !u128::from(u64::MAX)))
        }
        v4 => v4,
    })
}

/// The connections that greet.
#[derive(Debug, Default)]
pub struct Greeting(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// In the order in which they came.
    greeting: Vec<Place>,
    /// Those that were closed and whose threads still run.
    closed: usize,
    /// The peers that open streams.
    opening: Vec<String>,
    numbers: u64,
}

#[derive(Debug)]
struct Place {
    number: u64,
    origin: Option<IpAddr>,
    since: Instant,
    closer: Option<ChannelCloser>,
}

/// The place of a connection. It is free again when this is dropped.
#[derive(Debug)]
pub struct GreetingPlace {
    all: Arc<Greeting>,
    number: u64,
}

/// An authenticated peer that opens a stream.
#[derive(Debug)]
pub struct OpeningPlace {
    all: Arc<Greeting>,
    peer: String,
}

impl Greeting {
    /// A place for a connection; `None` if it must be closed. `closer` closes it when its time is
    /// over.
    pub fn enter(
        self: &Arc<Self>,
        address: Option<IpAddr>,
        closer: Option<ChannelCloser>,
        now: Instant,
    ) -> Option<GreetingPlace> {
        let mut state = self.0.lock();
        let origin = origin(address);
        let of_one = state.greeting.iter().filter(|place| place.origin == origin).count();
        if of_one >= MAX_OF_ONE {
            state.make_room(origin, now)?;
        } else if state.greeting.len() >= MAX_GREETING {
            let crowded = state.most_crowded();
            state.make_room(crowded, now)?;
        }
        state.numbers += 1;
        let number = state.numbers;
        state.greeting.push(Place { number, origin, since: now, closer });
        Some(GreetingPlace { all: Arc::clone(self), number })
    }

    /// Closes connections that have greeted for longer than `limit`.
    pub fn close_slow(&self, limit: Duration, now: Instant) {
        let mut state = self.0.lock();
        while let Some(oldest) = state.greeting.first()
            && now.duration_since(oldest.since) >= limit
        {
            state.close(0);
        }
    }

    /// A place for an authenticated peer that opens a stream; `None` if it opens too many.
    pub fn open(self: &Arc<Self>, peer: &str) -> Option<OpeningPlace> {
        let mut state = self.0.lock();
        if state.opening.iter().filter(|one| *one == peer).count() >= MAX_OPENING_OF_ONE {
            return None;
        }
        state.opening.push(peer.to_owned());
        Some(OpeningPlace { all: Arc::clone(self), peer: peer.to_owned() })
    }
}

impl State {
    /// The address with the most connections.
    fn most_crowded(&self) -> Option<IpAddr> {
        let of_one = |origin| self.greeting.iter().filter(|place| place.origin == origin).count();
        let most = self.greeting.iter().max_by_key(|place| of_one(place.origin));
        most.and_then(|place| place.origin)
    }

    /// Closes the oldest connection of this address, if it has had its time.
    fn make_room(&mut self, origin: Option<IpAddr>, now: Instant) -> Option<()> {
        let oldest = self.greeting.iter().position(|place| place.origin == origin)?;
        let kept = now.duration_since(self.greeting[oldest].since) < KEPT;
        if kept || self.closed >= MAX_CLOSED {
            return None;
        }
        self.close(oldest);
        Some(())
    }

    fn close(&mut self, index: usize) {
        let place = self.greeting.remove(index);
        self.closed += 1;
        if let Some(closer) = place.closer {
            closer.close();
        }
    }
}

impl Drop for GreetingPlace {
    fn drop(&mut self) {
        let mut state = self.all.0.lock();
        match state.greeting.iter().position(|place| place.number == self.number) {
            Some(index) => drop(state.greeting.remove(index)),
            None => state.closed -= 1,
        }
    }
}

impl Drop for OpeningPlace {
    fn drop(&mut self) {
        let mut state = self.all.0.lock();
        if let Some(index) = state.opening.iter().position(|peer| *peer == self.peer) {
            state.opening.swap_remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Greeting {
        /// Those that greet, and those that were closed.
        fn numbers(&self) -> (usize, usize) {
            let state = self.0.lock();
            (state.greeting.len(), state.closed)
        }
    }

    fn address(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, last]))
    }

    #[test]
    fn new_connection_takes_the_place_of_a_slow_one_of_its_address() {
        let (all, start) = (Arc::new(Greeting::default()), Instant::now());
        let mut places: Vec<_> = (0..MAX_OF_ONE)
            .map(|step| all.enter(address(1), None, start + Duration::from_millis(step as u64)))
            .collect();
        assert!(places.iter().all(Option::is_some));
        assert!(all.enter(address(1), None, start + KEPT / 2).is_none());
        assert!(all.enter(address(2), None, start + KEPT / 2).is_some());
        let later = all.enter(address(1), None, start + KEPT).unwrap();
        assert_eq!(all.numbers(), (MAX_OF_ONE, 1));
        // The thread of the closed one ends.
        drop(places.remove(0));
        assert_eq!(all.numbers(), (MAX_OF_ONE, 0));
        drop((places, later));
        assert!(all.0.lock().greeting.is_empty());
    }

    #[test]
    fn crowd_of_addresses_gives_way() {
        let (all, start) = (Arc::new(Greeting::default()), Instant::now());
        let mut places = Vec::new();
        // Half of the places belong to two addresses, the others to one connection each.
        for number in 0..MAX_GREETING as u8 {
            let last = if number < 32 { number % 2 } else { number };
            places.push(all.enter(address(last), None, start).unwrap());
        }
        assert!(all.enter(address(200), None, start).is_none(), "all have just come");
        let _place = all.enter(address(200), None, start + KEPT).unwrap();
        let state = all.0.lock();
        let of = |last| state.greeting.iter().filter(|one| one.origin == address(last)).count();
        assert_eq!((of(0) + of(1), of(33), of(200)), (31, 1, 1));
    }

    #[test]
    fn connections_that_were_closed_are_bounded_too() {
        let (all, start) = (Arc::new(Greeting::default()), Instant::now());
        let mut places = Vec::new();
        for second in 0..1000 {
            places.extend(all.enter(address(1), None, start + KEPT * second));
        }
        assert_eq!(places.len(), MAX_OF_ONE + MAX_CLOSED);
        all.close_slow(Duration::ZERO, start + KEPT * 2000);
        assert!(all.0.lock().greeting.is_empty());
    }

    #[test]
    fn ipv6_hosts_are_told_apart_by_their_networks() {
        let of = |text: &str| origin(Some(text.parse().unwrap()));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), address(1));
    }

    #[test]
    fn one_peer_opens_only_so_many_streams_at_a_time() {
        let all = Arc::new(Greeting::default());
        let places: Vec<_> = (0..MAX_OPENING_OF_ONE).map(|_| all.open("a").unwrap()).collect();
        assert!(all.open("a").is_none());
        let other = all.open("b");
        assert!(other.is_some());
        drop((places, other));
        assert!(all.0.lock().opening.is_empty());
    }
}
