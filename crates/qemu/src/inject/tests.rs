//! System calls injected into processes that are waiting, stopped, gone, or receiving signals.

use std::io::{Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::*;

/// A process that echoes its input. It has answered once, so its start-up is over and it opens no
/// more files by itself.
fn echoing() -> (Child, ChildStdin, ChildStdout) {
    let mut child =
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    input.write_all(b"ready").unwrap();
    output.read_exact(&mut [0; 5]).unwrap();
    (child, input, output)
}

#[test]
fn waiting_process_yields_a_userfaultfd_and_continues() {
    // It waits in `read`, which must be restarted and not fail with EINTR.
    let (mut child, mut input, mut output) = echoing();
    for _ in 0..20 {
        let injected = userfaultfd(child.id(), FaultOrigin::UserMode).unwrap();
        let there = format!("/proc/{}/fd/{}", child.id(), injected.number);
        let here = format!("/proc/self/fd/{}", injected.descriptor.as_raw_fd());
        for name in [&there, &here] {
            let name = std::fs::read_link(name).unwrap();
            assert_eq!(name.to_str(), Some("anon_inode:[userfaultfd]"));
        }
        drop(injected);
        assert!(!std::fs::exists(&there).unwrap(), "nothing is left open there");
    }
    input.write_all(b"still here").unwrap();
    drop(input);
    let mut rest = Vec::new();
    output.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"still here");
    assert!(child.wait().unwrap().success());
}

#[test]
fn reused_descriptor_number_is_left_alone() {
    let (mut child, _input, _output) = echoing();
    let pid = child.id();
    let injected = userfaultfd(pid, FaultOrigin::UserMode).unwrap();
    let number = injected.number as u64;
    system_call(pid, libc::SYS_close, [number, 0, 0]).unwrap();
    // Duplicates its standard input to the number that has become free.
    assert_eq!(system_call(pid, libc::SYS_dup, [0; 3]).unwrap(), number as i64);
    drop(injected);
    assert!(std::fs::exists(format!("/proc/{pid}/fd/{number}")).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn leftovers_are_closed_unless_another_process_uses_them() {
    let (mut child, _input, _output) = echoing();
    let pid = child.id();
    let injected = userfaultfd(pid, FaultOrigin::UserMode).unwrap();
    let there = format!("/proc/{pid}/fd/{}", injected.number);
    let error = close_leftovers(pid).unwrap_err();
    let own = std::process::id();
    assert!(matches!(error, QemuError::Locked { by: Some(by), .. } if by == own), "{error:?}");
    assert!(std::fs::exists(&there).unwrap());
    drop(injected);
    // A leftover of a killed sender: only the process itself still has it.
    let flags = libc::O_CLOEXEC | userfaultfd::flags(FaultOrigin::UserMode) & !libc::O_NONBLOCK;
    let number = system_call(pid, libc::SYS_userfaultfd, [flags as u64, 0, 0]).unwrap();
    close_leftovers(pid).unwrap();
    assert!(!std::fs::exists(format!("/proc/{pid}/fd/{number}")).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn ended_process_is_an_error() {
    let mut child = Command::new("true").spawn().unwrap();
    let pid = child.id();
    child.wait().unwrap();
    assert!(userfaultfd(pid, FaultOrigin::UserMode).is_err());
}

/// Waits until a process waits for input.
fn until_waiting(child: &Child) {
    let deadline = Instant::now() + Duration::from_secs(10);
    let system_call = format!("/proc/{}/syscall", child.id());
    let read = libc::SYS_read.to_string();
    while std::fs::read_to_string(&system_call).unwrap().split(' ').next() != Some(&*read) {
        assert!(Instant::now() < deadline, "it never did");
        std::thread::yield_now();
    }
}

/// Waits until a process is stopped, or continues.
fn until_stopped(child: &Child, stopped: bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while crate::proc_stat::is_stopped(child.id()) != stopped {
        assert!(Instant::now() < deadline, "it never was");
        std::thread::yield_now();
    }
}

fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = Pid::from_raw(child.id() as i32).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

#[test]
fn stopped_process_makes_the_call_and_stays_stopped() {
    let (mut child, mut input, mut output) = echoing();
    let mut answer = [0; 5];
    for _ in 0..50 {
        // One that is stopped outside of a system call makes none before it continues.
        until_waiting(&child);
        signal(&child, rustix::process::Signal::STOP);
        until_stopped(&child, true);
        let injected = userfaultfd(child.id(), FaultOrigin::UserMode).unwrap();
        let there = format!("/proc/{}/fd/{}", child.id(), injected.number);
        let name = std::fs::read_link(&there).unwrap();
        assert_eq!(name.to_str(), Some("anon_inode:[userfaultfd]"));
        until_stopped(&child, true);
        drop(injected);
        assert!(!std::fs::exists(&there).unwrap(), "nothing is left open there");
        until_stopped(&child, true);
        signal(&child, rustix::process::Signal::CONT);
        input.write_all(b"again").unwrap();
        output.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"again");
    }
    drop(input);
    assert!(child.wait().unwrap().success());
}

/// A handler answers each signal with a byte. Real-time signals are queued, so none may be missing.
#[test]
fn signals_are_not_lost_to_a_call() {
    const SIGNALS: usize = 2_000;
    let (mut answers, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    static ANSWER: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(-1);
    extern "C" fn answer(_: libc::c_int) {
        let descriptor = ANSWER.load(std::sync::atomic::Ordering::Relaxed);
        // SAFETY: writes one byte of a static.
        unsafe { libc::write(descriptor, c"!".as_ptr().cast(), 1) };
    }
    ANSWER.store(theirs.as_raw_fd(), std::sync::atomic::Ordering::Relaxed);
    // SAFETY: the child makes system calls only, and never returns.
    let child = unsafe {
        let child = libc::fork();
        if child == 0 {
            let handler = answer as extern "C" fn(libc::c_int);
            libc::signal(libc::SIGRTMIN(), handler as libc::sighandler_t);
            libc::write(theirs.as_raw_fd(), c"?".as_ptr().cast(), 1);
            loop {
                libc::pause();
            }
        }
        child
    };
    drop(theirs);
    let mut byte = [0];
    answers.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"?", "it listens to signals");
    let injecting = std::thread::spawn(move || {
        let mut calls = 0;
        for _ in 0..500 {
            // Under this load of signals, an attempt may find no thread waiting.
            if system_call(child as u32, libc::SYS_close, [u64::MAX, 0, 0])
                .is_err_and(|error| error.to_string().contains("Bad file descriptor"))
            {
                calls += 1;
            }
        }
        calls
    });
    for _ in 0..SIGNALS {
        // SAFETY: the child is ours, and is waited for below.
        assert_eq!(unsafe { libc::kill(child, libc::SIGRTMIN()) }, 0);
        std::thread::sleep(Duration::from_micros(50));
    }
    let mut received = vec![0; SIGNALS];
    answers.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    answers.read_exact(&mut received).expect("a signal was lost");
    let calls = injecting.join().unwrap();
    assert!(calls > 0, "no call was made among the signals");
    // SAFETY: as above.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
}
