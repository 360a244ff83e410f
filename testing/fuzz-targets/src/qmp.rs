//! Any bytes, read as QEMU's output on QMP.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;

use vmferry_qemu::{Qmp, answers};

use super::input::Input;

/// A socket buffers this many bytes without a reader.
const MOST_BYTES: usize = 100_000;

/// Bounds the length of error messages, whatever QEMU sends.
const MOST_ERROR_BYTES: usize = 2 << 10;

/// The input selects the reader, and contains everything that QEMU sends before it closes the
/// connection. An answer without an `id` answers any command.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let reader = input.byte();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&input.0[..input.0.len().min(MOST_BYTES)]).unwrap();
    theirs.shutdown(Shutdown::Write).unwrap();
    let Ok(mut qmp) = Qmp::over(ours, Path::new("fuzz")).inspect_err(is_short) else { return };
    for again in 0..3 {
        match answers::read(&mut qmp, reader.wrapping_add(again)) {
            Ok(text) => assert!(text.len() < 64 * MOST_BYTES),
            Err(error) => is_short(&error),
        }
    }
}

/// Errors about invalid answers must not flood the terminal.
fn is_short(error: &impl std::error::Error) {
    let text = error.to_string();
    assert!(!text.is_empty() && text.len() < MOST_ERROR_BYTES, "{} bytes: {text}", text.len());
}
