//! The machine that the benchmark runs on, and its clocks.

use vmferry_report::bench::Machine;

/// Reads the time stamp counter after all earlier instructions have completed. Other architectures
/// return nanoseconds.
///
/// `unsafe`: these instructions have no safe wrapper.
#[inline]
pub fn cycles() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has these two instructions, and they touch no memory.
    unsafe {
        std::arch::x86_64::_mm_lfence();
        let now = std::arch::x86_64::_rdtsc();
        std::arch::x86_64::_mm_lfence();
        now
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        use std::sync::LazyLock;
        use std::time::Instant;
        static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
        BEGIN.elapsed().as_nanos() as u64
    }
}

/// The cost of [`cycles`] itself, which [`cycles_since`] subtracts once per measurement.
pub fn clock_cycles() -> u64 {
    static COST: std::sync::LazyLock<u64> = std::sync::LazyLock::new(|| {
        let once = |_| {
            let begun = cycles();
            cycles() - begun
        };
        (0..10_000).map(once).min().unwrap_or(0)
    });
    *COST
}

/// Cycles since an earlier reading, without the cost of the clock.
#[inline]
pub fn cycles_since(begun: u64) -> u64 {
    cycles().saturating_sub(begun).saturating_sub(clock_cycles())
}

/// CPU time of this process so far, in seconds.
pub fn process_cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Describes the machine that this process runs on.
pub fn here() -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpu = read("/proc/cpuinfo")
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned());
    let kvm = ["kvm_intel", "kvm_amd", "kvm_pvm"]
        .into_iter()
        .find(|module| std::path::Path::new("/sys/module").join(module).exists());
    let kvm = match kvm {
        Some(module) => module,
        None if std::path::Path::new("/dev/kvm").exists() => "unknown",
        None => "none",
    };
    Machine {
        cpu,
        cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        kvm: kvm.to_owned(),
        tcp: read("/proc/sys/net/ipv4/tcp_congestion_control").trim().to_owned(),
    }
}
