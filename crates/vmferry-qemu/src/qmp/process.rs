//! Which process a QEMU is, as it is seen from here.
//!
//! vmferry and QEMU may be in different PID namespaces, and who listens on a socket need not be who
//! answers: management tools make QEMU's sockets and pass them on. A process that is taken for QEMU
//! may be traced, so it must be proven.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;

use super::sockets;
use crate::process::innermost;

/// The process at the other end of this connection, whose threads are these in its own namespace;
/// `None` if none that is seen from here is proven to be it.
///
/// Proof is that the process has the other end open and has these threads. Where its descriptors
/// may not be looked at, the kernel's word that it listens on the socket takes the place of the
/// first.
pub fn find(stream: &UnixStream, threads: &BTreeSet<u32>) -> Option<u32> {
    let end = sockets::peer(stream);
    let holds = |pid| end.and_then(|end| sockets::holds(pid, end));
    let listener = sockets::listener(stream);
    let is_qemu = |pid: &u32| match holds(*pid) {
        Some(holds) => holds && has_threads(*pid, threads),
        None => !threads.is_empty() && has_threads(*pid, threads),
    };
    if let Some(pid) = listener.filter(is_qemu) {
        return Some(pid);
    }
    end?;
    sockets::processes().find(|pid| holds(*pid) == Some(true) && has_threads(*pid, threads))
}

/// The numbers that threads of a process have here, which are these in its own namespace. Those
/// that have ended are left out.
pub fn threads_here(pid: u32, inside: &[u32]) -> Vec<u32> {
    let found = threads(pid);
    inside.iter().filter_map(|thread| found.get(thread).copied()).collect()
}

/// Whether a process has all these threads, by their numbers in its own namespace.
fn has_threads(pid: u32, wanted: &BTreeSet<u32>) -> bool {
    let found = threads(pid);
    wanted.iter().all(|thread| found.contains_key(thread))
}

/// The threads of a process: for each number in the innermost namespace the number here.
fn threads(pid: u32) -> BTreeMap<u32, u32> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let numbers = |entry: std::fs::DirEntry| {
        let here = entry.file_name().to_str()?.parse().ok()?;
        let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
        Some((innermost(&status)?, here))
    };
    entries.filter_map(numbers).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_proven_by_its_threads_and_its_end_of_the_connection() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let own = std::process::id();
        let threads = |numbers: &[u32]| numbers.iter().copied().collect::<BTreeSet<u32>>();
        assert_eq!(find(&ours, &threads(&[own])), Some(own));
        assert_eq!(find(&ours, &threads(&[])), Some(own), "it has the other end");
        assert_eq!(find(&ours, &threads(&[own, 1])), None, "a thread of another process");
    }
}
