//! Takes a guest back from a post-copy that QEMU has paused.
//!
//! A QEMU whose streams end during its post-copy waits for an administrator to connect it to its
//! destination again (`postcopy-paused`), and no command makes it run the guest meanwhile. If the
//! guest has not run anywhere else, vmferry stands in for that destination, and tells QEMU that
//! every page has arrived: so QEMU completes, and can be told to run the guest on.
//!
//! Source: QEMU 10.0 `migration/migration.c`, `postcopy_do_resume`; `migration/ram.c`,
//! `ram_dirty_bitmap_reload`.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::json;

use super::channels::{self, CONNECT_TIMEOUT};
use super::description::Description;
use super::late;
use super::place::Place;
use super::protocol::{self, BITMAP, POSTCOPY_RESUME, RECV_BITMAP, RESUME_ACK, RESUMED, unknown};
use crate::error::QemuError;
use crate::qmp::Qmp;

/// How long QEMU may take for its next message.
const SILENCE: Duration = Duration::from_secs(10);

/// Has a QEMU whose post-copy is paused complete it. The guest must not have run elsewhere.
///
/// # Errors
/// QMP errors, system call errors, and what QEMU says that is not known. It stays paused then.
pub fn complete(qmp: &mut Qmp) -> Result<(), QemuError> {
    let blocks = Description::read(qmp, 0)?;
    let place = Place::new(qmp)?;
    let listener = place.listen()?;
    let failed = |source| QemuError::Local { action: "listen for QEMU", source };
    listener.set_nonblocking(true).map_err(failed)?;
    qmp.execute("migrate", json!({ "uri": place.our_uri(), "resume": true }))?;
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    let main = channels::accept(qmp, &listener, deadline)?;
    let action = "stand in for the destination of QEMU's post-copy";
    claim_all(&main, &blocks).map_err(|source| QemuError::Local { action, source })?;
    late::say_done(&main)?;
    // QEMU has connected its further channel before it resumed.
    let further = channels::accept(qmp, &listener, deadline)?;
    channels::drain(vec![main, further]);
    Ok(())
}

/// Answers that each page of every block has arrived, until QEMU resumes.
fn claim_all(main: &UnixStream, blocks: &Description) -> io::Result<()> {
    main.set_read_timeout(Some(SILENCE))?;
    main.set_write_timeout(Some(SILENCE))?;
    loop {
        let (kind, body) = protocol::read_command(main)?;
        match kind {
            POSTCOPY_RESUME => return protocol::write_answer(main, RESUME_ACK, &RESUMED),
            RECV_BITMAP => {
                // The length of the name, and the name.
                let name = body.get(1..).unwrap_or_default();
                let pages = blocks.blocks().find(|(block, _)| block.as_bytes() == name);
                let (_, pages) = pages.ok_or_else(|| unknown("names a block that it has not"))?;
                protocol::write_answer(main, BITMAP, &body)?;
                protocol::write_full_bitmap(main, pages)?;
            }
            _ => return Err(unknown("sends a command that is not known")),
        }
    }
}
