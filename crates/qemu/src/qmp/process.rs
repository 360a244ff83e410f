//! Finds out which visible process a QEMU is.
//!
//! vmferry and QEMU may be in different PID namespaces, and the process that listens on a socket
//! need not be the one that answers: management tools create QEMU's sockets and pass them on. A
//! process that is taken for QEMU may be traced, so its identity must be proven.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;

use super::sockets;
use crate::proc_stat::innermost;

/// The process at the other end of this connection, whose threads have these numbers in its own
/// namespace; `None` if no visible process is proven to be it.
///
/// The proof is that the process has the other end open and has these threads. If its descriptors
/// can't be listed, the kernel's statement that it listens on the socket replaces the first part.
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

/// Converts thread numbers of the process's own namespace to numbers in this one. Threads that have
/// ended are left out.
pub fn threads_here(pid: u32, inside: &[u32]) -> Vec<u32> {
    let found = threads(pid);
    inside.iter().filter_map(|thread| found.get(thread).copied()).collect()
}

/// Whether a process has all these threads, by their numbers in its own namespace.
fn has_threads(pid: u32, wanted: &BTreeSet<u32>) -> bool {
    let found = threads(pid);
    wanted.iter().all(|thread| found.contains_key(thread))
}

/// The threads of a process: maps each number in the innermost namespace to the number here.
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
    fn process_is_proven_by_its_threads_and_its_end_of_the_connection() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let own = std::process::id();
        let threads = |numbers: &[u32]| numbers.iter().copied().collect::<BTreeSet<u32>>();
        assert_eq!(find(&ours, &threads(&[own])), Some(own));
        assert_eq!(find(&ours, &threads(&[])), Some(own), "it has the other end");
        assert_eq!(find(&ours, &threads(&[own, 1])), None, "a thread of another process");
    }
}
