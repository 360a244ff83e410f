//! Memory available within the control groups of this process.

use std::path::{Path, PathBuf};

/// Mount points of the control group hierarchies, v1 and v2.
const ROOTS: [(&str, Version); 2] =
    [("/sys/fs/cgroup/memory", Version::V1), ("/sys/fs/cgroup", Version::V2)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    /// Names of the files with the memory limit, memory usage, swap limit and swap usage. The two
    /// swap files of v1 count memory and swap together.
    fn files(self) -> [&'static str; 4] {
        match self {
            Self::V1 => [
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "memory.memsw.limit_in_bytes",
                "memory.memsw.usage_in_bytes",
            ],
            Self::V2 => ["memory.max", "memory.current", "memory.swap.max", "memory.swap.current"],
        }
    }

    /// The path of this process's group in the text of `/proc/self/cgroup`.
    fn path_in(self, text: &str) -> Option<&str> {
        text.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let is_it = match self {
                Self::V1 => controllers.split(',').any(|name| name == "memory"),
                Self::V2 => controllers.is_empty(),
            };
            is_it.then_some(path)
        })
    }
}

/// The group with the least memory left, among this process's group and its ancestors up to the
/// root. Returns its directory, its limit and the memory left, both in bytes. `None` if there is no
/// limit, or if it cannot be read.
pub(super) fn tightest() -> Option<(PathBuf, u64, u64)> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    ROOTS.iter().find_map(|(root, version)| {
        let path = Path::new(root).join(version.path_in(&own)?.trim_start_matches('/'));
        let groups = path.ancestors().take_while(|group| group.starts_with(root));
        groups.filter_map(|group| left_in(group, *version)).min_by_key(|(.., left)| *left)
    })
}

/// Memory left in a group: its limit, minus usage that cannot be reclaimed, plus the swap that the
/// group may use.
fn left_in(group: &Path, version: Version) -> Option<(PathBuf, u64, u64)> {
    let read = |name: &str| std::fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let [limit, used, swap_limit, swap_used] = version.files();
    // v2 writes `max` for no limit; v1 writes a number larger than any memory.
    let limit_bytes = number(limit).filter(|limit| *limit < 1 << 60)?;
    let stat = read("memory.stat").unwrap_or_default();
    let of = |names: &[&str]| {
        let lines = stat.lines().filter_map(|line| line.split_once(' '));
        let found = lines.filter(|(name, _)| names.contains(name));
        found.filter_map(|(_, value)| value.parse::<u64>().ok()).sum::<u64>()
    };
    let cache = match version {
        Version::V1 => of(&["total_inactive_file", "total_active_file"]),
        Version::V2 => of(&["inactive_file", "active_file"]),
    };
    let swap = number(swap_limit).map_or(u64::MAX, |limit| match version {
        Version::V1 => limit.saturating_sub(limit_bytes),
        Version::V2 => limit.saturating_sub(number(swap_used).unwrap_or_default()),
    });
    let free_swap = super::meminfo("SwapFree:").unwrap_or_default();
    let left = limit_bytes.saturating_sub(number(used)?.saturating_sub(cache));
    Some((group.to_owned(), limit_bytes, left + swap.min(free_swap)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_in_finds_the_memory_controller_of_either_version() {
        let text = "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/c\n";
        assert_eq!(Version::V1.path_in(text), Some("/a/b"));
        assert_eq!(Version::V2.path_in(text), Some("/c"));
        assert_eq!(Version::V1.path_in("0::/c\n"), None);
    }

    #[test]
    fn left_in_counts_cache_and_no_limit_as_room() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(group.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        write("memory.current", "70000\n");
        assert_eq!(left_in(group.path(), Version::V2), None);
        write("memory.max", "100000\n");
        write("memory.swap.max", "0\n");
        write("memory.stat", "anon 40000\ninactive_file 20000\nactive_file 1000\n");
        let (path, limit, left) = left_in(group.path(), Version::V2).unwrap();
        assert_eq!((path.as_path(), limit, left), (group.path(), 100_000, 51_000));
    }
}
