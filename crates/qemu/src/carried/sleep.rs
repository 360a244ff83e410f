//! Detects that a QEMU that receives streams is stopped: QEMU reports nothing, and its streams
//! stall.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::watch::STOPPED_TIMEOUT;
use crate::error::QemuError;
use crate::view::Looker;

/// How often the process is checked. A process that is stopped causes no wake-up.
const LOOK_PERIOD: Duration = Duration::from_secs(1);

/// A thread that checks whether a QEMU is stopped, until this is dropped.
#[derive(Debug)]
pub struct Sleep {
    pid: u32,
    for_too_long: Arc<AtomicBool>,
    /// Nothing is sent: the thread ends when this is dropped.
    _going_on: Sender<()>,
}

impl Sleep {
    /// Starts checking. If QEMU is stopped for so long that the source would blame the link, its
    /// streams are shut down, so that a blocked writer gets an error.
    ///
    /// # Errors
    /// System call errors.
    pub fn watch(pid: u32, looker: Looker, streams: Vec<UnixStream>) -> Result<Self, QemuError> {
        Self::watch_for(STOPPED_TIMEOUT, LOOK_PERIOD, pid, looker, streams)
    }

    fn watch_for(
        after: Duration,
        period: Duration,
        pid: u32,
        looker: Looker,
        streams: Vec<UnixStream>,
    ) -> Result<Self, QemuError> {
        let for_too_long = Arc::new(AtomicBool::new(false));
        let (going_on, is_over) = channel();
        let known = Arc::clone(&for_too_long);
        let look = move || {
            let mut since = None;
            while is_over.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
                if !looker(pid) {
                    since = None;
                } else if since.get_or_insert_with(Instant::now).elapsed() >= after {
                    known.store(true, Ordering::Release);
                    for stream in &streams {
                        // A stream that is closed already can't be shut down.
                        let _ = stream.shutdown(Shutdown::Both);
                    }
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("qemu-sleep".into())
            .spawn(look)
            .map_err(|source| QemuError::Local { action: "start a thread", source })?;
        Ok(Self { pid, for_too_long, _going_on: going_on })
    }

    /// The error for a QEMU whose streams were shut down; `None` if it was not stopped for too
    /// long.
    pub fn error(&self) -> Option<QemuError> {
        let error = || QemuError::Stopped { pid: self.pid, after: STOPPED_TIMEOUT };
        self.for_too_long.load(Ordering::Acquire).then(error)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn sleep_of_qemu_is_reported_as_the_error() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let sleep =
            Sleep::watch_for(5 * SHORT, SHORT, 7, Arc::new(|pid| pid == 7), vec![ours]).unwrap();
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "it was cut");
        assert!(sleep.error().unwrap().to_string().contains("`kill -CONT 7`"));
    }

    #[test]
    fn sleep_that_ends_in_time_is_no_error() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (seen, was_seen) = channel();
        let looker: Looker = {
            let asleep = AtomicBool::new(false);
            Arc::new(move |_| {
                let _ = seen.send(());
                // Every second time.
                asleep.fetch_xor(true, Ordering::Relaxed)
            })
        };
        let sleep = Sleep::watch_for(200 * SHORT, SHORT / 20, 7, looker, vec![ours]).unwrap();
        assert_eq!(was_seen.iter().take(50).count(), 50);
        assert!(sleep.error().is_none());
        drop(sleep);
        // The thread drops the stream and the looker.
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
        was_seen.iter().for_each(drop);
    }
}
