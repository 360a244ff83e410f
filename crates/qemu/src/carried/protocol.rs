//! Messages of QEMU's post-copy: commands on the main stream, and what its destination says on the
//! same socket, the return path.
//!
//! Source: QEMU 10.0 `migration/savevm.c`, `qemu_savevm_command_send`; `migration/migration.c`,
//! `migrate_send_rp_message`, `source_return_path_thread`; `migration/ram.c`,
//! `ramblock_recv_bitmap_send`. All numbers are big-endian.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

/// Commands (`enum qemu_vm_cmd`).
pub const POSTCOPY_RESUME: u16 = 9;
pub const RECV_BITMAP: u16 = 10;

/// A command begins with this byte. Its kind and the length of its body follow as 16 bits each,
/// then the body.
const COMMAND: u8 = 8;

/// Messages on the return path (`enum mig_rp_message_type`): kind and length of the body as 16 bits
/// each, then the body.
pub const SHUT: u16 = 1;
pub const PONG: u16 = 2;
pub const REQUEST_OF_BLOCK: u16 = 3;
pub const REQUEST: u16 = 4;
pub const BITMAP: u16 = 5;
pub const RESUME_ACK: u16 = 6;

/// The body of RESUME_ACK (`MIGRATION_RESUME_ACK_VALUE`).
pub const RESUMED: [u8; 4] = [0, 0, 0, 1];

/// Ends a bitmap (`RAMBLOCK_RECV_BITMAP_ENDING`).
const BITMAP_END: u64 = 0x0123_4567_89ab_cdef;

/// Bits of a bitmap's word. Words are little-endian.
const WORD_BITS: u64 = 64;

/// Writes a command.
///
/// # Errors
/// I/O errors.
pub fn write_command(mut main: &UnixStream, kind: u16, body: &[u8]) -> io::Result<()> {
    main.write_all(&[&[COMMAND][..], &header(kind, body), body].concat())
}

/// Reads a command: its kind and its body.
///
/// # Errors
/// I/O errors, and that something else is there.
pub fn read_command(mut main: &UnixStream) -> io::Result<(u16, Vec<u8>)> {
    let mut first = [0];
    main.read_exact(&mut first)?;
    if first != [COMMAND] {
        return Err(unknown("sends something else than a command"));
    }
    read_answer(main)
}

/// Writes a message on the return path.
///
/// # Errors
/// I/O errors.
pub fn write_answer(mut main: &UnixStream, kind: u16, body: &[u8]) -> io::Result<()> {
    main.write_all(&[&header(kind, body), body].concat())
}

/// Reads a message on the return path: its kind and its body.
///
/// # Errors
/// I/O errors.
pub fn read_answer(mut main: &UnixStream) -> io::Result<(u16, Vec<u8>)> {
    let mut header = [0; 4];
    main.read_exact(&mut header)?;
    let [kind @ .., high, low] = header;
    let mut body = vec![0; u16::from_be_bytes([high, low]).into()];
    main.read_exact(&mut body)?;
    Ok((u16::from_be_bytes(kind), body))
}

/// Writes what follows the message [`BITMAP`]: that each of a block's pages has arrived.
///
/// # Errors
/// I/O errors.
pub fn write_full_bitmap(mut main: &UnixStream, pages: u64) -> io::Result<()> {
    let bytes = pages.div_ceil(WORD_BITS) * 8;
    main.write_all(&bytes.to_be_bytes())?;
    io::copy(&mut io::repeat(0xff).take(bytes), &mut main)?;
    main.write_all(&BITMAP_END.to_be_bytes())
}

/// Reads what follows the message [`BITMAP`] of a block with this number of pages. Returns a bit
/// for each page that has arrived, in words.
///
/// # Errors
/// I/O errors, and that the block has another size there.
pub fn read_bitmap(mut main: &UnixStream, pages: u64) -> io::Result<Vec<u64>> {
    let words = pages.div_ceil(WORD_BITS);
    let mut number = [0; 8];
    main.read_exact(&mut number)?;
    if u64::from_be_bytes(number) != words * 8 {
        return Err(unknown("has another size of a memory block"));
    }
    let mut bytes = vec![0; words as usize * 8];
    main.read_exact(&mut bytes)?;
    main.read_exact(&mut number)?;
    if u64::from_be_bytes(number) != BITMAP_END {
        return Err(unknown("sends a bitmap that does not end"));
    }
    let (words, _) = bytes.as_chunks();
    Ok(words.iter().map(|&word| u64::from_le_bytes(word)).collect())
}

/// The error for what is not part of this protocol.
pub fn unknown(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("QEMU {what}"))
}

fn header(kind: u16, body: &[u8]) -> [u8; 4] {
    let [k, l] = kind.to_be_bytes();
    let [high, low] = u16::try_from(body.len()).unwrap_or(u16::MAX).to_be_bytes();
    [k, l, high, low]
}
