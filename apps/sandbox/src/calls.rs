//! The system calls that a restricted process may make: seccomp filters.
//!
//! The list covers what vmferry, the standard library, the C library (glibc) and its TLS library
//! call. It was traced with `strace -f` over a guest's whole life (received, run, queried through
//! its control socket, migrated away) and completed from their sources for paths that were not
//! taken. It is for x86-64, and not for musl, whose `pthread_kill` and `raise` call `tkill`, which
//! is not on the list.

use std::collections::BTreeMap;

use libc as c;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, apply_filter,
};

use crate::error::SandboxError;
use crate::{Work, ioctls};

/// Calls that kill the process. None of them occurs in vmferry's code.
pub const FATAL: &[c::c_long] = &[
    // Other programs and processes.
    c::SYS_execve,
    c::SYS_execveat,
    c::SYS_fork,
    c::SYS_vfork,
    c::SYS_ptrace,
    c::SYS_process_vm_readv,
    c::SYS_process_vm_writev,
    c::SYS_pidfd_getfd,
    c::SYS_kcmp,
    // Mounts and namespaces.
    c::SYS_mount,
    c::SYS_umount2,
    c::SYS_pivot_root,
    c::SYS_chroot,
    c::SYS_move_mount,
    c::SYS_open_tree,
    c::SYS_fsopen,
    c::SYS_fsconfig,
    c::SYS_fsmount,
    c::SYS_fspick,
    c::SYS_mount_setattr,
    c::SYS_setns,
    c::SYS_unshare,
    c::SYS_open_by_handle_at,
    c::SYS_mknod,
    c::SYS_mknodat,
    // The kernel itself.
    c::SYS_bpf,
    c::SYS_perf_event_open,
    c::SYS_init_module,
    c::SYS_finit_module,
    c::SYS_delete_module,
    c::SYS_kexec_load,
    c::SYS_kexec_file_load,
    c::SYS_reboot,
    c::SYS_iopl,
    c::SYS_ioperm,
    c::SYS_swapon,
    c::SYS_swapoff,
    c::SYS_acct,
    c::SYS_settimeofday,
    c::SYS_clock_settime,
    // The process's own privileges.
    c::SYS_setuid,
    c::SYS_setgid,
    c::SYS_setreuid,
    c::SYS_setregid,
    c::SYS_setresuid,
    c::SYS_setresgid,
    c::SYS_setgroups,
    c::SYS_setfsuid,
    c::SYS_setfsgid,
    c::SYS_capset,
    c::SYS_add_key,
    c::SYS_request_key,
    c::SYS_keyctl,
];

/// Calls that are allowed with any arguments.
const PLAIN: &[c::c_long] = &[
    // Descriptors.
    c::SYS_read,
    c::SYS_write,
    c::SYS_readv,
    c::SYS_writev,
    c::SYS_pread64,
    c::SYS_pwrite64,
    c::SYS_preadv,
    c::SYS_pwritev,
    c::SYS_preadv2,
    c::SYS_pwritev2,
    c::SYS_lseek,
    c::SYS_close,
    c::SYS_close_range,
    c::SYS_dup,
    c::SYS_dup3,
    c::SYS_pipe2,
    c::SYS_eventfd2,
    c::SYS_poll,
    c::SYS_ppoll,
    c::SYS_epoll_create1,
    c::SYS_epoll_ctl,
    c::SYS_epoll_wait,
    c::SYS_epoll_pwait,
    c::SYS_epoll_pwait2,
    // Files. Landlock decides which ones are accessible.
    c::SYS_openat,
    c::SYS_openat2,
    c::SYS_open,
    c::SYS_fstat,
    c::SYS_stat,
    c::SYS_lstat,
    c::SYS_newfstatat,
    c::SYS_statx,
    c::SYS_fstatfs,
    c::SYS_statfs,
    c::SYS_access,
    c::SYS_faccessat,
    c::SYS_faccessat2,
    c::SYS_readlink,
    c::SYS_readlinkat,
    c::SYS_getcwd,
    c::SYS_getdents64,
    c::SYS_ftruncate,
    c::SYS_fallocate,
    c::SYS_fsync,
    c::SYS_fdatasync,
    c::SYS_flock,
    c::SYS_mkdir,
    c::SYS_mkdirat,
    c::SYS_rmdir,
    c::SYS_unlink,
    c::SYS_unlinkat,
    c::SYS_rename,
    c::SYS_renameat,
    c::SYS_renameat2,
    // Only by descriptor: Landlock does not check changes of the mode of a named file.
    c::SYS_fchmod,
    // Sockets. The rule for `socket` below and Landlock decide which ones. Rules for sending are
    // below.
    c::SYS_bind,
    c::SYS_listen,
    c::SYS_accept,
    c::SYS_accept4,
    c::SYS_connect,
    c::SYS_shutdown,
    c::SYS_getsockname,
    c::SYS_getpeername,
    c::SYS_getsockopt,
    c::SYS_setsockopt,
    c::SYS_recvfrom,
    c::SYS_recvmsg,
    // Memory. Rules for executable mappings are below.
    c::SYS_brk,
    c::SYS_munmap,
    c::SYS_mremap,
    c::SYS_madvise,
    c::SYS_membarrier,
    SYS_CACHESTAT,
    // Threads.
    c::SYS_exit,
    c::SYS_exit_group,
    c::SYS_futex,
    c::SYS_rseq,
    c::SYS_set_robust_list,
    c::SYS_set_tid_address,
    c::SYS_gettid,
    c::SYS_sched_yield,
    c::SYS_sched_getaffinity,
    c::SYS_sched_setaffinity,
    c::SYS_sigaltstack,
    c::SYS_rt_sigaction,
    c::SYS_rt_sigprocmask,
    c::SYS_rt_sigreturn,
    c::SYS_rt_sigtimedwait,
    c::SYS_restart_syscall,
    // Time.
    c::SYS_nanosleep,
    c::SYS_clock_nanosleep,
    c::SYS_clock_gettime,
    c::SYS_clock_getres,
    c::SYS_gettimeofday,
    c::SYS_time,
    c::SYS_times,
    c::SYS_getrusage,
    // Identity of the process and the system.
    c::SYS_getpid,
    c::SYS_getppid,
    c::SYS_getuid,
    c::SYS_geteuid,
    c::SYS_getgid,
    c::SYS_getegid,
    c::SYS_getrandom,
    c::SYS_getcpu,
    c::SYS_uname,
    c::SYS_sysinfo,
    // Used to wait for the end of another process; it gives no rights over that process.
    c::SYS_pidfd_open,
];

/// It counts the pages of a file that the process has opened. The `libc` crate does not have it.
const SYS_CACHESTAT: c::c_long = 451;

/// Calls that only a process with a guest makes, with any arguments.
const MACHINE: &[c::c_long] = &[c::SYS_memfd_create];

/// Calls that only a process that carries connections makes, with any arguments. It has children
/// from before it was restricted.
const CONNECTIONS: &[c::c_long] = &[c::SYS_wait4];

/// Restricts this thread.
///
/// # Errors
/// The filter cannot be made or installed.
pub fn restrict(work: Work) -> Result<(), SandboxError> {
    let (fatal, allowed) = programs(work, std::process::id())?;
    // The kernel applies both filters and takes the stricter result. The second one forbids
    // installing more.
    apply_filter(&fatal)?;
    Ok(apply_filter(&allowed)?)
}

/// The filter that kills the process `pid`, and the filter of the allowed calls.
fn programs(work: Work, pid: u32) -> Result<(BpfProgram, BpfProgram), BackendError> {
    let fatal = FATAL.iter().map(|call| (*call, Vec::new())).collect();
    let fatal = SeccompFilter::new(
        fatal,
        SeccompAction::Allow,
        SeccompAction::KillProcess,
        TargetArch::x86_64,
    )?;
    let allowed = SeccompFilter::new(
        rules(work, pid)?,
        SeccompAction::Errno(c::ENOSYS.unsigned_abs()),
        SeccompAction::Allow,
        TargetArch::x86_64,
    )?;
    Ok((fatal.try_into()?, allowed.try_into()?))
}

fn rules(work: Work, pid: u32) -> Result<BTreeMap<c::c_long, Vec<SeccompRule>>, BackendError> {
    let mut rules: BTreeMap<_, Vec<SeccompRule>> =
        PLAIN.iter().map(|call| (*call, Vec::new())).collect();
    let requests = ioctls::allowed(work);
    let requests: Result<Vec<_>, _> =
        requests.into_iter().map(|request| all([is(1, request)])).collect();
    rules.insert(c::SYS_ioctl, requests?);
    rules.insert(c::SYS_socket, sockets(work)?);
    let unix = c::AF_UNIX as u64;
    rules.insert(c::SYS_socketpair, vec![all([is(0, unix), of_kind(c::SOCK_STREAM)])?]);

    // A TCP socket may be connected only by `connect`, which Landlock checks. `MSG_FASTOPEN` would
    // connect with the first packet; an accepted socket could be reused for this after it is
    // disconnected.
    for (call, flags) in [(c::SYS_sendto, 3), (c::SYS_sendmsg, 2)] {
        rules.insert(call, vec![all([masked(flags, c::MSG_FASTOPEN as u64, 0)])?]);
    }
    // No memory besides the program itself can become executable.
    for call in [c::SYS_mmap, c::SYS_mprotect] {
        rules.insert(call, vec![all([masked(2, c::PROT_EXEC as u64, 0)])?]);
    }
    // Threads are allowed, processes are not. `clone3` has its flags in memory, where a filter
    // cannot see them; without it the C library uses `clone`.
    let thread = (c::CLONE_THREAD | c::CLONE_VM) as u64;
    let apart = (c::CLONE_NEWNS
        | c::CLONE_NEWCGROUP
        | c::CLONE_NEWUTS
        | c::CLONE_NEWIPC
        | c::CLONE_NEWUSER
        | c::CLONE_NEWPID
        | c::CLONE_NEWNET) as u64;
    rules.insert(c::SYS_clone, vec![all([masked(0, thread | apart, thread)])?]);
    // Signals to the process itself: they interrupt vCPUs, and `abort` sends one.
    rules.insert(c::SYS_tgkill, vec![all([is(0, pid.into())])?]);
    // Limits may only be read.
    rules.insert(c::SYS_prlimit64, vec![all([pointer(2, 0)])?]);
    rules.insert(c::SYS_getrlimit, Vec::new());
    let options = [c::PR_SET_NAME, c::PR_GET_NAME, PR_SET_VMA, PR_GET_AUXV];
    rules.insert(c::SYS_prctl, any(0, options.map(|option| option as u64))?);
    let commands = [
        c::F_GETFD,
        c::F_SETFD,
        c::F_GETFL,
        c::F_SETFL,
        c::F_DUPFD_CLOEXEC,
        c::F_GET_SEALS,
        c::F_ADD_SEALS,
    ];
    rules.insert(c::SYS_fcntl, any(1, commands.map(|command| command as u64))?);

    match work {
        Work::Machine => {
            rules.extend(MACHINE.iter().map(|call| (*call, Vec::new())));
            // Only for faults from user mode, which every user may handle.
            let own = UFFD_USER_MODE_ONLY;
            rules.insert(c::SYS_userfaultfd, vec![all([masked(0, own, own)])?]);
        }
        Work::Connections => rules.extend(CONNECTIONS.iter().map(|call| (*call, Vec::new()))),
        Work::MemoryOnly => {}
    }
    Ok(rules)
}

/// `include/uapi/linux/prctl.h`: names of mappings, which the C library sets for its heaps.
const PR_SET_VMA: c::c_int = 0x5356_4d41;

/// `include/uapi/linux/prctl.h`: the auxiliary vector, which contains the page size and other
/// values.
const PR_GET_AUXV: c::c_int = 0x4155_5856;

/// `include/uapi/linux/userfaultfd.h`.
const UFFD_USER_MODE_ONLY: u64 = 1;

/// Rules for stream sockets: Unix sockets, and TCP for work that connects over it.
fn sockets(work: Work) -> Result<Vec<SeccompRule>, BackendError> {
    let mut rules = vec![all([is(0, c::AF_UNIX as u64), of_kind(c::SOCK_STREAM)])?];
    if work != Work::MemoryOnly {
        for family in [c::AF_INET, c::AF_INET6] {
            for protocol in [0, c::IPPROTO_TCP] {
                let conditions =
                    [is(0, family as u64), of_kind(c::SOCK_STREAM), is(2, protocol as u64)];
                rules.push(all(conditions)?);
            }
        }
    }
    Ok(rules)
}

/// A rule that matches if all conditions hold.
fn all<const N: usize>(
    conditions: [Result<SeccompCondition, BackendError>; N],
) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(conditions.into_iter().collect::<Result<_, _>>()?)
}

/// Rules that match one of these values of an argument.
fn any<const N: usize>(argument: u8, values: [u64; N]) -> Result<Vec<SeccompRule>, BackendError> {
    values.into_iter().map(|value| all([is(argument, value)])).collect()
}

fn is(argument: u8, value: u64) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

fn pointer(argument: u8, value: u64) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, value)
}

fn masked(argument: u8, mask: u64, value: u64) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(mask), value)
}

/// The socket type, with any flags (the kernel's `SOCK_TYPE_MASK`).
fn of_kind(kind: c::c_int) -> Result<SeccompCondition, BackendError> {
    masked(1, 0xf, kind as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_valid_and_disjoint() {
        for work in [Work::Machine, Work::MemoryOnly, Work::Connections] {
            let (fatal, allowed) = programs(work, 1).unwrap();
            // The kernel's limit, BPF_MAXINSNS.
            assert!(fatal.len() < 4096 && allowed.len() < 4096, "{}", allowed.len());
            let rules = rules(work, 1).unwrap();
            let both: Vec<_> = FATAL.iter().filter(|call| rules.contains_key(call)).collect();
            assert!(both.is_empty(), "{both:?}");
        }
    }

    #[test]
    fn memory_only_allows_less_than_machine() {
        let memory_only = rules(Work::MemoryOnly, 1).unwrap();
        let machine = rules(Work::Machine, 1).unwrap();
        for call in [c::SYS_userfaultfd, c::SYS_memfd_create] {
            assert!(machine.contains_key(&call) && !memory_only.contains_key(&call));
        }
        assert!(memory_only[&c::SYS_socket].len() < machine[&c::SYS_socket].len());
    }

    #[test]
    fn connections_have_tcp_and_no_machine() {
        let connections = rules(Work::Connections, 1).unwrap();
        let machine = rules(Work::Machine, 1).unwrap();
        for call in [c::SYS_userfaultfd, c::SYS_memfd_create] {
            assert!(!connections.contains_key(&call));
        }
        assert_eq!(connections[&c::SYS_socket].len(), machine[&c::SYS_socket].len());
        assert!(connections[&c::SYS_ioctl].len() < machine[&c::SYS_ioctl].len());
    }
}
