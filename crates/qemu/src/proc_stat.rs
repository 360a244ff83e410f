//! Single facts from `/proc`, without errors: the host's boot, and a process by its `stat` and
//! `status`.

/// The boot ID, which names this host until it reboots.
pub fn host() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    boot.map_or_else(|_| String::new(), |text| text.trim().to_owned())
}

/// The fields after the name in `/proc/PID/stat`: the name in parentheses may contain anything.
fn behind_name(stat: &str) -> Option<&str> {
    stat.rsplit_once(") ").map(|(_, rest)| rest)
}

pub(crate) fn state(stat: &str) -> Option<char> {
    behind_name(stat)?.chars().next()
}

/// Field 22 of proc_pid_stat(5).
pub(crate) fn start_time(stat: &str) -> Option<u64> {
    behind_name(stat)?.split(' ').nth(22 - 3)?.parse().ok()
}

/// The PID of a process or thread in its own, the innermost, PID namespace, from its `status`.
pub fn innermost(status: &str) -> Option<u32> {
    let numbers = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    numbers("NSpid:").or_else(|| numbers("Pid:"))?.split_whitespace().last()?.parse().ok()
}

/// Whether a process is stopped, by `SIGSTOP` or a debugger. A process that is not visible counts
/// as running.
pub fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    matches!(state(&stat), Some('T' | 't'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pid_is_that_of_the_processs_own_namespace() {
        assert_eq!(innermost("Name:\tCPU 0\nPid:\t812\nNSpid:\t812\t17\t5\n"), Some(5));
        assert_eq!(innermost("Name:\tCPU 0\nPid:\t812\nNSpid:\t812\n"), Some(812));
        assert_eq!(innermost("Name:\tCPU 0\nPid:\t812\n"), Some(812), "without namespaces");
        assert_eq!(innermost(""), None);
    }
}
