//! Takes a guest back from a post-copy that QEMU has paused.
//!
//! A QEMU whose streams end during its post-copy waits for an administrator to connect it to its
//! destination again (`postcopy-paused`), and no command makes it run the guest meanwhile. If the
//! guest has not run anywhere else, vmferry stands in for that destination, and tells QEMU that
//! every page has arrived: so QEMU completes, and can be told to run the guest on.
//!
//! Source: QEMU 10.0 `migration/migration.c`, `postcopy_do_resume`; `migration/ram.c`,
//! `ram_dirty_bitmap_reload`; `migration/savevm.c`, `qemu_savevm_command_send`.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::json;

use super::channels::{self, CONNECT_TIMEOUT};
use super::description::Description;
use super::late;
use super::place::Place;
use crate::error::QemuError;
use crate::qmp::Qmp;

/// How long QEMU may take for its next message.
const SILENCE: Duration = Duration::from_secs(10);

/// Commands on the stream (`QEMU_VM_COMMAND`, `enum qemu_vm_cmd`): this byte, the kind and the
/// length of the body as 16 bits each, the body.
const COMMAND: u8 = 8;
const POSTCOPY_RESUME: u16 = 9;
const RECV_BITMAP: u16 = 10;

/// Messages on the return path (`enum mig_rp_message_type`).
const BITMAP: u16 = 5;
const RESUME_ACK: [u8; 8] = [0, 6, 0, 4, 0, 0, 0, 1];

/// Ends a bitmap (`RAMBLOCK_RECV_BITMAP_ENDING`).
const BITMAP_END: u64 = 0x0123_4567_89ab_cdef;

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
fn claim_all(mut main: &UnixStream, blocks: &Description) -> io::Result<()> {
    main.set_read_timeout(Some(SILENCE))?;
    main.set_write_timeout(Some(SILENCE))?;
    loop {
        let (kind, body) = read_command(main)?;
        match kind {
            POSTCOPY_RESUME => return main.write_all(&RESUME_ACK),
            RECV_BITMAP => {
                // The length of the name, and the name.
                let name = body.get(1..).unwrap_or_default();
                let pages = blocks.blocks().find(|(block, _)| block.as_bytes() == name);
                let (_, pages) = pages.ok_or_else(|| unknown("names a block that it has not"))?;
                main.write_all(&BITMAP.to_be_bytes())?;
                main.write_all(&u16::try_from(body.len()).unwrap_or(u16::MAX).to_be_bytes())?;
                main.write_all(&body)?;
                // Whole words of 64 pages.
                let bytes = pages.div_ceil(64) * 8;
                main.write_all(&bytes.to_be_bytes())?;
                io::copy(&mut io::repeat(0xff).take(bytes), &mut main)?;
                main.write_all(&BITMAP_END.to_be_bytes())?;
            }
            _ => return Err(unknown("sends a command that is not known")),
        }
    }
}

fn read_command(mut main: &UnixStream) -> io::Result<(u16, Vec<u8>)> {
    let mut header = [0; 5];
    main.read_exact(&mut header)?;
    let [COMMAND, kind @ .., high, low] = header else {
        return Err(unknown("sends something else than a command"));
    };
    let mut body = vec![0; u16::from_be_bytes([high, low]).into()];
    main.read_exact(&mut body)?;
    Ok((u16::from_be_bytes(kind), body))
}

fn unknown(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("QEMU {what}"))
}
