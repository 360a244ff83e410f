//! Facts about a host that matter to a guest that moves there.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A host, as reported by its kernel. A field is none or empty if it is not known, or if the
/// release that reports it does not know the member.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostFacts {
    /// The release of vmferry.
    pub release: Option<String>,
    /// The kernel's release.
    pub kernel: Option<String>,
    /// The processors' vendor.
    pub cpu_vendor: Option<String>,
    /// The processors' model name, for people.
    pub cpu_model: Option<String>,
    /// The features common to all processors, by their names in Linux, sorted.
    pub cpu_flags: Vec<String>,
    /// Whether guests can run on KVM.
    pub kvm: Option<bool>,
    /// Whether guests may run there before all their pages have arrived: whether the receiver may
    /// handle the kernel's faults.
    pub post_copy: Option<bool>,
    /// Why it may not.
    pub no_post_copy: Option<String>,
    /// Whether journals are on a disk whose content survives a reboot.
    pub journals_on_disk: Option<bool>,
    /// The congestion control algorithm of new TCP connections.
    pub congestion_control: Option<String>,
    /// Memory available without swapping, in bytes.
    pub memory_available: Option<u64>,
    /// Reserved huge pages, by size.
    pub huge_pages: Vec<HugePages>,
    /// Its libvirt, if guests of libvirt can be sent there.
    pub libvirt: Option<LibvirtFacts>,
    /// Whether it compares machines. The engine sets this.
    pub compares: bool,
}

/// The libvirt of a host, as its daemon reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LibvirtFacts {
    /// The release of libvirt.
    pub libvirt: Option<String>,
    /// The release of the QEMU that it uses by default.
    pub qemu: Option<String>,
    /// Why it does not answer, if it does not.
    pub problem: Option<String>,
    /// The user that QEMU runs as, by the daemon's configuration.
    pub qemu_user: Option<u32>,
    /// The directory of the migrations' sockets.
    pub directory: Option<PathBuf>,
}

/// Huge pages of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePages {
    /// The size of each in bytes.
    pub bytes: u64,
    /// How many there are.
    pub total: u64,
    /// How many of them are free.
    pub free: u64,
}

impl HostFacts {
    /// This host, as its kernel reports it. The caller adds KVM and journals.
    #[must_use]
    pub fn of_this_host() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).ok();
        let line = |path: &str| read(path).map(|text| text.trim().to_owned());
        let cpus = read("/proc/cpuinfo").unwrap_or_default();
        let of_cpu = |name: &str| first_value(&cpus, name).map(str::to_owned);
        Self {
            release: Some(env!("CARGO_PKG_VERSION").into()),
            kernel: line("/proc/sys/kernel/osrelease"),
            cpu_vendor: of_cpu("vendor_id"),
            cpu_model: of_cpu("model name"),
            cpu_flags: common_flags(&cpus),
            congestion_control: line("/proc/sys/net/ipv4/tcp_congestion_control"),
            ..Self::default()
        }
        .with_memory()
    }

    /// The same with the memory that is available now.
    #[must_use]
    pub fn with_memory(mut self) -> Self {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        self.memory_available = first_value(&meminfo, "MemAvailable")
            .and_then(|value| value.strip_suffix(" kB")?.trim().parse::<u64>().ok())
            .map(|kib| kib << 10);
        self.huge_pages = huge_pages(Path::new("/sys/kernel/mm/hugepages"));
        self
    }

    /// The features of this host's processors that the other host's processors lack.
    #[must_use]
    pub fn cpu_flags_missing_at(&self, other: &Self) -> Vec<String> {
        let lacks = |flag: &&String| other.cpu_flags.binary_search(flag).is_err();
        self.cpu_flags.iter().filter(lacks).cloned().collect()
    }
}

/// The value after the first `name:` in a file of such lines.
fn first_value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// The features that every processor has, since the guest may be scheduled on any of them.
fn common_flags(cpus: &str) -> Vec<String> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    let mut processors = 0;
    for line in cpus.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        // The key on x86 and on ARM.
        if matches!(key.trim(), "flags" | "Features") {
            processors += 1;
            for flag in value.split_whitespace() {
                *counts.entry(flag).or_default() += 1;
            }
        }
    }
    let every = counts.into_iter().filter(|(_, count)| *count == processors);
    let mut flags: Vec<String> = every.map(|(flag, _)| flag.to_owned()).collect();
    flags.sort();
    flags
}

fn huge_pages(directory: &Path) -> Vec<HugePages> {
    let mut found: Vec<HugePages> = std::fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let kib: u64 =
                name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let number = |file: &str| {
                std::fs::read_to_string(entry.path().join(file)).ok()?.trim().parse::<u64>().ok()
            };
            let reserved = number("resv_hugepages").unwrap_or(0);
            Some(HugePages {
                bytes: kib << 10,
                total: number("nr_hugepages")?,
                // Reserved pages are not free.
                free: number("free_hugepages")?.saturating_sub(reserved),
            })
        })
        .collect();
    found.sort_by_key(|pages| pages.bytes);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_facts_name_the_kernel() {
        let host = HostFacts::of_this_host();
        assert!(host.memory_available > Some(1 << 20), "{host:?}");
        assert!(host.kernel.is_some() && host.cpu_flags.len() > 5, "{host:?}");
        assert!(host.cpu_flags_missing_at(&host).is_empty());
        let text = serde_json::to_vec(&host).unwrap();
        assert!(text.len() < vmferry_wire::MAX_FACTS_BYTES / 2, "{}", text.len());
        assert_eq!(serde_json::from_slice::<HostFacts>(&text).unwrap(), host);
    }

    #[test]
    fn host_facts_of_other_releases_are_parsed() {
        let newer = r#"{"kernel":"9.1","later":{"a":[1]}}"#;
        let facts: HostFacts = serde_json::from_str(newer).unwrap();
        assert_eq!(facts, HostFacts { kernel: Some("9.1".into()), ..HostFacts::default() });
    }

    #[test]
    fn host_features_are_those_of_every_processor() {
        let cpus = "flags : fpu avx\nx: y\nflags\t: avx sse\n";
        assert_eq!(common_flags(cpus), ["avx"]);
        let host = |flags: &str| HostFacts {
            cpu_flags: flags.split(' ').map(str::to_owned).collect(),
            ..HostFacts::default()
        };
        assert_eq!(host("avx sse").cpu_flags_missing_at(&host("avx")), ["sse"]);
    }
}
