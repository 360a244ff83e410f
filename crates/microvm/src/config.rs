//! What a machine is made of.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_memory::{MemoryKind, PAGE_SIZE, SlotId, SlotLayout};
use vmferry_wire::GuestIdentity;

use crate::error::MachineError;
use crate::kvm::{DISPLAY, DISPLAY_BYTES, HIGH_RAM, LOW_RAM_END, STILL};

/// Smallest memory: what lies below 16 MiB is the machine's own.
pub const MIN_MEMORY_BYTES: u64 = 32 << 20;
/// Largest memory, by the guest's page tables.
pub const MAX_MEMORY_BYTES: u64 = 256 << 30;
/// Most vCPUs.
pub const MAX_VCPUS: u8 = 8;
/// The guest keeps a table of 16,384 buffers for each vCPU, of about 148 pages each (`churn.h`): 9 GiB.
const CHURN_MIB_PER_VCPU: u64 = 8 << 10;
/// Longest command line in bytes.
const MAX_COMMAND_LINE: usize = 1024;

/// What runs the vCPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GuestKind {
    /// KVM where it serves, else threads of this process.
    #[default]
    Auto,
    /// KVM.
    Kvm,
    /// Threads of this process.
    Process,
}

impl fmt::Display for GuestKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Kvm => "kvm",
            Self::Process => "process",
        })
    }
}

impl FromStr for GuestKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "kvm" => Ok(Self::Kvm),
            "process" => Ok(Self::Process),
            _ => Err(format!("`{text}` is no kind of guest: choose auto, kvm or process")),
        }
    }
}

/// A machine to be made.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// Who the guest is.
    pub identity: GuestIdentity,
    /// What the guest sees, the same on every host.
    pub guest: GuestConfig,
    /// What runs the vCPUs.
    pub kind: GuestKind,
    /// What the memory is made of on this host.
    pub memory_kind: MemoryKind,
    /// The dirty log of the next migration.
    pub dirty_log: LogChoice,
    /// How the log of what the machine's own devices write is read.
    pub device_log: SoftwareWay,
}

/// What the guest sees of its machine. It travels with the guest, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestConfig {
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// What the guest does; see the guest's `workload.h`.
    pub command_line: String,
    /// Whether it has a balloon, which takes a guest on KVM.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub balloon: bool,
}

impl GuestConfig {
    /// Checks all bounds.
    ///
    /// # Errors
    /// [`MachineError::Config`] with the first setting that is out of them.
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
        let wanted = check_command_line(&self.command_line)?;
        let fixed = wanted.fixed_mib.saturating_mul(1 << 20);
        if fixed > work_bytes {
            let reason = format!(
                "asks for {} MiB, and {} MiB of the memory can be used",
                fixed >> 20,
                work_bytes >> 20
            );
            return bad("workload", reason);
        }
        let heap_mib = self.heap_bytes(fixed) >> 20;
        if wanted.freed_mib > heap_mib {
            let reason = format!(
                "`freed` asks for {} MiB, and the others leave {heap_mib} MiB in blocks of 4",
                wanted.freed_mib
            );
            return bad("workload", reason);
        }
        // Each vCPU has blocks of its own, of which it uses the last in part.
        let vcpus = u64::from(self.vcpus);
        let churn_mib = heap_mib.saturating_sub(4 * vcpus).min(CHURN_MIB_PER_VCPU * vcpus);
        if wanted.churn_mib > churn_mib {
            let reason = format!(
                "`churn` asks for {} MiB, and {churn_mib} MiB can be had: of {heap_mib} MiB that the \
                 others leave, all but 4 MiB for each vCPU, and at most {CHURN_MIB_PER_VCPU} MiB each",
                wanted.churn_mib
            );
            return bad("workload", reason);
        }
        match wanted.driver {
            Some(word) if !self.balloon => {
                bad("workload", format!("`{word}` is of a guest with a balloon"))
            }
            _ => Ok(()),
        }
    }

    /// The size of the guest's heap: the blocks of 4 MiB above what the workloads with fixed pages
    /// take (`find_blocks` in `heap.c`).
    fn heap_bytes(&self, fixed_bytes: u64) -> u64 {
        const BLOCK: u64 = 4 << 20;
        let low = self.memory_bytes.min(LOW_RAM_END);
        let high = self.memory_bytes - low;
        let first = (16 << 20) + fixed_bytes;
        let high_taken = first.saturating_sub(low).next_multiple_of(BLOCK);
        low.saturating_sub(first.next_multiple_of(BLOCK)) / BLOCK * BLOCK
            + high.saturating_sub(high_taken) / BLOCK * BLOCK
    }

    /// The memory slots: RAM up to 3 GiB, the two of a display if the workload has one, and RAM that
    /// is more from 4 GiB on.
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

/// What a workload uses, in MiB.
#[derive(Default)]
struct Wanted {
    fixed_mib: u64,
    freed_mib: u64,
    churn_mib: u64,
    /// The last word that says what the driver of a balloon does.
    driver: Option<&'static str>,
}

/// Checks a workload and returns what it uses.
fn check_command_line(text: &str) -> Result<Wanted, MachineError> {
    let bad = |reason: String| MachineError::Config { setting: "workload", reason };
    if text.len() > MAX_COMMAND_LINE {
        return Err(bad(format!("is longer than {MAX_COMMAND_LINE} bytes")));
    }
    let mut wanted = Wanted::default();
    let mut seen = Vec::new();
    for word in text.split_ascii_whitespace() {
        let (name, parameters) = word.split_once('=').unwrap_or((word, ""));
        if seen.contains(&name) {
            return Err(bad(format!("`{name}` stands twice")));
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
            "lie" if LIES.contains(&mib) => wanted.driver = Some("lie"),
            _ if DRIVER_WORDS.contains(&word) => {
                wanted.driver = DRIVER_WORDS.into_iter().find(|driver| *driver == word);
            }
            "fill" | "read" | "hot" | "freed" | "churn" => {
                let mib = mib.parse::<u32>().ok().filter(|mib| *mib > 0);
                let mib = mib.ok_or_else(|| bad(format!("`{word}` needs MiB; {GRAMMAR}")))?;
                let used = match name {
                    "freed" => &mut wanted.freed_mib,
                    "churn" => &mut wanted.churn_mib,
                    _ => &mut wanted.fixed_mib,
                };
                *used += u64::from(mib);
            }
            _ => return Err(bad(format!("`{word}` is unknown; {GRAMMAR}"))),
        }
    }
    Ok(wanted)
}

/// What the driver of a balloon does.
const DRIVER_WORDS: [&str; 3] = ["pressure", "reporting", "rewrite"];
/// How it lies.
const LIES: [&str; 8] = ["outside", "overlap", "used", "endless", "never", "id", "chain", "unmap"];

const GRAMMAR: &str = "use words of: idle, ticks, display, read=MIB, \
     fill=MIB,incompressible|text|zero, hot=MIB[,rate=PAGES_PER_S][,random|sequential], freed=MIB, \
     churn=MIB[,rate=PAGES_PER_S], poison, init-on-free, pressure, reporting, rewrite";

/// Checks a guest's name: it becomes a file name.
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
    fn bounds_are_checked_and_named() {
        for (config, setting) in [
            (config(1 << 20, 1, ""), "memory"),
            (config((64 << 20) + 4096, 1, ""), "memory"),
            (config(1 << 40, 1, ""), "memory"),
            (config(64 << 20, 0, ""), "vcpus"),
            (config(64 << 20, 9, ""), "vcpus"),
            (config(64 << 20, 1, "hot=49"), "asks for 49 MiB, and 48"),
            (config(64 << 20, 1, "hot=40 fill=9,text"), "asks for 49 MiB"),
            (config(64 << 20, 1, "dance"), "`dance` is unknown"),
            (config(64 << 20, 1, "hot"), "needs MiB"),
            (config(64 << 20, 1, "hot=1,rate=0"), "no `rate=0`"),
            (config(64 << 20, 1, "hot=1 hot=2"), "stands twice"),
            (config(64 << 20, 1, "fill=1,jpeg"), "no `jpeg`"),
            (config(64 << 20, 1, "idle=3"), "`idle=3` is unknown"),
            (config(64 << 20, 1, "display=60"), "`display=60` is unknown"),
            (config(64 << 20, 1, "display,fast"), "`display,fast` is unknown"),
            (config(64 << 20, 1, "display idle display"), "`display` stands twice"),
            (config(64 << 20, 1, "read"), "`read` needs MiB"),
            (config(64 << 20, 1, "read=0"), "`read=0` needs MiB"),
            (config(64 << 20, 1, "read=1,text"), "`read` has no `text`"),
            (config(64 << 20, 1, "fill=8,zero read=33 hot=8"), "asks for 49 MiB, and 48"),
            (config(64 << 20, 1, "freed"), "`freed` needs MiB"),
            (config(64 << 20, 1, "freed=1,zero"), "`freed` has no `zero`"),
            (config(64 << 20, 1, "freed=49"), "`freed` asks for 49 MiB, and the others leave 48"),
            (config(64 << 20, 1, "fill=1,zero freed=45"), "leave 44 MiB"),
            (config(64 << 20, 1, "hot=48 churn=1"), "`churn` asks for 1 MiB, and 0 MiB"),
            (config(64 << 20, 2, "churn=41"), "`churn` asks for 41 MiB, and 40 MiB"),
            (config(64 << 20, 1, "churn=8,random"), "`churn` has no `random`"),
            (config(64 << 20, 1, "churn=8,rate=0"), "`churn` has no `rate=0`"),
            (config(32 << 30, 1, "churn=8193"), "and 8192 MiB can be had"),
            (config(64 << 20, 1, "poison=1"), "`poison=1` is unknown"),
            (config(64 << 20, 1, "idle="), "`idle=` is unknown"),
            (config(64 << 20, 1, "pressure rewrite pressure"), "`pressure` stands twice"),
            (config(64 << 20, 1, "lie"), "`lie` is unknown"),
            (config(64 << 20, 1, "lie=white"), "`lie=white` is unknown"),
            (config(64 << 20, 1, "lie=used,text"), "`lie` has no `text`"),
            (config(64 << 20, 1, "lie=used lie=id"), "`lie` stands twice"),
            (config(64 << 20, 1, "lie=used"), "`lie` is of a guest with a balloon"),
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
        assert!(error.contains("`rewrite` is of a guest with a balloon"), "{error}");
        GuestConfig { balloon: true, ..without }.check().unwrap();
        for lie in LIES {
            let liar = config(64 << 20, 1, &format!("fill=3,zero lie={lie}"));
            GuestConfig { balloon: true, ..liar }.check().unwrap();
        }
        // All of the 3 GiB below 4 GiB is taken, and 1 MiB above: the heap begins at the next block.
        config(4 << 30, 1, "fill=3057,zero freed=1020").check().unwrap();
    }

    #[test]
    fn memory_beyond_3_gib_continues_at_4_gib() {
        assert_eq!(config(64 << 20, 1, "").layout().len(), 1);
        let layout = config(8 << 30, 1, "").layout();
        assert_eq!((layout[0].pages, layout[1].pages), (3 << 18, 5 << 18));
        assert_eq!(layout[1].gpa, 4 << 30);
    }

    #[test]
    fn a_display_has_two_slots_of_its_own_in_the_order_of_addresses() {
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
    fn names_are_file_names() {
        check_name("web-1.example_x").unwrap();
        for name in ["", "a/b", "..", ".hidden", "a b", "é"] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }
}
