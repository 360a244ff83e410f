//! Real files, and other processes that map them.

use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::lease::Lease;
use super::*;
use crate::direct_view::DirectView;
use crate::view::View;

/// The environment variable with the order for [`stand_in`] and the file that it maps.
const STAND_IN: &str = "VMFERRY_TEST_MEMORY_FILE";

/// Bytes of each file.
const BYTES: u64 = 1 << 20;

/// A new file on a tmpfs, and its only open file description.
fn file() -> (tempfile::TempPath, File) {
    let named = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    named.as_file().set_len(BYTES).unwrap();
    let (file, path) = named.into_parts();
    (path, file)
}

/// Maps a file shared, for as long as this process lives.
fn map(file: &File, rights: libc::c_int) -> u64 {
    let descriptor = file.as_raw_fd();
    // SAFETY: a new mapping at an address that the kernel chooses, which is never read or written.
    let at = unsafe {
        libc::mmap(std::ptr::null_mut(), BYTES as usize, rights, libc::MAP_SHARED, descriptor, 0)
    };
    assert_ne!(at, libc::MAP_FAILED);
    at as u64
}

/// The mapping at an address of this process.
fn mapping_at(address: u64) -> Mapping {
    let own = process::mappings(std::process::id()).unwrap();
    own.into_iter().find(|mapping| mapping.range.contains(&address)).unwrap()
}

/// Not a test: the tests run this as another process. It maps a file, or only opens it, and says
/// so, or maps it and prints who uses it.
#[test]
fn stand_in() {
    let Some(order) = std::env::var_os(STAND_IN) else { return };
    // The main thread, which may end, runs a test if it is the only one.
    std::thread::spawn(move || follow(order.to_str().unwrap())).join().unwrap();
}

fn follow(order: &str) {
    let (order, path) = order.rsplit_once(' ').unwrap();
    let file = File::options().read(true).write(true).open(path).unwrap();
    let at = map(&file, libc::PROT_READ | libc::PROT_WRITE);
    if order == "examine" {
        // Without the parent, since the asking process may be outside the namespace.
        let pid = std::process::id();
        println!("\nsays {:?}", examine(pid, &mapping_at(at), &[pid]).unwrap());
        return;
    }
    if order == "open" {
        // SAFETY: the whole mapping of before, which nothing uses.
        let unmapped = unsafe { libc::munmap(at as *mut libc::c_void, BYTES as usize) };
        assert_eq!(unmapped, 0);
    } else {
        // A process with only a mapping and no descriptor counts as well.
        drop(file);
    }
    if order == "map without its main thread" {
        end_main_thread();
    }
    println!("\nsays {order}");
    std::thread::sleep(std::time::Duration::from_secs(1000));
}

/// Ends the main thread of this process, whose other threads go on.
fn end_main_thread() {
    extern "C" fn end(_signal: libc::c_int) {
        // SAFETY: it ends this thread, and nothing waits for what this thread has.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    let pid = std::process::id() as libc::pid_t;
    // SAFETY: the handler makes one system call.
    unsafe {
        libc::signal(libc::SIGUSR1, end as *const () as libc::sighandler_t);
        libc::syscall(libc::SYS_tgkill, pid, pid, libc::SIGUSR1);
    }
    let stat = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    while crate::proc_stat::state(&stat()) != Some('Z') {
        std::thread::yield_now();
    }
}

/// Another process, which is killed on drop.
struct Other {
    child: Child,
    says: String,
}

impl Other {
    fn start(prefix: &[&str], order: &str, path: &Path) -> Self {
        let program = std::env::current_exe().unwrap();
        let name = "memory_file::tests::stand_in";
        let mut words: Vec<&str> = prefix.to_vec();
        words.extend([program.to_str().unwrap(), "--exact", name, "--nocapture"]);
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .env(STAND_IN, format!("{order} {}", path.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut lines = output.lines().map_while(Result::ok);
        // With one processor, libtest prints the test's name before it on the same line.
        let says = |line: String| line.split_once("says ").map(|(_, says)| says.to_owned());
        let says = lines.find_map(says).unwrap();
        Self { child, says }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn examine_finds_another_process_that_has_the_file_mapped() {
    let (path, file) = file();
    let own = std::process::id();
    let mapping = mapping_at(map(&file, libc::PROT_READ | libc::PROT_WRITE));
    assert_eq!(examine(own, &mapping, &[own]).unwrap(), Sharing::Alone);
    let other = Other::start(&[], "map", &path);
    let seen = examine(own, &mapping, &[own]).unwrap();
    assert!(
        matches!(
            &seen,
            Sharing::Mapped(mapper) if mapper.pid == other.child.id() && !mapper.name.is_empty()
        ),
        "{seen:?}"
    );
    drop(other);
    assert_eq!(examine(own, &mapping, &[own]).unwrap(), Sharing::Alone);
}

/// `/proc/PID/maps` of such a process is empty.
#[test]
fn examine_finds_a_process_whose_main_thread_has_ended() {
    let (path, file) = file();
    let own = std::process::id();
    let mapping = mapping_at(map(&file, libc::PROT_READ | libc::PROT_WRITE));
    let other = Other::start(&[], "map without its main thread", &path);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", other.child.id())).unwrap();
    assert_eq!(maps, "");
    let seen = examine(own, &mapping, &[own]).unwrap();
    assert!(matches!(&seen, Sharing::Mapped(mapper) if mapper.pid == other.child.id()), "{seen:?}");
}

/// It may map the file at any time, also just after it was examined.
#[test]
fn examine_does_not_trust_a_process_that_has_the_file_only_open() {
    let (path, file) = file();
    let own = std::process::id();
    let mapping = mapping_at(map(&file, libc::PROT_READ | libc::PROT_WRITE));
    let other = Other::start(&[], "open", &path);
    let seen = examine(own, &mapping, &[own]).unwrap();
    assert!(matches!(&seen, Sharing::Unknown(why) if why.contains("has it open")), "{seen:?}");
    drop(other);
    assert_eq!(examine(own, &mapping, &[own]).unwrap(), Sharing::Alone);
}

/// Between `fork` and `exec` the child has this process's mappings.
#[test]
fn examine_waits_for_a_copy_that_is_about_to_start_a_program() {
    let (_path, file) = file();
    let own = std::process::id();
    let mapping = mapping_at(map(&file, libc::PROT_READ | libc::PROT_WRITE));
    let mut command = Command::new("sleep");
    command.arg("1000");
    let wait = || {
        std::thread::sleep(std::time::Duration::from_secs(1));
        Ok(())
    };
    // SAFETY: after `fork` it sleeps, which takes no lock and allocates nothing.
    unsafe { command.pre_exec(wait) };
    let starting = std::thread::spawn(move || command.spawn().unwrap());
    while !starting.is_finished() {
        assert_eq!(examine(own, &mapping, &[own]).unwrap(), Sharing::Alone);
    }
    let mut started = starting.join().unwrap();
    started.kill().unwrap();
    started.wait().unwrap();
}

/// From another PID namespace the process that has the file mapped is not visible: only the
/// kernel's lease decides.
#[test]
fn examine_in_a_pid_namespace_does_not_trust_invisible_processes() {
    let unshare = ["unshare", "--pid", "--fork", "--mount-proc"];
    // A descriptor in this process would be a second open file description.
    let path = file().0;
    let alone = Other::start(&unshare, "examine", &path);
    assert_eq!(alone.says, "Alone");
    let mapped = Other::start(&[], "map", &path);
    assert_eq!(mapped.says, "map");
    let unseen = Other::start(&unshare, "examine", &path);
    let says = &unseen.says;
    assert!(says.starts_with("Unknown") && says.contains("namespace"), "{says}");
}

#[test]
fn lease_is_granted_for_the_only_open_file_description() {
    let (path, file) = file();
    let copy = file.try_clone().unwrap();
    map(&copy, libc::PROT_READ | libc::PROT_WRITE);
    let granted = lease::ask_on(&file);
    assert_eq!(granted, Lease::Granted, "a copy and a mapping are of the same description");
    let other = File::open(&path).unwrap();
    map(&other, libc::PROT_READ);
    drop(other);
    assert_eq!(lease::ask_on(&file), Lease::Refused, "a mapping keeps its description");
    let memfd = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let memfd = File::from(memfd);
    memfd.set_len(BYTES).unwrap();
    let mapping = mapping_at(map(&memfd, libc::PROT_READ | libc::PROT_WRITE));
    assert_eq!(lease::ask(std::process::id(), &mapping), Lease::Unknown, "{mapping:?}");
}

#[test]
fn open_refuses_a_file_that_may_only_be_read() {
    let (_path, file) = file();
    let own = std::process::id();
    let read_only = mapping_at(map(&file, libc::PROT_READ));
    let error = DirectView.open_file(own, &read_only).unwrap_err();
    assert!(vmferry::chain(&error).contains("may only be read"), "{error}");
    let writable = mapping_at(map(&file, libc::PROT_READ | libc::PROT_WRITE));
    assert!(DirectView.open_file(own, &writable).is_ok());
}

#[test]
fn kind_of_a_file_is_known_only_for_memory() {
    let (_path, file) = file();
    assert_eq!(kind_of(&file).unwrap(), Some(FileKind::Tmpfs));
    let on_disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    assert_eq!(kind_of(&on_disk).unwrap(), None);
    let mapping = Mapping {
        range: 0..4096,
        shared: true,
        writable: true,
        offset: 0,
        file: (0, 1),
        path: "/mnt/ram".into(),
    };
    let error = may_be_emptied("ram", &Use::Ram, &mapping, &on_disk).unwrap_err();
    assert!(error.to_string().contains("other hosts may share"), "{error}");
    let nvdimm = Use::Storage("a device `nvdimm`".into());
    let error = may_be_emptied("nv0", &nvdimm, &mapping, &file).unwrap_err();
    assert!(error.to_string().contains("a device `nvdimm`"), "{error}");
    let read_only = Mapping { writable: false, ..mapping.clone() };
    assert!(may_be_emptied("ram", &Use::Ram, &read_only, &file).is_err());
    assert!(may_be_emptied("ram", &Use::Ram, &mapping, &file).is_ok());
}
