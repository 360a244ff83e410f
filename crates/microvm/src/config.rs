//! The configuration of a machine.

use serde::{Deserialize, Serialize};
use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_memory::{MemoryKind, PAGE_SIZE, SlotId, SlotLayout};
use vmferry_wire::GuestIdentity;

use crate::error::MachineError;
use crate::kvm::{DISPLAY, DISPLAY_BYTES, HIGH_RAM, LOW_RAM_END, STILL};

/// Smallest memory. The first 16 MiB are reserved for the guest kernel and its tables.
pub const MIN_MEMORY_BYTES: u64 = 32 << 20;
/// Largest memory that the guest's page tables can map.
pub const MAX_MEMORY_BYTES: u64 = 256 << 30;
/// Maximum number of vCPUs.
pub const MAX_VCPUS: u8 = 8;
/// Limit of `churn`. The guest has a table of 16,384 buffers for each vCPU, of about 148 pages
/// each (`churn.h`): 9 GiB.
const CHURN_MIB_PER_VCPU: u64 = 8 << 10;
/// Maximum length of the command line in bytes.
const MAX_COMMAND_LINE: usize = 1024;

/// What runs the vCPUs.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    strum::Display,
    strum::EnumString,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_kind)]
pub enum GuestKind {
    /// KVM where it is usable, otherwise threads of this process.
    #[default]
    Auto,
    /// KVM.
    Kvm,
    /// Threads of this process.
    Process,
}

fn unknown_kind(text: &str) -> String {
    format!("`{text}` is not a kind of guest: choose auto, kvm or process")
}

/// The configuration of a machine.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// The guest's name and UUID.
    pub identity: GuestIdentity,
    /// What the guest sees. It is the same on every host.
    pub guest: GuestConfig,
    /// What runs the vCPUs.
    pub kind: GuestKind,
    /// The kind of memory on this host.
    pub memory_kind: MemoryKind,
    /// The dirty log of the next migration.
    pub dirty_log: LogChoice,
    /// How the log of the devices' writes is read.
    pub device_log: SoftwareWay,
}

/// What the guest sees of its machine. It is sent with the guest, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestConfig {
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// What the guest does; see the guest's `workload.h`.
    pub command_line: String,
    /// Whether the guest has a balloon. A balloon needs a guest on KVM.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub balloon: bool,
}

impl GuestConfig {
    /// Checks all bounds.
    ///
    /// # Errors
    /// [`MachineError::Config`] with the first setting that is out of bounds.
    pub fn check(&self) -> Result<(), MachineError> {
        let bad = |setting, reason: String| Err(MachineError::Config { setting, reason });
        let bytes = self.memory_bytes;
        if !(MIN_MEMORY_BYTES..=MAX_MEMORY_BYTES).contains(&bytes) {
            return bad("memory", format!("{bytes} bytes; choose 32M to 256G"));
        }
        if !bytes.is_multiple_of(2 << 20) {
            return bad("memory", format!("{bytes} bytes; choose a multiple of 2M"));
        }
        if !(1..=MAX_VCPUS).contains(&self.vcpus) {
            return bad("vcpus", format!("{}; choose 1 to {MAX_VCPUS}", self.vcpus));
        }
        let work_bytes = bytes - (16 << 20);
        let demand = check_command_line(&self.command_line)?;
        let fixed = demand.fixed_mib.saturating_mul(1 << 20);
        if fixed > work_bytes {
            let reason = format!(
                "asks for {} MiB, but only {} MiB of the memory can be used",
                fixed >> 20,
                work_bytes >> 20
            );
            return bad("workload", reason);
        }
        let heap_mib = self.heap_bytes(fixed) >> 20;
        if demand.freed_mib > heap_mib {
            let reason = format!(
                "`freed` asks for {} MiB, but the other words leave {heap_mib} MiB in 4 MiB blocks",
                demand.freed_mib
            );
            return bad("workload", reason);
        }
        // Each vCPU has its own blocks, and may use its last block only in part.
        let vcpus = u64::from(self.vcpus);
        let churn_mib = heap_mib.saturating_sub(4 * vcpus).min(CHURN_MIB_PER_VCPU * vcpus);
        if demand.churn_mib > churn_mib {
            let reason = format!(
                "`churn` asks for {} MiB, but only {churn_mib} MiB are available: the other words \
                 leave {heap_mib} MiB, of which 4 MiB per vCPU are reserved, and the limit is \
                 {CHURN_MIB_PER_VCPU} MiB per vCPU",
                demand.churn_mib
            );
            return bad("workload", reason);
        }
        match demand.driver {
            Some(word) if !self.balloon => {
                bad("workload", format!("`{word}` needs a guest with a balloon"))
            }
            _ => Ok(()),
        }
    }

    /// The size of the guest's heap: the 4 MiB blocks above the fixed pages of the workload
    /// (`find_blocks` in `heap.c`).
    fn heap_bytes(&self, fixed_bytes: u64) -> u64 {
        const BLOCK: u64 = 4 << 20;
        let low = self.memory_bytes.min(LOW_RAM_END);
        let high = self.memory_bytes - low;
        let first = (16 << 20) + fixed_bytes;
        let high_taken = first.saturating_sub(low).next_multiple_of(BLOCK);
        low.saturating_sub(first.next_multiple_of(BLOCK)) / BLOCK * BLOCK
            + high.saturating_sub(high_taken) / BLOCK * BLOCK
    }

    /// The memory slots: RAM up to 3 GiB, the two slots of a display if the workload has one, and
    /// the rest of RAM from 4 GiB on.
    #[must_use]
    pub fn layout(&self) -> Vec<SlotLayout> {
        let low = self.memory_bytes.min(LOW_RAM_END);
        let mut ranges = vec![(0, low)];
        if self.command_line.split_ascii_whitespace().any(|word| word == "display") {
            ranges.extend([(DISPLAY, DISPLAY_BYTES), (STILL, DISPLAY_BYTES)]);
        }
        if self.memory_bytes > low {
            ranges.push((HIGH_RAM, self.memory_bytes - low));
        }
        let slots = (0..).map(SlotId).zip(ranges);
        slots
            .map(|(slot, (gpa, bytes))| SlotLayout { slot, gpa, pages: bytes / PAGE_SIZE as u64 })
            .collect()
    }
}

/// The memory that a workload uses, and whether it needs a balloon.
#[derive(Default)]
struct WorkloadDemand {
    fixed_mib: u64,
    freed_mib: u64,
    churn_mib: u64,
    /// The last word that controls the balloon driver.
    driver: Option<&'static str>,
}

/// Checks a workload and returns what it needs.
fn check_command_line(text: &str) -> Result<WorkloadDemand, MachineError> {
    let bad = |reason: String| MachineError::Config { setting: "workload", reason };
    if text.len() > MAX_COMMAND_LINE {
        return Err(bad(format!("it is longer than {MAX_COMMAND_LINE} bytes")));
    }
    let mut demand = WorkloadDemand::default();
    let mut seen = Vec::new();
    for word in text.split_ascii_whitespace() {
        let (name, parameters) = word.split_once('=').unwrap_or((word, ""));
        if seen.contains(&name) {
            return Err(bad(format!("`{name}` is given twice")));
        }
        seen.push(name);
        let mut parameters = parameters.split(',');
        let mib = parameters.next().unwrap_or_default();
        let is_rate = |parameter: &str| {
            let rate = parameter.strip_prefix("rate=").and_then(|rate| rate.parse::<u32>().ok());
            rate.is_some_and(|rate| rate > 0)
        };
        let known = |parameter: &str| match name {
            "fill" => matches!(parameter, "incompressible" | "text" | "zero"),
            "hot" => matches!(parameter, "random" | "sequential") || is_rate(parameter),
            "churn" => is_rate(parameter),
            _ => false,
        };
        if let Some(unknown) = parameters.find(|parameter| !known(parameter)) {
            return Err(bad(format!("`{name}` has no `{unknown}`; {GRAMMAR}")));
        }
        match name {
            "idle" | "ticks" | "display" | "poison" | "init-on-free" if word == name => {}
            "lie" if LIES.contains(&mib) => demand.driver = Some("lie"),
            _ if DRIVER_WORDS.contains(&word) => {
                demand.driver = DRIVER_WORDS.into_iter().find(|driver| *driver == word);
            }
            "fill" | "read" | "hot" | "freed" | "churn" => {
                let mib = mib.parse::<u32>().ok().filter(|mib| *mib > 0);
                let mib =
                    mib.ok_or_else(|| bad(format!("`{word}` needs a size in MiB; {GRAMMAR}")))?;
                let used = match name {
                    "freed" => &mut demand.freed_mib,
                    "churn" => &mut demand.churn_mib,
                    _ => &mut demand.fixed_mib,
                };
                *used += u64::from(mib);
            }
            _ => return Err(bad(format!("`{word}` is unknown; {GRAMMAR}"))),
        }
    }
    Ok(demand)
}

/// Words that control the balloon driver.
const DRIVER_WORDS: [&str; 3] = ["pressure", "reporting", "rewrite"];
/// Ways in which a hostile balloon driver breaks the protocol. For tests, so not in [`GRAMMAR`].
const LIES: [&str; 8] = ["outside", "overlap", "used", "endless", "never", "id", "chain", "unmap"];

const GRAMMAR: &str = "use words of: idle, ticks, display, read=MIB, \
     fill=MIB,incompressible|text|zero, hot=MIB[,rate=PAGES_PER_S][,random|sequential], freed=MIB, \
     churn=MIB[,rate=PAGES_PER_S], poison, init-on-free, pressure, reporting, rewrite";

/// Checks a guest's name, which becomes a file name.
///
/// # Errors
/// [`MachineError::Config`].
pub fn check_name(name: &str) -> Result<(), MachineError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(fits) {
        let reason = format!("`{name}`; use up to 64 letters, digits, `-`, `_` and `.`");
        return Err(MachineError::Config { setting: "name", reason });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(memory_bytes: u64, vcpus: u8, command_line: &str) -> GuestConfig {
        GuestConfig { memory_bytes, vcpus, command_line: command_line.into(), balloon: false }
    }

    #[test]
    fn check_names_the_setting_that_is_out_of_bounds() {
        for (config, setting) in [
            (config(1 << 20, 1, ""), "memory"),
            (config((64 << 20) + 4096, 1, ""), "memory"),
            (config(1 << 40, 1, ""), "memory"),
            (config(64 << 20, 0, ""), "vcpus"),
            (config(64 << 20, 9, ""), "vcpus"),
            (config(64 << 20, 1, "hot=49"), "asks for 49 MiB, but only 48"),
            (config(64 << 20, 1, "hot=40 fill=9,text"), "asks for 49 MiB"),
            (config(64 << 20, 1, "dance"), "`dance` is unknown"),
            (config(64 << 20, 1, "hot"), "needs a size in MiB"),
            (config(64 << 20, 1, "hot=1,rate=0"), "no `rate=0`"),
            (config(64 << 20, 1, "hot=1 hot=2"), "is given twice"),
            (config(64 << 20, 1, "fill=1,jpeg"), "no `jpeg`"),
            (config(64 << 20, 1, "idle=3"), "`idle=3` is unknown"),
            (config(64 << 20, 1, "display=60"), "`display=60` is unknown"),
            (config(64 << 20, 1, "display,fast"), "`display,fast` is unknown"),
            (config(64 << 20, 1, "display idle display"), "`display` is given twice"),
            (config(64 << 20, 1, "read"), "`read` needs a size in MiB"),
            (config(64 << 20, 1, "read=0"), "`read=0` needs a size in MiB"),
            (config(64 << 20, 1, "read=1,text"), "`read` has no `text`"),
            (config(64 << 20, 1, "fill=8,zero read=33 hot=8"), "asks for 49 MiB, but only 48"),
            (config(64 << 20, 1, "freed"), "`freed` needs a size in MiB"),
            (config(64 << 20, 1, "freed=1,zero"), "`freed` has no `zero`"),
            (
                config(64 << 20, 1, "freed=49"),
                "`freed` asks for 49 MiB, but the other words leave 48",
            ),
            (config(64 << 20, 1, "fill=1,zero freed=45"), "leave 44 MiB"),
            (config(64 << 20, 1, "hot=48 churn=1"), "`churn` asks for 1 MiB, but only 0 MiB"),
            (config(64 << 20, 2, "churn=41"), "`churn` asks for 41 MiB, but only 40 MiB"),
            (config(64 << 20, 1, "churn=8,random"), "`churn` has no `random`"),
            (config(64 << 20, 1, "churn=8,rate=0"), "`churn` has no `rate=0`"),
            (config(32 << 30, 1, "churn=8193"), "only 8192 MiB are available"),
            (config(64 << 20, 1, "poison=1"), "`poison=1` is unknown"),
            (config(64 << 20, 1, "idle="), "`idle=` is unknown"),
            (config(64 << 20, 1, "pressure rewrite pressure"), "`pressure` is given twice"),
            (config(64 << 20, 1, "lie"), "`lie` is unknown"),
            (config(64 << 20, 1, "lie=white"), "`lie=white` is unknown"),
            (config(64 << 20, 1, "lie=used,text"), "`lie` has no `text`"),
            (config(64 << 20, 1, "lie=used lie=id"), "`lie` is given twice"),
            (config(64 << 20, 1, "lie=used"), "`lie` needs a guest with a balloon"),
        ] {
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains(setting), "{error}");
        }
        config(64 << 20, 8, "idle ticks fill=8,zero hot=40,rate=100,random").check().unwrap();
        config(64 << 20, 8, "read=48 display").check().unwrap();
        config(64 << 20, 2, "freed=48 churn=40,rate=9 poison").check().unwrap();
        config(64 << 20, 2, "churn=40 init-on-free").check().unwrap();
        let without = config(64 << 20, 1, "fill=3,zero freed=44 pressure reporting rewrite");
        let error = without.check().unwrap_err().to_string();
        assert!(error.contains("`rewrite` needs a guest with a balloon"), "{error}");
        GuestConfig { balloon: true, ..without }.check().unwrap();
        for lie in LIES {
            let liar = config(64 << 20, 1, &format!("fill=3,zero lie={lie}"));
            GuestConfig { balloon: true, ..liar }.check().unwrap();
        }
        // The fixed pages take all 3 GiB below 4 GiB and 1 MiB above: the heap begins at the next
        // block.
        config(4 << 30, 1, "fill=3057,zero freed=1020").check().unwrap();
    }

    #[test]
    fn layout_continues_at_4_gib_after_3_gib() {
        assert_eq!(config(64 << 20, 1, "").layout().len(), 1);
        let layout = config(8 << 30, 1, "").layout();
        assert_eq!((layout[0].pages, layout[1].pages), (3 << 18, 5 << 18));
        assert_eq!(layout[1].gpa, 4 << 30);
    }

    #[test]
    fn layout_of_a_display_has_two_more_slots_in_address_order() {
        let slots = |bytes, line| -> Vec<_> {
            let layout = config(bytes, 1, line).layout();
            layout.iter().map(|slot| (slot.slot.0, slot.gpa, slot.pages)).collect()
        };
        let (display, still) = ((1, 0xfd00_0000, 8), (2, 0xfd00_8000, 8));
        assert_eq!(slots(64 << 20, "idle read=4"), [(0, 0, 16384)]);
        assert_eq!(slots(64 << 20, "ticks display"), [(0, 0, 16384), display, still]);
        assert_eq!(slots(8 << 30, "hot=1"), [(0, 0, 3 << 18), (1, 4 << 30, 5 << 18)]);
        let whole = [(0, 0, 3 << 18), display, still, (3, 4 << 30, 5 << 18)];
        assert_eq!(slots(8 << 30, "display hot=1"), whole);
    }

    #[test]
    fn check_name_accepts_file_names_only() {
        check_name("web-1.example_x").unwrap();
        for name in ["", "a/b", "..", ".hidden", "a b", "é"] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }
}
