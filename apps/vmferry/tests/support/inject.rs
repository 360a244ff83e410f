//! Makes a running process call something: one of its threads, which waits in a system call, makes
//! another system call.
//!
//! An attacker's code inside the process would do the same, under exactly that process's
//! restrictions.

use std::fs::{File, read_dir};
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;

/// An argument of a system call.
pub enum Argument<'a> {
    /// A number.
    Number(u64),
    /// The address of these bytes.
    Bytes(&'a [u8]),
    /// The address of an array with one pointer to these bytes and a null pointer.
    Strings(&'a [&'a [u8]]),
}

/// Below the thread's stack and the red zone beneath it that the x86-64 ABI allows.
const SCRATCH_BELOW: u64 = 8192;

/// Makes process `pid` call a system call, and returns its result or a negative error number.
pub fn call(pid: u32, number: i64, arguments: &[Argument<'_>]) -> i64 {
    let stopped = Stopped::thread_of(pid);
    let result = stopped.step(number, arguments);
    stopped.detach();
    result
}

/// The same without waiting for the result: the call may end the process.
pub fn call_and_leave(pid: u32, number: i64, arguments: &[Argument<'_>]) {
    let stopped = Stopped::thread_of(pid);
    stopped.set(number, arguments);
    stopped.detach();
}

/// Makes process `pid` jump to an unmapped address, as a broken program does.
pub fn fault(pid: u32) {
    let stopped = Stopped::thread_of(pid);
    let mut registers = stopped.saved;
    registers.rip = 0;
    registers.orig_rax = u64::MAX;
    stopped.set_registers(&registers);
    stopped.detach();
}

/// A thread that is stopped after a `syscall` instruction.
struct Stopped {
    thread: i32,
    memory: File,
    saved: libc::user_regs_struct,
}

impl Stopped {
    fn thread_of(pid: u32) -> Self {
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"));
        let memory = memory.unwrap();
        for _ in 0..1000 {
            for thread in read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
                let thread = thread.file_name().to_str().unwrap().parse().unwrap();
                if let Some(saved) = stop(thread, &memory) {
                    return Self { thread, memory, saved };
                }
            }
        }
        panic!("no thread of {pid} waits in a system call");
    }

    /// Prepares the call as the thread's next instruction.
    fn set(&self, number: i64, arguments: &[Argument<'_>]) {
        let mut scratch = (self.saved.rsp - SCRATCH_BELOW) & !15;
        let mut put = |bytes: &[u8]| {
            scratch -= (bytes.len() as u64).next_multiple_of(16);
            self.memory.write_all_at(bytes, scratch).unwrap();
            scratch
        };
        let mut values = [0; 6];
        for (value, argument) in values.iter_mut().zip(arguments) {
            *value = match argument {
                Argument::Number(number) => *number,
                Argument::Bytes(bytes) => put(bytes),
                Argument::Strings(strings) => {
                    let mut array: Vec<u8> =
                        strings.iter().flat_map(|string| put(string).to_le_bytes()).collect();
                    array.extend([0; 8]);
                    put(&array)
                }
            };
        }
        let mut registers = self.saved;
        registers.rip -= 2;
        registers.rax = number as u64;
        // No system call may be restarted before this one.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx] = [values[0], values[1], values[2]];
        [registers.r10, registers.r8, registers.r9] = [values[3], values[4], values[5]];
        self.set_registers(&registers);
    }

    fn step(&self, number: i64, arguments: &[Argument<'_>]) -> i64 {
        self.set(number, arguments);
        let none = std::ptr::null_mut::<libc::c_void>();
        let mut status = 0;
        // SAFETY: the thread is traced and stopped, and the call writes to a local.
        unsafe {
            assert!(libc::ptrace(libc::PTRACE_SINGLESTEP, self.thread, none, none) >= 0);
            assert_eq!(libc::waitpid(self.thread, &raw mut status, libc::__WALL), self.thread);
        }
        assert!(libc::WIFSTOPPED(status), "the call has ended the process: {status:#x}");
        let result = registers_of(self.thread).unwrap().rax as i64;
        self.set_registers(&self.saved);
        result
    }

    fn set_registers(&self, registers: &libc::user_regs_struct) {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the thread is traced and stopped, and the call reads a structure of the required
        // type.
        let set = unsafe {
            libc::ptrace(libc::PTRACE_SETREGS, self.thread, none, std::ptr::from_ref(registers))
        };
        assert!(set >= 0, "{}", std::io::Error::last_os_error());
    }

    fn detach(self) {
        detach(self.thread);
    }
}

fn detach(thread: i32) {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: the thread is traced and stopped.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, thread, none, none) };
}

fn registers_of(thread: i32) -> Option<libc::user_regs_struct> {
    let none = std::ptr::null_mut::<libc::c_void>();
    let mut registers = MaybeUninit::<libc::user_regs_struct>::zeroed();
    // SAFETY: the thread is traced and stopped; the structure is plain numbers.
    unsafe {
        let got = libc::ptrace(libc::PTRACE_GETREGS, thread, none, registers.as_mut_ptr());
        (got >= 0).then(|| registers.assume_init())
    }
}

/// Stops a thread if it waits in a system call.
fn stop(thread: i32, memory: &File) -> Option<libc::user_regs_struct> {
    let none = std::ptr::null_mut::<libc::c_void>();
    let mut status = 0;
    // SAFETY: the thread belongs to a child of this process, and the call writes to a local.
    unsafe {
        let seized = libc::ptrace(libc::PTRACE_SEIZE, thread, none, none);
        assert!(seized >= 0, "ptrace: {}", std::io::Error::last_os_error());
        libc::ptrace(libc::PTRACE_INTERRUPT, thread, none, none);
        if libc::waitpid(thread, &raw mut status, libc::__WALL) != thread {
            return None;
        }
    }
    let registers = registers_of(thread);
    let waits = registers.is_some_and(|registers| {
        let mut word = [0; 2];
        let read = memory.read_exact_at(&mut word, registers.rip.wrapping_sub(2));
        let stopped_for_us = status >> 16 == libc::PTRACE_EVENT_STOP;
        read.is_ok() && word == [0x0f, 0x05] && stopped_for_us && (registers.orig_rax as i64) >= 0
    });
    if !waits {
        detach(thread);
        return None;
    }
    registers
}
