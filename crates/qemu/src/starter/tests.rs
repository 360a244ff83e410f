//! A starter and its client, in two threads.

use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::*;

/// A starter in a thread; its "QEMU" is a program that waits.
fn served(command: &str) -> (StarterProcess, std::thread::JoinHandle<io::Result<()>>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let starter = LocalStarter::new(command, Path::new("/nowhere/qmp"));
    (StarterProcess::by(ours), std::thread::spawn(move || serve(&theirs, starter)))
}

#[test]
fn starter_serves_requests_of_its_client() {
    let (mut starter, serving) = served("sh -c 'exec sleep 1000' sh");
    let pid = starter.start().unwrap();
    assert_eq!(starter.try_wait().unwrap(), None);
    // The client gets an open page table, although only the starter may open it.
    let pagemap = starter.pagemap(pid).unwrap();
    assert!(pagemap.metadata().unwrap().is_file());
    assert!(starter.shared_mappings(pid).is_ok());
    let own = std::process::id();
    assert!(starter.pagemap(own).unwrap_err().to_string().contains("ask the process"));
    assert!(starter.shared_mappings(own).is_err());
    starter.end();
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
    drop(starter);
    serving.join().unwrap().unwrap();
}

#[test]
fn starter_reports_the_exit_status() {
    let (mut starter, _serving) = served("sh -c 'exit 7' sh");
    starter.start().unwrap();
    assert_eq!(starter.wait().unwrap().code(), Some(7));
    assert_eq!(starter.try_wait().unwrap().and_then(|status| status.code()), Some(7));
}

/// Polls until a condition holds.
fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < deadline, "never {what}");
        // The state of another process changes without a notification.
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn starter_recognizes_a_stopped_process() {
    let (mut starter, _serving) = served("sh -c 'kill -STOP $$; exec sleep 1000' sh");
    let pid = starter.start().unwrap();
    soon("stopped", || starter.is_stopped(pid));
    let process = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::CONT).unwrap();
    soon("woken", || !starter.is_stopped(pid));
    starter.end();
    assert!(!starter.is_stopped(pid), "one that is gone does not stand still");

    // The state of other processes is not reported.
    let mut other = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let process = rustix::process::Pid::from_raw(other.id() as i32).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    soon("stopped", || DirectView.is_stopped(other.id()));
    assert!(!starter.is_stopped(other.id()));
    other.kill().unwrap();
    other.wait().unwrap();
}

/// The files that [`stand_in`] has open.
const FILES: [&str; 4] = ["disk", "rom", "private", "memory"];

/// The environment variable that names the directory of these files.
const STAND_IN: &str = "VMFERRY_TEST_STAND_IN";

/// Not a test: the test below runs this in QEMU's place. It has a disk open read-only, a ROM mapped
/// shared and read-only, another file mapped privately, and memory.
#[test]
fn stand_in() {
    let Some(directory) = std::env::var_os(STAND_IN) else { return };
    for name in FILES {
        let (rights, flags) = match name {
            "rom" => (libc::PROT_READ, libc::MAP_SHARED),
            "private" => (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE),
            _ => (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED),
        };
        let path = Path::new(&directory).join(name);
        let file = File::options().read(true).write(name == "memory").open(path).unwrap();
        if name != "disk" {
            // SAFETY: a new mapping at an address that the kernel chooses, which is never read or
            // written.
            let at = unsafe {
                libc::mmap(std::ptr::null_mut(), 4096, rights, flags, file.as_raw_fd(), 0)
            };
            assert_ne!(at, libc::MAP_FAILED);
        }
        std::mem::forget(file);
    }
    std::thread::sleep(Duration::from_secs(1000));
}

#[test]
fn starter_opens_only_memory_files() {
    let directory = tempfile::tempdir().unwrap();
    for name in FILES {
        std::fs::write(directory.path().join(name), [0; 4096]).unwrap();
    }
    // The inner shell ignores the arguments that are added for QEMU.
    let command = format!(
        "env {STAND_IN}='{}' sh -c 'exec \"$0\" --exact starter::tests::stand_in --nocapture' '{}'",
        directory.path().display(),
        std::env::current_exe().unwrap().display(),
    );
    let (mut starter, _serving) = served(&command);
    let pid = starter.start().unwrap();
    let file = |name: &str| {
        let metadata = std::fs::metadata(directory.path().join(name)).unwrap();
        (metadata.dev(), metadata.ino())
    };
    let find = |starter: &mut StarterProcess, name: &str| {
        let all = starter.shared_mappings(pid).unwrap();
        all.into_iter().find(|mapping| mapping.file == file(name))
    };
    soon("mapped", || find(&mut starter, "memory").is_some());
    let memory = find(&mut starter, "memory").unwrap();
    assert!(starter.open_file(pid, &memory).unwrap().metadata().unwrap().is_file());

    // Made-up requests for the other files, and for altered copies of the real mapping.
    let rom = find(&mut starter, "rom").unwrap();
    let mut asked = vec![rom.clone(), Mapping { writable: true, ..rom }];
    for name in ["disk", "rom", "private"] {
        asked.push(Mapping { file: file(name), ..memory.clone() });
    }
    asked.push(Mapping { range: 0..4096, ..memory.clone() });
    asked.push(Mapping { offset: 4096, ..memory });
    for mapping in asked {
        let error = starter.open_file(pid, &mapping).unwrap_err();
        assert!(vmferry::chain(&error).contains("no memory"), "{error:?}");
    }
    starter.end();
}
