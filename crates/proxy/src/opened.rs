//! The streams of a migration's memory and disks.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::access::LocalListener;
use crate::entrances::connection;
use crate::proxy::Entry;
use crate::stream::is_readable;

/// The streams, in the order of their connections, and the sockets that make more of them.
#[derive(Debug, Default)]
pub(crate) struct OpenedStreams {
    /// Locked while a connection is accepted, so that each one is either in a socket's queue or has
    /// its stream.
    opened: Mutex<Opened>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Opened {
    listeners: Vec<Weak<LocalListener>>,
    streams: Vec<Weak<Entry>>,
}

impl OpenedStreams {
    /// Another socket of the migration.
    pub fn listen(&self, listener: &Arc<LocalListener>) {
        self.opened.lock().listeners.push(Arc::downgrade(listener));
    }

    /// Accepts a connection, and opens its stream with the one before.
    ///
    /// # Errors
    /// There is no connection, or it can't be accepted.
    pub fn accept(
        &self,
        listener: &UnixListener,
        open: impl FnOnce(UnixStream, Option<Arc<Entry>>) -> Option<Arc<Entry>>,
    ) -> io::Result<()> {
        let mut opened = self.opened.lock();
        let socket = connection(listener)?;
        let stream = open(socket, opened.streams.last().and_then(Weak::upgrade));
        opened.streams.retain(|known| known.strong_count() > 0);
        opened.streams.extend(stream.as_ref().map(Arc::downgrade));
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until the peer has connected each stream to its program, including those of
    /// connections that are not accepted yet, or until they are over or the time has come.
    pub fn await_first_links(&self, deadline: Instant) {
        let streams: Vec<_> =
            self.await_accepted(deadline).iter().filter_map(Weak::upgrade).collect();
        for entry in streams {
            entry.stream.await_first_link(deadline);
        }
    }

    /// The streams, once no connection waits to be accepted, or the time has come.
    fn await_accepted(&self, deadline: Instant) -> Vec<Weak<Entry>> {
        let mut opened = self.opened.lock();
        while opened.has_waiting() {
            if self.changed.wait_until(&mut opened, deadline).timed_out() {
                break;
            }
        }
        opened.streams.clone()
    }
}

impl Opened {
    /// Whether a program has connected that was not accepted yet.
    fn has_waiting(&self) -> bool {
        let mut listeners = self.listeners.iter().filter_map(Weak::upgrade);
        listeners.any(|listener| is_readable(&listener.socket, Duration::ZERO).unwrap_or(false))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::mpsc::{TryRecvError, channel};

    use super::*;
    use crate::access::{Entrance, HostAccess};
    use crate::config::Owner;
    use crate::host_sockets::{HostSockets, Places};

    #[test]
    fn connection_that_is_not_accepted_yet_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.mig");
        let uid = rustix::process::geteuid().as_raw();
        let gid = rustix::process::getegid().as_raw();
        let access: Arc<dyn HostAccess> = Arc::new(HostSockets::new(Places {
            qemu: Owner { uid, gid },
            entrances: HashMap::from([("web".to_owned(), path.clone())]),
            ..Places::default()
        }));
        let entrance = Entrance::Rule { name: "web".into() };
        let listener = Arc::new(LocalListener::new(&access, entrance).unwrap());
        let opened = OpenedStreams::default();
        opened.listen(&listener);
        assert!(!opened.opened.lock().has_waiting());
        let _program = UnixStream::connect(&path).unwrap();
        assert!(opened.opened.lock().has_waiting());

        let (done, finished) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                opened.await_first_links(Instant::now() + Duration::from_secs(60));
                done.send(()).unwrap();
            });
            // True once the thread waits. It looks again then, and waits on.
            while !opened.changed.notify_one() {
                assert_eq!(finished.try_recv(), Err(TryRecvError::Empty), "it did not wait");
                std::thread::yield_now();
            }
            opened.accept(&listener.socket, |_, _| None).unwrap();
        });
        assert_eq!(finished.recv(), Ok(()));
    }
}
