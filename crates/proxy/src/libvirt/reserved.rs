//! The sockets of guests that arrive: which peer may open which, and that no two guests have the
//! same one.
//!
//! A Prepare reserves its guest and its sockets before anything is checked or started for it, in
//! one step. So of two peers that name the same socket or guest at the same time, one is refused.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use vmferry_libvirt_rpc::Guest;
use vmferry_transport::PeerIdentity;

/// Why a Prepare is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// Another guest that arrives has one of the sockets.
    #[error(
        "the socket {directory}/{file} belongs to guest {guest}, which is arriving from {peer}: \
         name another socket in `migrate_uri` and `disks_uri`, or try again when that migration \
         has ended"
    )]
    Socket {
        /// The directory of guests that arrive.
        directory: String,
        /// The socket's name.
        file: String,
        /// The other guest.
        guest: String,
        /// The host that sends it.
        peer: String,
    },
    /// Another host sends a guest with this UUID.
    #[error(
        "the UUID {uuid} belongs to guest {guest}, which is arriving from {peer}: try again when \
         that migration has ended, or give one of the guests another UUID"
    )]
    Guest {
        /// The UUID.
        uuid: uuid::Uuid,
        /// The guest that has it.
        guest: String,
        /// The host that sends it.
        peer: String,
    },
}

/// All sockets of guests that arrive.
#[derive(Debug, Default)]
pub(crate) struct ReservedSockets {
    all: Mutex<Vec<Reserved>>,
    numbers: AtomicU64,
}

/// The sockets of one guest.
#[derive(Debug)]
struct Reserved {
    number: u64,
    /// The RPC connection of the Prepare, by its number.
    connection: u64,
    guest: Guest,
    peer: PeerIdentity,
    directory: String,
    files: Vec<String>,
    /// The Prepare was admitted.
    is_admitted: bool,
}

/// The sockets of a Prepare that is being decided on. They are free again when it is dropped.
#[derive(Debug)]
pub(crate) struct Reservation<'a> {
    sockets: &'a ReservedSockets,
    number: u64,
}

impl ReservedSockets {
    /// Reserves a guest and its sockets for a peer. The peer may send the same guest again with the
    /// same sockets, as after a failure that this host has not noticed yet.
    ///
    /// # Errors
    /// Another guest has one of the sockets, or another peer the guest.
    pub fn reserve(
        &self,
        connection: u64,
        guest: &Guest,
        peer: &PeerIdentity,
        directory: &str,
        files: &[String],
    ) -> Result<Reservation<'_>, ReserveError> {
        let mut all = self.all.lock();
        for one in all.iter() {
            let (of_peer, of_guest) = (one.peer.is_same_as(peer), one.guest.uuid == guest.uuid);
            let (guest, peer) = (one.guest.name.clone(), one.peer.to_string());
            if of_guest && !of_peer {
                return Err(ReserveError::Guest { uuid: one.guest.uuid, guest, peer });
            }
            let is_taken = |file: &&String| one.directory == directory && one.files.contains(file);
            if let Some(file) = files.iter().find(is_taken).filter(|_| !of_guest) {
                let (directory, file) = (directory.to_owned(), file.clone());
                return Err(ReserveError::Socket { directory, file, guest, peer });
            }
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        all.push(Reserved {
            number,
            connection,
            guest: guest.clone(),
            peer: peer.clone(),
            directory: directory.to_owned(),
            files: files.to_vec(),
            is_admitted: false,
        });
        Ok(Reservation { sockets: self, number })
    }

    /// Whether this peer may open this socket.
    pub fn may_open(&self, peer: &PeerIdentity, directory: &str, file: &str) -> bool {
        self.all.lock().iter().any(|one| {
            one.is_admitted
                && one.directory == directory
                && one.files.iter().any(|known| known == file)
                && one.peer.is_same_as(peer)
        })
    }

    /// The guests of a connection have ended.
    pub fn ended(&self, connection: u64) {
        self.all.lock().retain(|one| one.connection != connection);
    }
}

impl Reservation<'_> {
    /// The Prepare is admitted: the sockets are the guest's until its connection has ended. They
    /// replace those of an earlier migration of the same guest.
    pub fn admit(self) {
        let mut all = self.sockets.all.lock();
        let Some(its) = all.iter_mut().find(|one| one.number == self.number) else { return };
        its.is_admitted = true;
        let uuid = its.guest.uuid;
        all.retain(|one| one.number == self.number || one.guest.uuid != uuid || !one.is_admitted);
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.sockets.all.lock().retain(|one| one.number != self.number || one.is_admitted);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier};

    use uuid::Uuid;

    use super::*;

    fn peer(name: &str) -> PeerIdentity {
        let address = format!("192.0.2.{}:7002", name.len());
        PeerIdentity { names: vec![name.into()], tls: true, ..PeerIdentity::anonymous(address) }
    }

    fn guest(number: u128) -> Guest {
        Guest { name: format!("guest-{number}"), uuid: Uuid::from_u128(number) }
    }

    fn files(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    /// Reserves and admits.
    fn admit(
        sockets: &ReservedSockets,
        connection: u64,
        number: u128,
        of: &str,
        names: &[&str],
    ) -> Result<(), ReserveError> {
        let reserved = sockets.reserve(connection, &guest(number), &peer(of), "b", &files(names));
        reserved.map(Reservation::admit)
    }

    #[test]
    fn socket_of_another_guest_is_refused_until_its_connection_ends() {
        let sockets = ReservedSockets::default();
        admit(&sockets, 1, 1, "host-a", &["web.mig", "web.disks"]).unwrap();
        let refused = admit(&sockets, 2, 2, "host-c", &["db.mig", "web.disks"]).unwrap_err();
        let said = refused.to_string();
        for part in ["b/web.disks", "guest-1", "192.0.2.6:7002 (host-a)"] {
            assert!(said.contains(part), "{said}");
        }
        assert!(!sockets.may_open(&peer("host-c"), "b", "db.mig"), "nothing of it is reserved");
        assert!(sockets.may_open(&peer("host-a"), "b", "web.mig"));
        assert!(!sockets.may_open(&peer("host-c"), "b", "web.mig"));
        sockets.ended(1);
        assert!(!sockets.may_open(&peer("host-a"), "b", "web.mig"));
        admit(&sockets, 2, 2, "host-c", &["db.mig", "web.disks"]).unwrap();
    }

    #[test]
    fn guest_of_another_peer_is_not_displaced() {
        let sockets = ReservedSockets::default();
        admit(&sockets, 1, 1, "host-a", &["web.mig"]).unwrap();
        let refused = admit(&sockets, 2, 1, "host-c", &["other.mig"]).unwrap_err();
        let said = refused.to_string();
        assert!(said.contains(&Uuid::from_u128(1).to_string()), "{said}");
        assert!(said.contains("host-a"), "{said}");
        assert!(sockets.may_open(&peer("host-a"), "b", "web.mig"));
        assert!(!sockets.may_open(&peer("host-c"), "b", "other.mig"));
    }

    #[test]
    fn peer_may_send_its_guest_again() {
        let sockets = ReservedSockets::default();
        admit(&sockets, 1, 1, "host-a", &["web.mig"]).unwrap();
        // Another attempt that fails takes nothing from the first one.
        let again = sockets.reserve(2, &guest(1), &peer("host-a"), "b", &files(&["again.mig"]));
        drop(again.unwrap());
        assert!(sockets.may_open(&peer("host-a"), "b", "web.mig"));
        admit(&sockets, 3, 1, "host-a", &["web.mig"]).unwrap();
        sockets.ended(1);
        assert!(sockets.may_open(&peer("host-a"), "b", "web.mig"), "the third connection's");
        sockets.ended(3);
        assert!(sockets.all.lock().is_empty());
    }

    #[test]
    fn one_of_two_peers_at_the_same_time_is_refused() {
        let sockets = Arc::new(ReservedSockets::default());
        for _ in 0..200 {
            let start = Arc::new(Barrier::new(2));
            let attempts = [(1, "host-a"), (2, "host-c")].map(|(number, of)| {
                let (sockets, start) = (Arc::clone(&sockets), Arc::clone(&start));
                std::thread::spawn(move || {
                    start.wait();
                    admit(&sockets, number, number.into(), of, &["same.mig"]).is_ok()
                })
            });
            let admitted = attempts.map(|attempt| attempt.join().unwrap());
            assert_eq!(admitted.into_iter().filter(|is_admitted| *is_admitted).count(), 1);
            (1..=2).for_each(|connection| sockets.ended(connection));
        }
    }
}
