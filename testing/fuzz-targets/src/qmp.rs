//! Any bytes, taken for what a QEMU says by QMP.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;

use vmferry_qemu::{Qmp, answers};

use super::input::Input;

/// A socket takes so many bytes without a reader.
const MOST_BYTES: usize = 100_000;

/// No message is longer, whatever QEMU says.
const MOST_ERROR_BYTES: usize = 2 << 10;

/// Which of the readers asks, then everything that QEMU will have said, and the connection's end. An answer without
/// an `id` is one to any command.
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

/// Nobody's terminal is flooded by what is no answer.
fn is_short(error: &impl std::error::Error) {
    let text = error.to_string();
    assert!(!text.is_empty() && text.len() < MOST_ERROR_BYTES, "{} bytes: {text}", text.len());
}
