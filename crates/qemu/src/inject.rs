//! Executes single system calls in a thread of another process: `userfaultfd`, or `ioctl` of
//! `/dev/userfaultfd`, and finally `close`.
//!
//! A userfaultfd belongs to the address space of the process that creates it, so QEMU must create
//! it itself. One of its threads that waits in a system call is seized and interrupted
//! (`PTRACE_SEIZE`, `PTRACE_INTERRUPT`). It then stops after the `syscall` instruction. It is
//! single-stepped over that same instruction with other registers, gets its registers back, and
//! continues to wait: the kernel restarts the interrupted call as it does after any signal. No code
//! is patched, so other threads are not affected. The descriptor is fetched with `pidfd_getfd`.
//!
//! A process that is stopped (`SIGSTOP`) executes the call too, and stays stopped: only the one
//! thread runs, for one instruction. A signal that arrives meanwhile is delivered, never swallowed.
//!
//! If the tracer died between the step and the detach, QEMU would be killed by the step's SIGTRAP.
//! So the tracer is a child that does nothing else, in a session of its own, with all signals
//! blocked. Killing vmferry does not affect it, and it exists for microseconds.
//!
//! Sources: ptrace(2), pidfd_getfd(2), userfaultfd(2), and the restart of system calls in Linux
//! `arch/x86/kernel/signal.c`.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fd::AsFd;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

use vmferry_memory::userfaultfd::{self, FaultOrigin};

use crate::error::QemuError;
use crate::fault_access;
use crate::process;
use crate::qmp::processes;

/// How long threads are tried, one after another. A thread that runs in user space is skipped.
const PATIENCE: Duration = Duration::from_secs(5);

/// The interval in nanoseconds between checks whether a thread has stopped, and their number. A
/// thread that waits for a disk that does not answer stops only when the disk does.
const LOOK_NS: libc::c_long = 20_000;
const LOOKS: u32 = 10_000;

/// The most stops of a thread in a row that are not the end of its step.
const STOPS: u32 = 16;

/// The child's result: what the call returned, or which step failed with which error.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Verdict {
    step: i32,
    value: i64,
}

/// The thread was not in a system call; another thread may be.
const BUSY: i32 = 1;
/// `ptrace` was refused.
const REFUSED: i32 = 2;
/// The thread's registers or memory could not be read or written.
const FAILED: i32 = 3;
/// The call has returned.
const DONE: i32 = 0;

/// A userfaultfd that another process has created. On drop it is closed there too.
#[derive(Debug)]
pub struct Injected {
    pid: u32,
    number: i32,
    /// This process's own descriptor for it.
    pub descriptor: OwnedFd,
    /// Whether the other process keeps it on drop.
    stays: bool,
}

impl Injected {
    /// Closes this process's own descriptor only.
    pub fn leave(mut self) {
        self.stays = true;
    }
}

impl Drop for Injected {
    fn drop(&mut self) {
        // QEMU may have closed it, and have another file under its number now. A process that has
        // died has closed it too. In any other case a descriptor leaks, no more.
        if !self.stays
            && is_same(self.pid, self.number, std::process::id(), self.descriptor.as_raw_fd())
        {
            let _ = system_call(self.pid, libc::SYS_close, [self.number as u64, 0, 0]);
        }
    }
}

/// Creates a userfaultfd for these faults in process `pid` and fetches it.
///
/// # Errors
/// If ptrace is not permitted, if no thread waits in a system call, or if `userfaultfd` fails
/// there.
pub fn userfaultfd(pid: u32, faults: FaultOrigin) -> Result<Injected, QemuError> {
    let flags = userfaultfd::flags(faults);
    let number = system_call(pid, libc::SYS_userfaultfd, [flags as u64, 0, 0])?;
    injected(pid, number as i32)
}

/// Creates a userfaultfd for the kernel's faults too, by the device if process `pid` has it open,
/// and fetches it.
///
/// # Errors
/// As [`userfaultfd`].
pub fn kernel_userfaultfd(pid: u32) -> Result<Injected, QemuError> {
    /// `_IO(0xAA, 0x00)`, on `/dev/userfaultfd`.
    const USERFAULTFD_IOC_NEW: u64 = 0xaa00;
    let Some(device) = process::descriptors(pid, fault_access::DEVICE)?.pop() else {
        return userfaultfd(pid, FaultOrigin::UserAndKernel);
    };
    let flags = userfaultfd::flags(FaultOrigin::UserAndKernel);
    let arguments = [device as u64, USERFAULTFD_IOC_NEW, flags as u64];
    let number = system_call(pid, libc::SYS_ioctl, arguments)?;
    injected(pid, number as i32)
}

/// Fetches a descriptor that process `pid` has just created.
fn injected(pid: u32, number: i32) -> Result<Injected, QemuError> {
    let descriptor = fetch(pid, number).map_err(|error| QemuError::Inject {
        pid,
        why: format!("its descriptor {number} can't be had: {error}"),
    })?;
    Ok(Injected { pid, number, descriptor, stays: false })
}

/// The link text of a userfaultfd.
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";

/// Closes every userfaultfd that process `pid` has and no other process shares: the leftovers of a
/// killed vmferry, and with them the write protection of the guest's memory. The caller has the
/// process [locked](crate::lock::Lock).
///
/// # Errors
/// As [`userfaultfd`]; that another process uses one of them; or that the guest lacks pages, which
/// one of them reports. They are left alone.
pub fn close_leftovers(pid: u32) -> Result<(), QemuError> {
    let leftovers = process::descriptors(pid, USERFAULTFD)?;
    if !leftovers.is_empty() && process::lacks_pages(pid)? {
        return Err(QemuError::LacksPages { pid });
    }
    for number in leftovers {
        if let Some(by) = other_user(pid, number) {
            return Err(QemuError::Locked { pid, by: Some(by) });
        }
        system_call(pid, libc::SYS_close, [number as u64, 0, 0])?;
    }
    Ok(())
}

/// Duplicates of the userfaultfds that process `pid` has open.
///
/// # Errors
/// If its descriptors can't be had.
pub fn userfaultfds(pid: u32) -> Result<Vec<OwnedFd>, QemuError> {
    let failed = |error: io::Error| QemuError::Inject { pid, why: error.to_string() };
    let numbers = process::descriptors(pid, USERFAULTFD)?.into_iter();
    numbers.map(|number| fetch(pid, number).map_err(failed)).collect()
}

/// Another process that has a descriptor for the same userfaultfd.
fn other_user(pid: u32, number: i32) -> Option<u32> {
    processes().filter(|other| *other != pid).find(|other| {
        let theirs = process::descriptors(*other, USERFAULTFD).unwrap_or_default();
        theirs.into_iter().any(|their| is_same(pid, number, *other, their))
    })
}

/// Whether two descriptors refer to one open file description. Without `CONFIG_KCMP` the kernel
/// can't tell, and they are treated as different.
fn is_same(pid: u32, number: i32, other: u32, others_number: i32) -> bool {
    const KCMP_FILE: libc::c_long = 0;
    // SAFETY: the call compares kernel data of two processes, and touches no memory of this one.
    let compared =
        unsafe { libc::syscall(libc::SYS_kcmp, pid, other, KCMP_FILE, number, others_number) };
    compared == 0
}

/// Makes a thread of process `pid` execute a system call with these arguments.
fn system_call(pid: u32, number: i64, arguments: [u64; 3]) -> Result<i64, QemuError> {
    let failed = |why: String| QemuError::Inject { pid, why };
    let (begun, mut busy) = (Instant::now(), 0);
    while begun.elapsed() < PATIENCE {
        for thread in process::threads(pid)? {
            let verdict =
                in_a_child(thread, number, arguments).map_err(|error| failed(error.to_string()))?;
            match verdict.step {
                DONE if verdict.value >= 0 => return Ok(verdict.value),
                DONE => return Err(failed(why_not(-verdict.value as i32, number, arguments))),
                REFUSED => {
                    let error = io::Error::from_raw_os_error(verdict.value as i32);
                    return Err(failed(format!(
                        "ptrace is not permitted ({error}): run vmferry as root, or as QEMU's user \
                         with kernel.yama.ptrace_scope=0, and not while a debugger is attached"
                    )));
                }
                BUSY => busy += 1,
                _ => {
                    let error = io::Error::from_raw_os_error(verdict.value as i32);
                    return Err(failed(format!("a thread could not be stepped: {error}")));
                }
            }
        }
    }
    Err(failed(format!("none of its threads waits in a system call, in {busy} looks")))
}

fn why_not(errno: i32, number: i64, arguments: [u64; 3]) -> String {
    let error = io::Error::from_raw_os_error(errno);
    let kernel = userfaultfd::flags(FaultOrigin::UserAndKernel) as u64;
    match errno {
        libc::EPERM if number == libc::SYS_userfaultfd && arguments[0] == kernel => {
            format!("its user may not handle the kernel's faults ({error})")
        }
        libc::ENOSYS | libc::EPERM => format!(
            "userfaultfd is forbidden there ({error}): a `-sandbox on` of QEMU or a container \
             forbids it; leave `-sandbox` out or allow the call"
        ),
        libc::EMFILE => "QEMU has no descriptor left".into(),
        _ => error.to_string(),
    }
}

/// A duplicate of a process's descriptor.
///
/// # Errors
/// This process may not have it, or it is closed.
pub fn fetch(pid: u32, descriptor: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid as i32).ok_or(io::ErrorKind::InvalidInput)?;
    let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    Ok(rustix::process::pidfd_getfd(process.as_fd(), descriptor, PidfdGetfdFlags::empty())?)
}

/// Runs [`step_thread`] in a child and waits for its result.
fn in_a_child(thread: u32, number: i64, arguments: [u64; 3]) -> io::Result<Verdict> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // SAFETY: between fork and exit the child makes system calls only: it allocates nothing, takes
    // no lock, and touches only its own stack and the pipe.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return Err(io::Error::last_os_error());
    }
    if child == 0 {
        // SAFETY: see above; the pointers are to locals of the types that the calls expect.
        unsafe {
            let mut all = MaybeUninit::<libc::sigset_t>::uninit();
            libc::sigfillset(all.as_mut_ptr());
            libc::sigprocmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
            libc::setsid();
            let verdict = step_thread(thread as libc::pid_t, number, arguments);
            libc::write(
                write.as_raw_fd(),
                (&raw const verdict).cast(),
                std::mem::size_of::<Verdict>(),
            );
            libc::_exit(0);
        }
    }
    drop(write);
    let mut verdict = Verdict { step: FAILED, value: libc::ECHILD.into() };
    // SAFETY: the buffer is a plain structure of integers, for which all bytes are valid, of the
    // given length. The process that is waited for is our own child.
    unsafe {
        let bytes = (&raw mut verdict).cast();
        libc::read(read.as_raw_fd(), bytes, std::mem::size_of::<Verdict>());
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    Ok(verdict)
}

/// Single-steps a thread over the system call. Only system calls are made here: this runs after a
/// fork.
///
/// # Safety
/// Must run in a process that may trace `thread`, and that does nothing else.
unsafe fn step_thread(thread: libc::pid_t, number: i64, arguments: [u64; 3]) -> Verdict {
    let errno = || i64::from(io::Error::last_os_error().raw_os_error().unwrap_or(0));
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: ptrace gets pointers to locals of the types that its requests expect, and acts on the
    // thread, which is stopped between the wait and the detach. Its registers are restored before
    // it continues, whatever happened in between.
    unsafe {
        if libc::ptrace(libc::PTRACE_SEIZE, thread, none, none) < 0 {
            return Verdict { step: REFUSED, value: errno() };
        }
        // Detaches and delivers the signal that the thread was about to get.
        let detach = |verdict, signal: libc::c_int| {
            libc::ptrace(libc::PTRACE_DETACH, thread, none, signal as usize as *mut libc::c_void);
            verdict
        };
        if libc::ptrace(libc::PTRACE_INTERRUPT, thread, none, none) < 0 {
            return Verdict { step: FAILED, value: errno() };
        }
        let stopped = match wait_briefly(thread) {
            Some(status) => Stop::of(status),
            // The exit of this process detaches.
            None => return Verdict { step: BUSY, value: 0 },
        };
        match stopped {
            Stop::Event => {}
            Stop::Signal(signal) => return detach(Verdict { step: BUSY, value: 0 }, signal),
            Stop::Gone => return Verdict { step: FAILED, value: libc::ESRCH.into() },
        }
        let Some(saved) = registers_of(thread) else {
            return detach(Verdict { step: FAILED, value: errno() }, 0);
        };
        // `syscall` is 0f 05. The word is read at the instruction that the thread has just passed.
        *libc::__errno_location() = 0;
        let word = libc::ptrace(libc::PTRACE_PEEKTEXT, thread, saved.rip.wrapping_sub(2), none);
        if word & 0xffff != 0x050f || (saved.orig_rax as i64) < 0 {
            return detach(Verdict { step: BUSY, value: 0 }, 0);
        }
        let mut registers = saved;
        registers.rip = saved.rip - 2;
        registers.rax = number as u64;
        [registers.rdi, registers.rsi, registers.rdx] = arguments;
        // The interrupted call must not be restarted before ours.
        registers.orig_rax = u64::MAX;
        if libc::ptrace(libc::PTRACE_SETREGS, thread, none, &raw const registers) < 0 {
            return detach(Verdict { step: FAILED, value: errno() }, 0);
        }
        let stopped = step(thread);
        let after = registers_of(thread);
        let error = errno();
        let restored = libc::ptrace(libc::PTRACE_SETREGS, thread, none, &raw const saved) >= 0;
        let signal = match stopped {
            Stop::Signal(libc::SIGTRAP) | Stop::Event => 0,
            Stop::Signal(signal) => signal,
            Stop::Gone => return Verdict { step: FAILED, value: libc::ESRCH.into() },
        };
        match after {
            // A signal came first: the call was not executed.
            Some(after) if restored && after.rip == registers.rip => {
                detach(Verdict { step: BUSY, value: 0 }, signal)
            }
            Some(after) if restored => {
                detach(Verdict { step: DONE, value: after.rax as i64 }, signal)
            }
            _ => detach(Verdict { step: FAILED, value: error }, signal),
        }
    }
}

/// Why a thread has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// Stopped by its tracer, or because its whole process is stopped.
    Event,
    /// It is about to get a signal: the one of its step, or an unrelated one.
    Signal(libc::c_int),
    /// It has ended.
    Gone,
}

impl Stop {
    fn of(status: libc::c_int) -> Self {
        if !libc::WIFSTOPPED(status) {
            Self::Gone
        } else if status >> 16 == libc::PTRACE_EVENT_STOP {
            Self::Event
        } else {
            Self::Signal(libc::WSTOPSIG(status))
        }
    }
}

/// Lets a thread execute one step. Stops of the whole process, and a stop that the tracer requested
/// before, may be reported first, any number of times, as long as other processes send `SIGSTOP`
/// and `SIGCONT`.
///
/// # Safety
/// As [`step_thread`]; the thread must be stopped.
unsafe fn step(thread: libc::pid_t) -> Stop {
    let none = std::ptr::null_mut::<libc::c_void>();
    let mut stopped = Stop::Event;
    for _ in 0..STOPS {
        let mut status = 0;
        // SAFETY: the pointer is to a local.
        unsafe {
            if libc::ptrace(libc::PTRACE_SINGLESTEP, thread, none, none) < 0
                || libc::waitpid(thread, &raw mut status, libc::__WALL) != thread
            {
                return Stop::Gone;
            }
        }
        stopped = Stop::of(status);
        if stopped != Stop::Event {
            break;
        }
    }
    stopped
}

/// Waits for a thread to stop, with a limit: a thread in an uninterruptible call may never stop.
///
/// # Safety
/// As [`step_thread`].
unsafe fn wait_briefly(thread: libc::pid_t) -> Option<libc::c_int> {
    let pause = libc::timespec { tv_sec: 0, tv_nsec: LOOK_NS };
    let mut status = 0;
    for _ in 0..LOOKS {
        // SAFETY: the pointers are to locals.
        unsafe {
            match libc::waitpid(thread, &raw mut status, libc::__WALL | libc::WNOHANG) {
                0 => {
                    libc::nanosleep(&raw const pause, std::ptr::null_mut());
                }
                found if found == thread => return Some(status),
                _ => return None,
            }
        }
    }
    None
}

/// The registers of a stopped thread.
///
/// # Safety
/// As [`step_thread`].
unsafe fn registers_of(thread: libc::pid_t) -> Option<libc::user_regs_struct> {
    let none = std::ptr::null_mut::<libc::c_void>();
    let mut registers = MaybeUninit::<libc::user_regs_struct>::zeroed();
    // SAFETY: the pointer is to a local of the type that the request expects, for which all bytes
    // are valid.
    unsafe {
        (libc::ptrace(libc::PTRACE_GETREGS, thread, none, registers.as_mut_ptr()) >= 0)
            .then(|| registers.assume_init())
    }
}

#[cfg(test)]
mod tests;
