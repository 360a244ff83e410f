//! A second process that writes guest memory: this test binary, run once more.
//!
//! It maps the parent's files by `/proc/PID/fd/N`, creates a userfaultfd for the parent to take,
//! and follows the orders in the control page.

use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use vmferry_memory::{Backing, GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout};

use super::{memory, zap};

const VARIABLE: &str = "VMFERRY_TEST_CHILD";
const PAGE: u64 = PAGE_SIZE as u64;

/// Offsets of the words in the control page.
const WRITTEN: u64 = 0;
const ORDER: u64 = 8;
const DONE: u64 = 16;

/// What the child does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Order {
    /// Writes continuously.
    Write = 0,
    /// Writes continuously, and drops pages from its page table, which loses no content.
    WriteAndDrop = 1,
    /// Does nothing.
    Rest = 2,
    /// Unmaps pages 16 to 23.
    Unmap = 3,
    /// Maps pages 16 to 23 again at the same addresses, and writes to page 17.
    Remap = 4,
    /// Moves the mapping of pages 32 to 39 to another address, and writes to page 33 there.
    Move = 5,
    /// Becomes another program.
    Exec = 6,
    /// Writes page 40 and drops it.
    Drop40 = 7,
}

const ORDERS: [Order; 8] = [
    Order::Write,
    Order::WriteAndDrop,
    Order::Rest,
    Order::Unmap,
    Order::Remap,
    Order::Move,
    Order::Exec,
    Order::Drop40,
];

/// The writing process, killed when dropped.
pub struct Writer {
    child: Child,
    pub memory: GuestMemory,
    control: GuestMemory,
    /// Addresses at which it has mapped the memory.
    pub range: Range<u64>,
    descriptor: i32,
}

impl Writer {
    /// Starts a resting writer that maps this memory, which must be a file.
    pub fn start(memory: GuestMemory) -> Self {
        let control = super::memory(1, MemoryKind::Memfd);
        put(&control, ORDER, Order::Rest as u64);
        let path = |memory: &GuestMemory| {
            let Backing::File { file, .. } = memory.slots()[0].backing() else { unreachable!() };
            format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
        };
        let pages = memory.total_pages();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "tests::child::child_process_of_the_test",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(VARIABLE, format!("{} {} {pages}", path(&memory), path(&control)))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        // libtest prints before it, perhaps on the same line.
        let said = lines
            .into_iter()
            .find_map(|line| line.split_once("CHILD ").map(|(_, said)| said.to_owned()));
        let said = said.expect("the child has ended");
        let numbers: Vec<u64> = said.split(' ').map(|number| number.parse().unwrap()).collect();
        let range = numbers[1]..numbers[1] + pages * PAGE;
        Self { child, memory, control, range, descriptor: numbers[0] as i32 }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its userfaultfd.
    pub fn userfaultfd(&self) -> OwnedFd {
        let pid = Pid::from_child(&self.child);
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
        rustix::process::pidfd_getfd(pidfd, self.descriptor, PidfdGetfdFlags::empty()).unwrap()
    }

    /// Orders the writer to do something else, and waits until it has begun.
    pub fn order(&mut self, order: Order) {
        put(&self.control, ORDER, order as u64);
        while take(&self.control, DONE) != order as u64 {
            self.must_live();
        }
    }

    /// Waits until it has written more.
    pub fn wait(&mut self) {
        let until = take(&self.control, WRITTEN) + 500;
        while take(&self.control, WRITTEN) < until {
            self.must_live();
        }
    }

    /// Makes it execute another program.
    pub fn exec(&mut self) {
        put(&self.control, ORDER, Order::Exec as u64);
        let comm = format!("/proc/{}/comm", self.pid());
        while std::fs::read_to_string(&comm).unwrap() != "cat\n" {
            self.must_live();
        }
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Whether the kernel reports that a part of its memory is registered for write protection.
    pub fn is_registered(&self) -> bool {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", self.pid())).unwrap();
        smaps
            .lines()
            .filter_map(|line| line.strip_prefix("VmFlags:"))
            .any(|flags| flags.split_whitespace().any(|flag| flag == "uw"))
    }

    fn must_live(&mut self) {
        assert_eq!(self.child.try_wait().unwrap(), None, "the child has ended");
        std::thread::yield_now();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn put(memory: &GuestMemory, at: u64, value: u64) {
    memory.write_at(at, &value.to_le_bytes()).unwrap();
}

fn take(memory: &GuestMemory, at: u64) -> u64 {
    let mut bytes = [0; 8];
    memory.read_at(at, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

/// Not a test: the second process runs this.
#[test]
fn child_process_of_the_test() {
    let Ok(text) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let map = |path: &str, pages: u64| {
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let layout = SlotLayout { slot: SlotId(0), gpa: 0, pages };
        GuestMemory::map_files(vec![(layout, file, 0)]).unwrap()
    };
    let pages = words[2].parse().unwrap();
    let (memory, control) = (map(words[0], pages), map(words[1], 1));
    // SAFETY: the call takes flags only and returns a new descriptor or -1.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) };
    println!("CHILD {descriptor} {}", memory.slots()[0].host_address() as u64);
    let mut writer = Inner { memory, pages, random: fastrand::Rng::with_seed(1) };
    loop {
        let order = ORDERS[take(&control, ORDER) as usize];
        let anew = take(&control, DONE) != order as u64;
        writer.act(order, anew);
        put(&control, WRITTEN, take(&control, WRITTEN) + 1);
        put(&control, DONE, order as u64);
    }
}

struct Inner {
    memory: GuestMemory,
    pages: u64,
    random: fastrand::Rng,
}

impl Inner {
    fn act(&mut self, order: Order, anew: bool) {
        match order {
            Order::Write => self.write(),
            Order::WriteAndDrop => {
                self.write();
                let page = self.random.u64(..self.pages);
                match self.random.u8(..16) {
                    0 => zap(&self.memory, page, 1, libc::MADV_PAGEOUT),
                    1 => zap(&self.memory, page, 1, libc::MADV_DONTNEED),
                    _ => {}
                }
            }
            Order::Drop40 if anew => {
                self.memory.write_at(40 * PAGE, &[40]).unwrap();
                zap(&self.memory, 40, 1, libc::MADV_DONTNEED);
            }
            Order::Unmap if anew => {
                // SAFETY: this process does not use these pages before it maps them again.
                assert_eq!(unsafe { libc::munmap(self.address(16), 8 * PAGE_SIZE) }, 0);
            }
            Order::Remap if anew => {
                let Backing::File { file, .. } = self.memory.slots()[0].backing() else {
                    unreachable!()
                };
                let (protection, flags) =
                    (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
                let (file, offset) = (file.as_raw_fd(), 16 * PAGE as i64);
                let at = self.address(16);
                // SAFETY: the same pages of the same file are mapped there.
                let mapped =
                    unsafe { libc::mmap(at, 8 * PAGE_SIZE, protection, flags, file, offset) };
                assert_eq!(mapped, at);
                self.memory.write_at(17 * PAGE, &[17]).unwrap();
            }
            Order::Move if anew => {
                let bytes = 8 * PAGE_SIZE;
                // SAFETY: this process no longer uses the old addresses.
                unsafe {
                    let none = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                    let to = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, none, -1, 0);
                    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                    let moved = libc::mremap(self.address(32), bytes, bytes, flags, to);
                    assert_eq!(moved, to);
                    moved.cast::<u8>().add(PAGE_SIZE).write_volatile(33);
                }
            }
            Order::Exec => {
                // The program reads endless input, and ends when the parent's end of its pipe
                // closes.
                let error = Command::new("cat").arg("/dev/zero").stdout(Stdio::null()).exec();
                panic!("{error}");
            }
            Order::Rest | Order::Unmap | Order::Remap | Order::Move | Order::Drop40 => {
                std::thread::yield_now();
            }
        }
    }

    fn write(&mut self) {
        let value = self.random.u64(..);
        self.memory.write_at(value % self.pages * PAGE + 8, &value.to_le_bytes()).unwrap();
    }

    fn address(&self, page: usize) -> *mut libc::c_void {
        self.memory.slots()[0].host_address().wrapping_add(page * PAGE_SIZE).cast()
    }
}

/// A writer of a memfd that is half populated.
pub fn writer_of_memfd(pages: u64) -> Writer {
    let memory = memory(pages, MemoryKind::Memfd);
    for page in 0..pages / 2 {
        memory.write_at(page * PAGE, &[1]).unwrap();
    }
    Writer::start(memory)
}
