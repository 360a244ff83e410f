//! CPU time of all processes of the hosts, without the vCPU threads.
//!
//! Processes come and end during a migration, and are not children of this one. So a thread reads
//! their times repeatedly. What a process uses after its last reading is missing.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::anyhow;

use super::lab::Lab;
use crate::qemus::process_cpu_s;

/// Time between two readings.
const PERIOD: Duration = Duration::from_millis(25);

/// Measures while it exists.
pub struct CpuMeter {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<[f64; 2]>,
}

/// The processes of a host.
struct Processes {
    services: Vec<u32>,
    /// The files with the PIDs of QEMUs.
    pid_files: Vec<PathBuf>,
    /// By PID.
    times: BTreeMap<u32, Times>,
}

/// CPU time of a process, in seconds.
#[derive(Default)]
struct Times {
    first: f64,
    last: f64,
    /// The vCPU threads' times. Those of a thread that has ended count on.
    vcpus: BTreeMap<String, f64>,
}

impl CpuMeter {
    /// Begins to measure both hosts' services, and the QEMUs of these guests.
    pub fn start(lab: &Lab, guests: &[&str]) -> anyhow::Result<Self> {
        let mut hosts = lab.hosts.each_ref().map(|host| {
            let pid_files = guests.iter().map(|name| host.libvirt.pid_file(name)).collect();
            Processes { services: host.services(), pid_files, times: BTreeMap::new() }
        });
        hosts.iter_mut().for_each(|host| host.read(true));
        let stop = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("cpu".into()).spawn(move || {
            loop {
                let stopped = of_thread.load(Ordering::Acquire);
                hosts.iter_mut().for_each(|host| host.read(false));
                if stopped {
                    return hosts.map(|host| host.times.values().map(Times::used).sum());
                }
                std::thread::sleep(PERIOD);
            }
        })?;
        Ok(Self { stop, thread })
    }

    /// Stops, and returns the seconds of both hosts.
    pub fn stop(self) -> anyhow::Result<[f64; 2]> {
        self.stop.store(true, Ordering::Release);
        self.thread.join().map_err(|_| anyhow!("a thread panicked"))
    }
}

impl Processes {
    /// Reads the times. A process that is new after the first reading has used all of its time
    /// since.
    fn read(&mut self, is_first: bool) {
        let mut pids = self.services.clone();
        let mut next = 0;
        while let Some(pid) = pids.get(next) {
            pids.extend(children(*pid));
            next += 1;
        }
        let texts = self.pid_files.iter().filter_map(|path| std::fs::read_to_string(path).ok());
        pids.extend(texts.filter_map(|text| text.trim().parse::<u32>().ok()));
        for pid in pids {
            let known = self.times.contains_key(&pid);
            let times = self.times.entry(pid).or_default();
            times.read(pid);
            if is_first && !known {
                times.first = times.last;
            }
        }
    }
}

impl Times {
    fn read(&mut self, pid: u32) {
        // The process may end at any time.
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return };
        for task in tasks.flatten() {
            let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            // QEMU names its vCPU threads so.
            if !name.starts_with("CPU ") {
                continue;
            }
            let time = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            let ns = time.split(' ').next().and_then(|ns| ns.parse::<f64>().ok());
            if let Some(ns) = ns {
                self.vcpus.insert(task.file_name().to_string_lossy().into_owned(), ns / 1e9);
            }
        }
        if let Ok(all) = process_cpu_s(pid) {
            self.last = self.last.max(all - self.vcpus.values().sum::<f64>());
        }
    }

    fn used(&self) -> f64 {
        self.last - self.first
    }
}

/// The children of a process's main thread.
fn children(pid: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let list = list.unwrap_or_default();
    list.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}
