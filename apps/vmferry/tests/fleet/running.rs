//! Which QEMUs run the guest, and when: each says so at a second QMP socket, with the time.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;

/// The file name of the socket. QEMUs of templates are started by a shell, which replaces `$$`.
const SOCKET: &str = "events-$$.qmp";

/// The arguments that give a QEMU the socket.
pub fn arguments(directory: &Path) -> [String; 2] {
    let path = directory.join(SOCKET);
    ["-qmp".to_owned(), format!("unix:{},server=on,wait=off", path.display())]
}

/// What a QEMU has said: when, in microseconds since 1970, and whether the guest runs from then on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Change {
    at: u64,
    qemu: PathBuf,
    runs: bool,
}

/// Listens to all QEMUs that have a socket in a directory.
pub struct Watch {
    changes: Arc<Mutex<Vec<Change>>>,
    ended: Arc<AtomicBool>,
    looks: Option<JoinHandle<()>>,
    _directory: Option<TempDir>,
}

impl Watch {
    pub fn begin(sockets_in: TempDir) -> Self {
        let directory = sockets_in.path();
        let changes: Arc<Mutex<Vec<Change>>> = Arc::default();
        let ended = Arc::new(AtomicBool::new(false));
        let (directory, to, until) =
            (directory.to_owned(), Arc::clone(&changes), Arc::clone(&ended));
        let looks = std::thread::spawn(move || {
            let mut known = BTreeSet::new();
            while !until.load(Ordering::Relaxed) {
                for path in sockets(&directory) {
                    // A QEMU that is just starting is found by a later look.
                    if !known.contains(&path)
                        && let Ok(stream) = UnixStream::connect(&path)
                    {
                        known.insert(path.clone());
                        let to = Arc::clone(&to);
                        std::thread::spawn(move || listen(&stream, &path, &to));
                    }
                }
                // A new socket file notifies no one.
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Self { changes, ended, looks: Some(looks), _directory: Some(sockets_in) }
    }

    /// How many times a guest has begun to run, after it was checked that two never ran at once.
    pub fn check(&self) -> usize {
        let mut changes = self.changes.lock().clone();
        changes.sort();
        let (mut running, mut times) = (BTreeSet::new(), 0);
        for Change { qemu, runs, .. } in &changes {
            match runs {
                true if running.insert(qemu) => times += 1,
                true => {}
                false => drop(running.remove(qemu)),
            }
            assert!(running.len() <= 1, "TWO GUESTS RUN: {running:?} of {changes:#?}");
        }
        assert!(times > 0, "a QEMU has said that it runs: {changes:?}");
        times
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = self.looks.take().map(JoinHandle::join);
    }
}

fn sockets(directory: &Path) -> Vec<PathBuf> {
    let found = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("events-") && name.ends_with(".qmp")
    };
    found.map(|entry| entry.path()).filter(is_ours).collect()
}

fn listen(stream: &UnixStream, qemu: &Path, changes: &Mutex<Vec<Change>>) {
    let note = |at: u64, runs: bool| {
        changes.lock().push(Change { at, qemu: qemu.to_owned(), runs });
    };
    let mut orders = stream;
    for command in ["qmp_capabilities", "query-status"] {
        // A QEMU that has just ended runs nothing.
        let _ = writeln!(orders, "{}", json!({ "execute": command }));
    }
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let Ok(said) = serde_json::from_str::<Value>(&line) else { continue };
        let time = |part: &str| said["timestamp"][part].as_u64().unwrap_or_default();
        let at = time("seconds") * 1_000_000 + time("microseconds");
        match said["event"].as_str() {
            Some("RESUME") => note(at, true),
            Some("STOP" | "SHUTDOWN" | "GUEST_PANICKED") => note(at, false),
            Some(_) => {}
            // Since when is not said. It is connected long before a guest arrives there.
            None if said["return"]["running"] == true => note(now(), true),
            None => {}
        }
    }
    note(now(), false);
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(now.as_micros()).unwrap()
}

#[test]
fn two_guests_that_run_at_once_are_found() {
    let change = |at, qemu: &str, runs| Change { at, qemu: qemu.into(), runs };
    let watch = |changes: Vec<Change>| Watch {
        changes: Arc::new(Mutex::new(changes)),
        ended: Arc::default(),
        looks: None,
        _directory: None,
    };
    let moved = vec![
        change(0, "a", true),
        change(5, "a", false),
        change(6, "b", true),
        change(9, "a", false),
    ];
    assert_eq!(watch(moved.clone()).check(), 2);
    let mut overlapping = moved;
    overlapping[2].at = 4;
    let found = std::panic::catch_unwind(|| watch(overlapping).check());
    assert!(found.unwrap_err().downcast_ref::<String>().unwrap().contains("TWO GUESTS RUN"));
}
