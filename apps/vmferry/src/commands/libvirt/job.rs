//! The statistics of a domain's job: what `virsh domjobinfo --rawstats` and the event
//! `job-completed` print. The names are those of `VIR_DOMAIN_JOB_*` in `libvirt-domain.h`.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::carried::Carried;

/// The statistics, by libvirt's names. A field that libvirt does not report is missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobStats {
    /// Whether a job runs.
    pub is_active: bool,
    /// What the daemon has carried at that time, if it says.
    pub carried: Option<Carried>,
    fields: BTreeMap<String, u64>,
}

impl JobStats {
    /// Reads lines such as `memory_total: 268967936`. Others are skipped.
    pub fn parse(text: &str) -> Self {
        let mut stats = Self::default();
        for line in text.lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            let (name, Ok(value)) = (name.trim(), value.trim().parse::<u64>()) else { continue };
            match name {
                // `virDomainJobType`: 1 and 2 are running jobs; 3 to 5 have ended.
                "Job type" => stats.is_active = matches!(value, 1 | 2),
                // The event's output ends with a count of events.
                name if name.contains(' ') => {}
                name => {
                    stats.fields.insert(name.to_owned(), value);
                }
            }
        }
        stats
    }

    /// A field.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.fields.get(name).copied()
    }

    /// A field, 0 if it is missing.
    pub fn number(&self, name: &str) -> u64 {
        self.get(name).unwrap_or_default()
    }

    /// Whether it has statistics of a migration.
    pub fn has_memory(&self) -> bool {
        self.number("memory_total") > 0
    }

    /// The size of a page, in bytes.
    pub fn page_bytes(&self) -> u64 {
        match self.number("memory_page_size") {
            0 => vmferry_memory::PAGE_SIZE as u64,
            bytes => bytes,
        }
    }

    /// Bytes that QEMU has sent: memory and disks.
    pub fn qemu_bytes(&self) -> u64 {
        self.number("memory_processed") + self.number("disk_processed")
    }

    /// Bytes on the links between the hosts, or if the daemon does not say, those that QEMU has
    /// sent.
    pub fn sent_bytes(&self) -> u64 {
        self.carried.as_ref().map_or_else(|| self.qemu_bytes(), Carried::sent_bytes)
    }

    /// The same for memory only.
    pub fn sent_memory_bytes(&self) -> u64 {
        let carried = self.carried.as_ref().map(|carried| carried.memory.sent_bytes);
        carried.unwrap_or_else(|| self.number("memory_processed"))
    }

    /// Pages that QEMU has sent, with content or as a marker.
    pub fn sent_pages(&self) -> u64 {
        self.number("memory_normal") + self.number("memory_constant")
    }

    /// Pages that are left to send.
    pub fn pending_pages(&self) -> u64 {
        self.number("memory_remaining") / self.page_bytes()
    }

    /// All fields.
    pub fn facts(&self) -> Value {
        json!(self.fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by virsh 11.3 with QEMU 10.0.
    const RUNNING: &str = "\
Job type: 2

operation: 5
time_elapsed: 4675
downtime: 1933
setup_time: 3
memory_total: 268967936
memory_processed: 137274711
memory_remaining: 50888704
memory_bps: 31206831
memory_constant: 49125
memory_normal: 33341
memory_dirty_rate: 6947
memory_iteration: 3
memory_page_size: 4096
disk_total: 0
disk_processed: 4096
";

    #[test]
    fn parse_reads_a_running_job() {
        let stats = JobStats::parse(RUNNING);
        assert!(stats.is_active && stats.has_memory());
        assert_eq!(stats.qemu_bytes(), 137_274_711 + 4096);
        assert_eq!(stats.sent_bytes(), stats.qemu_bytes(), "the daemon has not said more");
        assert_eq!((stats.sent_pages(), stats.pending_pages()), (82466, 12424));
        assert_eq!(stats.facts()["memory_iteration"], 3);
    }

    #[test]
    fn parse_reads_an_event_and_no_job() {
        let event = "event 'job-completed' for domain 'web':\n\toperation: 5\n\tdowntime: 21\n\
                     events received: 1\n";
        let event = JobStats::parse(event);
        assert_eq!(
            (event.get("downtime"), event.facts().as_object().unwrap().len()),
            (Some(21), 2)
        );
        let none = JobStats::parse("Job type: 0\n\n");
        assert_eq!(none, JobStats::default());
        assert_eq!(none.page_bytes(), 4096);
    }
}
