//! A second process: this test binary, run once more.

use std::io::{BufRead, BufReader, Lines};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::PoisonError;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, getppid, pidfd_getfd, pidfd_open};
use vmferry_faults::{FaultDescriptor, FaultRange, FaultRanges};
use vmferry_memory::{Backing, GuestMemory, MemoryKind, SlotLayout};

use crate::support::{self, Contents, PAGE, SLOT, STARTS, memory, serve, wrong_pages};

const VARIABLE: &str = "VMFERRY_TEST_CHILD";

/// What the process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Serves the faults of the descriptor that is its standard input.
    Handler,
    /// Reads one fault of that descriptor, says so, and does no more.
    Reader,
    /// Maps the parent's memory, registers it, says `OWNS descriptor address`, checks all pages
    /// with two threads, and says `WRONG` with the number of wrong pages.
    Owner,
}

const ROLES: [Role; 3] = [Role::Handler, Role::Reader, Role::Owner];

/// The process, killed when dropped.
pub struct Other {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    /// Starts a process that has a duplicate of the only descriptor of `ranges`.
    pub fn with_descriptor(role: Role, ranges: &FaultRanges, seed: u64) -> Self {
        let [range] = ranges.ranges() else { panic!("one descriptor is passed") };
        let descriptor = OwnedFd::from(range.descriptor.try_clone().unwrap());
        let pages = range.pages().end;
        let arguments = format!("{} {seed} {} {pages} -", role as usize, range.addresses.start);
        Self::start(&arguments, descriptor.into())
    }

    /// Starts a process that owns a mapping of this memory, which must be a memfd.
    pub fn owner(memory: &GuestMemory, seed: u64) -> Self {
        let Backing::File { file, .. } = memory.slots()[0].backing() else { unreachable!() };
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let pages = memory.total_pages();
        let arguments = format!("{} {seed} 0 {pages} {path}", Role::Owner as usize);
        Self::start(&arguments, Stdio::null())
    }

    fn start(arguments: &str, stdin: Stdio) -> Self {
        let may_start = STARTS.read().unwrap_or_else(PoisonError::into_inner);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child::child_process_of_the_test", "--nocapture"])
            .arg("--test-threads=1")
            .env(VARIABLE, arguments)
            .stdin(stdin)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        drop(may_start);
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Waits until the process says `what`, and returns the numbers that follow.
    pub fn said(&mut self, what: &str) -> Vec<u64> {
        // libtest prints before it, perhaps on the same line.
        let line = self.lines.by_ref().map(Result::unwrap).find(|line| line.contains(what));
        let line = line.unwrap_or_else(|| panic!("the child has ended and did not say {what}"));
        let (_, numbers) = line.split_once(what).unwrap();
        numbers.split_whitespace().map(|number| number.parse().unwrap()).collect()
    }

    /// Takes the descriptor of an owner. The process keeps its own.
    pub fn ranges(&self, said: &[u64], pages: u64) -> FaultRanges {
        let pidfd = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty()).unwrap();
        let descriptor = pidfd_getfd(pidfd, said[0] as i32, PidfdGetfdFlags::empty()).unwrap();
        ranges_of(descriptor, said[1], pages)
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ranges_of(descriptor: OwnedFd, start: u64, pages: u64) -> FaultRanges {
    let descriptor = FaultDescriptor::adopt(descriptor, PAGE).unwrap();
    let addresses = start..start + pages * PAGE;
    let range = FaultRange { slot: SLOT, first_page: 0, addresses, share: 0, descriptor };
    FaultRanges::of(vec![range]).unwrap()
}

/// Not a test: the second process runs this.
#[test]
fn child_process_of_the_test() {
    let Ok(text) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let number = |at: usize| words[at].parse::<u64>().unwrap();
    let (role, contents, pages) = (ROLES[number(0) as usize], Contents::of(number(1)), number(3));
    // Whatever the role, the process ends with its parent.
    let parent = pidfd_open(getppid().unwrap(), PidfdFlags::empty()).unwrap();
    if role == Role::Owner {
        return own(words[4], pages, contents, &parent);
    }
    let descriptor = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let ranges = ranges_of(descriptor, number(2), pages);
    if role == Role::Reader {
        println!("READ {}", support::next_fault(&ranges, 0));
        return wait_for_the_end(&parent);
    }
    serve(&ranges, 0, &parent, contents);
}

fn wait_for_the_end(parent: &OwnedFd) {
    poll(&mut [PollFd::new(parent, PollFlags::IN)], None).unwrap();
}

fn own(path: &str, pages: u64, contents: Contents, parent: &OwnedFd) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let layout = SlotLayout { slot: SLOT, gpa: 0, pages };
    let memory = GuestMemory::map_files(vec![(layout, file, 0)]).unwrap();
    let ranges = support::register(&memory, 1);
    let range = &ranges.ranges()[0];
    let descriptor = range.descriptor.as_fd().as_raw_fd();
    println!("OWNS {descriptor} {}", range.addresses.start);
    let wrong: usize = std::thread::scope(|scope| {
        let check = |thread| wrong_pages(&memory, contents, thread).len();
        let threads = [0, 1].map(|thread| scope.spawn(move || check(thread)));
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    println!("WRONG {wrong}");
    // The parent may still be placing pages.
    wait_for_the_end(parent);
}

/// Memory that another process can map.
pub fn shared(pages: u64) -> GuestMemory {
    memory(pages, MemoryKind::Memfd)
}
