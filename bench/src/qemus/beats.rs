//! What is heard of the guest.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use super::PATIENCE;

/// The guest's beats, by this host's clock.
pub struct Beats {
    heard: Arc<(Mutex<Heard>, Condvar)>,
}

#[derive(Clone, Copy, Default)]
struct Heard {
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Beats {
    pub fn listen(path: &Path) -> anyhow::Result<Self> {
        let mut stream = UnixStream::connect(path)?;
        let heard = Arc::new((Mutex::new(Heard::default()), Condvar::new()));
        let telling = Arc::clone(&heard);
        std::thread::Builder::new().name("beats".into()).spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(1..) = stream.read(&mut bytes) {
                let now = Instant::now();
                let mut heard = telling.0.lock().unwrap_or_else(PoisonError::into_inner);
                heard.first.get_or_insert(now);
                heard.last = Some(now);
                drop(heard);
                telling.1.notify_all();
            }
        })?;
        Ok(Self { heard })
    }

    /// The first beat here, awaited.
    pub fn first(&self) -> Option<Instant> {
        let heard = self.heard.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited =
            self.heard.1.wait_timeout_while(heard, PATIENCE, |heard| heard.first.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.first
    }

    /// The last beat so far.
    pub fn last(&self) -> Option<Instant> {
        self.heard.0.lock().unwrap_or_else(PoisonError::into_inner).last
    }
}
