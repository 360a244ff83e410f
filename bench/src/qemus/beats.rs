//! Listens to the guest's debug port.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::TIMEOUT;

/// The times of the guest's beats, by this host's clock.
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
        let writer = Arc::clone(&heard);
        std::thread::Builder::new().name("beats".into()).spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(1..) = stream.read(&mut bytes) {
                let now = Instant::now();
                let mut heard = writer.0.lock();
                heard.first.get_or_insert(now);
                heard.last = Some(now);
                drop(heard);
                writer.1.notify_all();
            }
        })?;
        Ok(Self { heard })
    }

    /// Waits for the first beat at this QEMU.
    pub fn first(&self) -> Option<Instant> {
        let mut heard = self.heard.0.lock();
        self.heard.1.wait_while_for(&mut heard, |heard| heard.first.is_none(), TIMEOUT);
        heard.first
    }

    /// The time of the last beat so far.
    pub fn last(&self) -> Option<Instant> {
        self.heard.0.lock().last
    }
}
