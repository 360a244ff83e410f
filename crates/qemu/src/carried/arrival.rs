//! A QEMU that receives a carried guest.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde_json::{Value, json};
use vmferry::vmm::streamed::{LateEnd, LateStreams};

use super::channels;
use super::late;
use super::place::Place;
use super::reconnect;
use super::sleep::Sleep;
use crate::error::QemuError;
use crate::process::{END_TIMEOUT, has_ended_within, pidfd};
use crate::qmp::{Qmp, QmpError};
use crate::settings::Settings;
use crate::state;
use crate::view::Looker;

/// How long QEMU may take to finish loading after it got the last byte.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// How often a QEMU is asked whether it has loaded a guest.
const LOAD_PERIOD: Duration = Duration::from_millis(1);

/// What a source offers.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// Channels in addition to the main stream.
    pub channels: u8,
    /// It may want post-copy.
    pub post_copy: bool,
}

/// A guest that a QEMU is receiving.
#[derive(Debug)]
pub struct Arrival {
    /// Our ends of its streams.
    sockets: Vec<UnixStream>,
    /// Detects that QEMU is stopped, if its process is visible.
    sleep: Option<Sleep>,
    /// QEMU's further channel with post-copy, or why there is none.
    further: Result<Option<UnixStream>, String>,
    /// The guest is loaded as soon as it can run.
    is_late: bool,
}

impl Arrival {
    /// Tells QEMU, which has these `settings`, to receive a guest. Returns the sockets that the
    /// streams must be written into. With several streams, they use a socket in `place`. QEMU may
    /// answer no command until each stream has begun. It can receive no other guest afterwards.
    ///
    /// # Errors
    /// QMP errors and system call errors.
    pub fn begin(
        qmp: &mut Qmp,
        settings: &Settings,
        Offer { channels, post_copy }: Offer,
        place: Option<&Place>,
        looker: &Looker,
    ) -> Result<(Self, Vec<UnixStream>), QemuError> {
        let unable = if post_copy { Self::try_post_copy(qmp, settings) } else { Ok(()) };
        let post_copy = post_copy && unable.is_ok();
        if !post_copy {
            settings.for_taking_streams(qmp, channels, false)?;
        }
        let mut streams = channels::open_incoming(qmp, channels, post_copy, place)?;
        let further = unable.map(|()| if post_copy { streams.pop() } else { None });
        let copies = || {
            let all = streams.iter().chain(further.iter().flatten());
            let copies: Result<Vec<_>, _> = all.map(UnixStream::try_clone).collect();
            copies.map_err(|source| QemuError::Local { action: "duplicate a socket", source })
        };
        let watched = qmp.pid().or_else(|| qmp.listener());
        let sleep = watched.map(|pid| Sleep::watch(pid, Arc::clone(looker), copies()?));
        let sleep = sleep.transpose()?;
        let sockets = copies()?;
        Ok((Self { sockets, sleep, further, is_late: false }, streams))
    }

    /// Turns on what post-copy needs. Returns why this QEMU or its host can't do it.
    fn try_post_copy(qmp: &mut Qmp, settings: &Settings) -> Result<(), String> {
        late::must_be_known(qmp.version()).map_err(|error| vmferry::chain(&error))?;
        settings.for_taking_streams(qmp, 0, true).map_err(|error| vmferry::chain(&error))
    }

    /// Whether the guest may run here before all its pages have arrived.
    ///
    /// # Errors
    /// Why it may not.
    pub fn takes_post_copy(&self) -> Result<(), String> {
        match &self.further {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err("the source did not say that it may want post-copy".into()),
            Err(why) => Err(why.clone()),
        }
    }

    /// The streams that go on while the guest runs.
    ///
    /// # Errors
    /// System call errors.
    pub fn late_streams(&mut self) -> Result<LateStreams, QemuError> {
        let failed = |source| QemuError::Local { action: "duplicate a socket", source };
        let no_stream = || failed(std::io::ErrorKind::NotConnected.into());
        let main = self.sockets.first().ok_or_else(no_stream)?;
        let requests = main.try_clone().map_err(failed)?;
        self.is_late = true;
        let urgent = self.further.as_mut().ok().and_then(Option::take);
        Ok(LateStreams::new(requests, urgent))
    }

    /// Ends QEMU's streams, and connects it to new ones by a socket in `place`.
    ///
    /// # Errors
    /// QMP errors and system call errors.
    pub fn reconnect(
        &mut self,
        qmp: &mut Qmp,
        place: Option<&Place>,
    ) -> Result<LateStreams, QemuError> {
        self.end();
        let mut made = None;
        let place = Place::given_or_new(place, &mut made, qmp)?;
        let late = reconnect::at_destination(qmp, place)?;
        self.sockets = reconnect::ends_of(&late)?;
        Ok(late)
    }

    /// Whether QEMU uses its post-copy.
    pub fn is_late(&self) -> bool {
        self.is_late
    }

    /// From now on the guest runs here: its QEMU may be stopped for as long as anyone likes.
    pub fn runs(&mut self) {
        self.sleep = None;
    }

    /// The state of QEMU's post-copy, once it has closed the stream of its requests.
    ///
    /// # Errors
    /// QEMU's error, by which the guest is damaged.
    pub fn late_end(qmp: &mut Qmp) -> Result<LateEnd, QemuError> {
        let deadline = Instant::now() + LOAD_TIMEOUT;
        loop {
            let asked = qmp.execute("query-migrate", json!({}));
            let migration = match asked {
                Ok(migration) => migration,
                Err(_) if Self::has_ended(qmp) => return Ok(LateEnd::GuestEnded),
                // It waits for pages.
                Err(QmpError::TimedOut { .. }) => return Ok(LateEnd::Awaited),
                Err(error) => return Err(error.into()),
            };
            match migration["status"].as_str() {
                Some("completed") => return Ok(LateEnd::Complete),
                Some("active" | "device" | "postcopy-active") if Instant::now() < deadline => {
                    qmp.look_for("complete its migration", "MIGRATION")?;
                }
                Some(status) if status.starts_with("postcopy-") => return Ok(LateEnd::Awaited),
                _ => return Err(state::given_up(qmp).unwrap_or_else(QemuError::while_taking)),
            }
        }
    }

    /// Whether the QEMU that does not answer ends, and its guest with it.
    fn has_ended(qmp: &mut Qmp) -> bool {
        match qmp.pid().map(pidfd) {
            Some(Ok(process)) => has_ended_within(&process, END_TIMEOUT).unwrap_or(false),
            Some(Err(error)) => error.raw_os_error() == Some(Errno::SRCH.raw_os_error()),
            None => qmp.must_be_alive().is_err(),
        }
    }

    /// Waits until the guest can run. The main loop of QEMU may be waiting for pages meanwhile, and
    /// there is no event.
    fn complete_late(qmp: &mut Qmp) -> Result<(), QemuError> {
        let deadline = Instant::now() + LOAD_TIMEOUT;
        loop {
            let status = qmp.execute("query-status", json!({}));
            let status = status.map_err(QemuError::from).map_err(QemuError::while_taking)?;
            let migration = qmp.execute("query-migrate", json!({}))?;
            if matches!(migration["status"].as_str(), Some("failed" | "postcopy-paused")) {
                return Err(state::given_up(qmp).unwrap_or_else(QemuError::while_taking));
            }
            if status["status"] != "inmigrate" {
                return must_stand_still(&status);
            }
            if Instant::now() >= deadline {
                return Err(qmp.timed_out("load the guest", LOAD_TIMEOUT).into());
            }
            std::thread::sleep(LOAD_PERIOD);
        }
    }

    /// Waits until QEMU has received everything. The guest is paused.
    ///
    /// # Errors
    /// Why QEMU could not receive it. This QEMU can't be used any more.
    pub fn complete(&self, qmp: &mut Qmp) -> Result<(), QemuError> {
        if let Some(asleep) = self.sleep.as_ref().and_then(Sleep::error) {
            return Err(asleep);
        }
        if self.is_late {
            return Self::complete_late(qmp);
        }
        let wanted = |status: &str| matches!(status, "completed" | "failed");
        let event = qmp.wait_for("load the guest", LOAD_TIMEOUT, |event| {
            event["event"] == "MIGRATION" && event["data"]["status"].as_str().is_some_and(wanted)
        });
        let event = event.map_err(QemuError::from).map_err(QemuError::while_taking)?;
        if event["data"]["status"] != "completed" {
            return Err(state::given_up(qmp).unwrap_or_else(QemuError::while_taking));
        }
        must_stand_still(&qmp.execute("query-status", json!({}))?)
    }

    /// Unblocks all that wait for these streams.
    pub fn end(&self) {
        reconnect::end_all(&self.sockets);
    }
}

fn must_stand_still(status: &Value) -> Result<(), QemuError> {
    if status["running"] == true {
        return Err(QemuError::State {
            found: "running".into(),
            wanted: "standing still until the source has given its guest away",
        });
    }
    Ok(())
}
