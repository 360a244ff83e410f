//! The standard error of a started QEMU: forwarded at once, with its last lines kept for error
//! messages.
//!
//! QEMU's standard error is a pipe. A thread of the process that has started QEMU copies it to that
//! process's own standard error. So a terminal or the journal sees every line as long as that
//! process lives, and nothing grows. A log file would grow for the months that a guest runs, and
//! its lines would go unseen. QEMU never waits for the reader, and does not die when the reader has
//! gone: its end of the pipe does not block, and QEMU ignores SIGPIPE. Lines are lost then.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, ioctl_fionread, read, write};
use rustix::pipe::{PipeFlags, pipe_with};

/// How many lines are kept. QEMU first prints which value it can't load, and then one failure for
/// each level above.
const MOST_LINES: usize = 6;

/// How many bytes these lines may have together, so that they fit into a message to the peer with
/// its surrounding text.
const MOST_WORDS: usize = 600;

/// How many bytes are kept to extract the lines from.
const MOST_BYTES: usize = 4096;

/// How long the thread may take to read what is already in the pipe: it waits only for its own
/// standard error.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// The pipe that a QEMU prints into, and its reader.
pub struct Relay {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

struct Shared {
    pipe: OwnedFd,
    tail: Mutex<Tail>,
    /// Notified after each read.
    taken: Condvar,
}

impl Relay {
    /// Starts reading. Also returns QEMU's end of the pipe.
    ///
    /// # Errors
    /// System call errors.
    pub fn begin() -> io::Result<(Self, OwnedFd)> {
        let (pipe, theirs) = pipe()?;
        let (tail, taken) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { pipe, tail, taken });
        let reader = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("qemu-stderr".into())
            .spawn(move || reader.forward())?;
        Ok((Self { shared, thread }, theirs))
    }

    /// The last lines that were printed so far, in one line without control characters; `None` if
    /// nothing was printed.
    pub fn last_words(&self) -> Option<String> {
        let deadline = Instant::now() + READ_TIMEOUT;
        let mut tail = self.shared.tail.lock();
        // Bytes that have left the pipe are in the tail, since this thread is the only reader.
        while ioctl_fionread(&self.shared.pipe).is_ok_and(|bytes| bytes > 0) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.shared.taken.wait_for(&mut tail, left);
        }
        tail.words()
    }

    /// Waits until all writers of the pipe have ended.
    pub fn join(self) {
        // A thread that has panicked reads no more either.
        let _ = self.thread.join();
    }
}

impl Shared {
    /// Reads to the end of the pipe.
    fn forward(&self) {
        let mut bytes = [0; MOST_BYTES];
        loop {
            let mut polled = [PollFd::new(&self.pipe, PollFlags::IN)];
            if !matches!(poll(&mut polled, None), Ok(_) | Err(Errno::INTR)) {
                return;
            }
            let taken = {
                let mut tail = self.tail.lock();
                let taken = read(&self.pipe, &mut bytes[..]);
                tail.take(&bytes[..taken.unwrap_or(0)]);
                taken
            };
            self.taken.notify_all();
            match taken {
                Ok(0) => return,
                Ok(taken) => print(&bytes[..taken]),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}

/// A pipe of which neither end blocks: the read end and the write end.
fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?)
}

/// Writes to this process's standard error. Bytes that it does not accept are lost, as QEMU's own
/// would be.
fn print(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match write(io::stderr(), bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// The tail of the output.
#[derive(Debug, Default)]
struct Tail(VecDeque<u8>);

impl Tail {
    fn take(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
        let surplus = self.0.len().saturating_sub(MOST_BYTES);
        self.0.drain(..surplus);
    }

    fn words(&self) -> Option<String> {
        let bytes: Vec<u8> = self.0.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let mut words = String::new();
        for line in text.lines().rev().map(clean).filter(|line| !line.is_empty()).take(MOST_LINES) {
            let room = MOST_WORDS.saturating_sub(words.len());
            if words.is_empty() {
                words = line[..line.floor_char_boundary(room)].to_owned();
            } else if line.len() + 2 <= room {
                words = format!("{line}; {words}");
            } else {
                break;
            }
        }
        (!words.is_empty()).then_some(words)
    }
}

/// A line that is safe to show on a terminal.
fn clean(line: &str) -> String {
    let clean: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    clean.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn words(bytes: &[u8]) -> Option<String> {
        let mut tail = Tail::default();
        for piece in bytes.chunks(7) {
            tail.take(piece);
        }
        tail.words()
    }

    #[test]
    fn tail_keeps_the_last_lines_in_one_clean_line() {
        assert_eq!(words(b"0\n1\n\n2\n \n3\n4\n5\n6\n").unwrap(), "1; 2; 3; 4; 5; 6");
        assert_eq!(words(b"\n \n"), None);
        let odd = words(b"\x1b[31mred\x07\r\nnot UTF-8: \xff\nunfinished").unwrap();
        assert_eq!(odd, "[31mred; not UTF-8: \u{fffd}; unfinished");
        assert_eq!(words(&[b'x'; 3 * MOST_BYTES]).unwrap().len(), MOST_WORDS);
        let umlauts = words("\u{e4}".repeat(3 * MOST_BYTES).as_bytes()).unwrap();
        assert!(umlauts.len() <= MOST_WORDS && umlauts.len() > MOST_WORDS - 4);
        let long = [b"reason\n", &[b'x'; MOST_WORDS][..]].concat();
        assert_eq!(words(&long).unwrap().len(), MOST_WORDS, "the last line comes first");
    }

    #[test]
    fn relay_keeps_the_output_of_an_ended_program() {
        for _ in 0..20 {
            let (relay, theirs) = Relay::begin().unwrap();
            let mut command = Command::new("/bin/sh");
            command.args(["-c", "echo a reason >&2; echo the end >&2"]).stderr(theirs);
            assert!(command.stdin(Stdio::null()).status().unwrap().success());
            assert_eq!(relay.last_words().unwrap(), "a reason; the end");
            // It holds a write end of the pipe.
            drop(command);
            relay.join();
        }
    }

    #[test]
    fn relay_never_blocks_the_program() {
        let (pipe, theirs) = pipe().unwrap();
        let script =
            "i=0; while [ $i -lt 9000 ]; do echo 0123456789 >&2; i=$((i + 1)); done; exit 7";
        let mut command = Command::new("/bin/sh");
        let status = command.args(["-c", script]).stderr(theirs).status().unwrap();
        assert_eq!(status.code(), Some(7));
        assert!(ioctl_fionread(&pipe).unwrap() > 60_000, "it was full");
    }
}
