//! Connects a QEMU whose own post-copy was interrupted to new streams.
//!
//! A QEMU whose streams end pauses its post-copy (`postcopy-paused`): the guest lives, and threads
//! that need a missing page wait. QEMU's documentation leaves the rest to an administrator. Both
//! QEMUs find out by themselves which pages are still missing.
//!
//! Source: QEMU 10.0 `docs/devel/migration/postcopy.rst`, `migration/migration.c`.

use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use serde_json::json;
use vmferry::vmm::streamed::LateStreams;

use super::channels::{self, CONNECT_TIMEOUT};
use super::late::FurtherChannel;
use super::place::Place;
use super::resend;
use crate::error::QemuError;
use crate::qmp::{Qmp, QmpError};
use crate::state;

/// How long QEMU may take to notice that its streams have ended.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(30);

/// How often QEMU is asked whether it has.
const PAUSE_PERIOD: Duration = Duration::from_millis(20);

/// Copies of our ends of these streams, with which they can be ended.
///
/// # Errors
/// System call errors.
pub fn ends_of(streams: &LateStreams) -> Result<Vec<UnixStream>, QemuError> {
    let all = [Some(&streams.requests), streams.urgent.as_ref()];
    let copies: Result<_, _> = all.into_iter().flatten().map(UnixStream::try_clone).collect();
    copies.map_err(|source| QemuError::Local { action: "duplicate a socket", source })
}

/// Ends the streams of these sockets, and unblocks all that wait for them.
pub fn end_all(sockets: &[UnixStream]) {
    for socket in sockets {
        // A stream that QEMU has closed can't be shut down any more.
        let _ = socket.shutdown(Shutdown::Both);
    }
}

/// Connects the source's QEMU, whose streams were ended, to `further`. For a QEMU whose post-copy
/// has failed vmferry itself sends the rest.
///
/// # Errors
/// QMP errors and system call errors. QEMU stays paused, or pauses again.
pub fn at_source(qmp: &mut Qmp, further: &FurtherChannel) -> Result<LateStreams, QemuError> {
    let deadline = Instant::now() + PAUSE_TIMEOUT;
    loop {
        let migration = qmp.execute("query-migrate", json!({}))?;
        match migration["status"].as_str().unwrap_or_default() {
            "postcopy-paused" => break,
            status if status.starts_with("postcopy-") && Instant::now() < deadline => {
                // Its events go to the thread that watches the migration, if there is one.
                std::thread::sleep(PAUSE_PERIOD);
            }
            status if status.starts_with("postcopy-") => {
                return Err(qmp.timed_out("pause its post-copy", PAUSE_TIMEOUT).into());
            }
            // QEMU 10.0 does not pause a post-copy whose last page it has sent.
            "failed" | "cancelled" => {
                // The thread that watches the migration need not report it any more.
                qmp.forget_events();
                return resend::in_place_of(qmp);
            }
            status => {
                let found = if status.is_empty() { "not migrating" } else { status };
                return Err(QemuError::State {
                    found: found.into(),
                    wanted: "in a post-copy that was interrupted",
                });
            }
        }
    }
    let listener = further.listen_again()?;
    qmp.execute("migrate", json!({ "uri": further.uri(), "resume": true }))?;
    let requests = channels::accept(qmp, &listener, Instant::now() + CONNECT_TIMEOUT)?;
    let urgent = Some(forward_further(listener, further.place())?);
    Ok(LateStreams::new(requests, urgent))
}

/// QEMU connects its further channel only after both QEMUs have agreed on what is missing, over the
/// main stream. So what it writes there later is forwarded. Returns where.
fn forward_further(listener: UnixListener, place: Arc<Place>) -> Result<UnixStream, QemuError> {
    let (forwarded, mut into) = state::pair()?;
    let forward = move || {
        // Until QEMU has connected or the place is not needed, because QEMU was given another one.
        let _place = place;
        let mut polled = [
            PollFd::new(&listener, PollFlags::IN),
            // The other end is gone.
            PollFd::new(&into, PollFlags::empty()),
        ];
        if poll(&mut polled, None).is_ok()
            && polled[0].revents().contains(PollFlags::IN)
            && let Ok((mut further, _)) = listener.accept()
        {
            // Its end pauses QEMU's post-copy, as that of the main stream does.
            let _ = std::io::copy(&mut further, &mut into);
        }
    };
    let thread = std::thread::Builder::new().name("qemu-further".into());
    thread
        .spawn(forward)
        .map_err(|source| QemuError::Local { action: "start a thread", source })?;
    Ok(forwarded)
}

/// Connects the destination's QEMU, whose streams were ended, by a socket in `place`. Its main loop
/// may be waiting for a missing page, so it is told out of band.
///
/// # Errors
/// QMP errors and system call errors. QEMU stays paused, or pauses again.
pub fn at_destination(qmp: &mut Qmp, place: &Place) -> Result<LateStreams, QemuError> {
    let deadline = Instant::now() + PAUSE_TIMEOUT;
    let order = json!({ "uri": place.their_uri() });
    place.clear();
    loop {
        match qmp.execute_out_of_band("migrate-recover", order.clone()) {
            Ok(_) => break,
            // QEMU 10.0: "Migrate recover can only be run when postcopy is paused."
            Err(QmpError::Refused { message, .. })
                if message.contains("paused") && Instant::now() < deadline =>
            {
                // It has not noticed yet, and its events come from the main loop.
                std::thread::sleep(PAUSE_PERIOD);
            }
            Err(error) => return Err(error.into()),
        }
    }
    let connect = || -> std::io::Result<(UnixStream, UnixStream)> {
        // QEMU takes the first one for the main stream.
        Ok((place.connect()?, place.connect()?))
    };
    let connected = connect();
    place.clear();
    let (requests, urgent) =
        connected.map_err(|source| QemuError::Local { action: "connect to QEMU", source })?;
    Ok(LateStreams::new(requests, Some(urgent)))
}
