//! The guest's report on itself, which it writes into its own memory (`guest/report.h`).

use serde::{Deserialize, Serialize};
use vmferry_memory::{GuestMemory, MemoryError, PAGE_SIZE};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use self::balloon::{BalloonReport, DriverState};

mod balloon;

const REPORT_ADDRESS: u64 = 0x8000;
const REPORT_MAGIC: u64 = u64::from_le_bytes(*b"VMFERRYR");
const REPORT_VERSION: u32 = 3;
const MAX_VCPUS: u32 = 8;

/// `struct guest_report`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct RawGuest {
    magic: u64,
    version: u32,
    vcpus: u32,
    fill_pages: u64,
    read_pages: u64,
    hot_pages: u64,
    rate: u64,
    fill_kind: u32,
    random: u32,
    display_pages: u32,
    flags: u32,
    churn_pages: u64,
    churn_rate: u64,
    freed_pages: u64,
}
const _: () = assert!(size_of::<RawGuest>() == 88);

/// `struct corruption`.
#[repr(C)]
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Serialize,
    Deserialize,
)]
pub struct Corruption {
    /// Guest-physical address of the page.
    pub gpa: u64,
    /// The expected generation, word or heartbeat.
    pub expected: u64,
    /// The value that was found.
    pub found: u64,
    /// The round of the vCPU in which it was found.
    pub round: u64,
}

/// The public part of `struct vcpu_report`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct RawVcpu {
    rounds: u64,
    pages_written: u64,
    pages_checked: u64,
    corruptions: u64,
    first: Corruption,
    ticks: u64,
    last_tsc: u64,
    longest_gap_tsc: u64,
    phase: u64,
    heartbeats: u64,
    fill_rounds: u64,
    read_rounds: u64,
    frames: u64,
    churn_rounds: u64,
    buffers_allocated: u64,
    buffers_freed: u64,
    churn_work: u64,
}
const _: () = assert!(size_of::<RawVcpu>() == 160);

/// The guest's report, summed up over all vCPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Whether the guest has started.
    pub started: bool,
    /// Whether the guest has populated all memory that its workload uses.
    pub populated: bool,
    /// Rounds over the hot pages: the minimum over all vCPUs.
    pub rounds: u64,
    /// Complete checks of the filled pages: the minimum over all vCPUs.
    pub fill_rounds: u64,
    /// Complete checks of the pages that are only read: the minimum over all vCPUs.
    pub read_rounds: u64,
    /// Frames drawn on the display.
    pub frames: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Pages checked.
    pub pages_checked: u64,
    /// Pages found damaged.
    pub corruptions: u64,
    /// The first damaged page that was found.
    pub first_corruption: Option<Corruption>,
    /// Timer ticks: the minimum over all vCPUs.
    pub ticks: u64,
    /// Heartbeats of the VMM's device that the guest has seen.
    pub heartbeats: u64,
    /// Longest time between two steps of a vCPU, in cycles of the time stamp counter.
    pub longest_gap_tsc: u64,
    /// Pages that the workload fills, reads and rewrites, without those of the display.
    pub work_pages: u64,
    /// Pages that the workload fills once and checks from time to time.
    pub fill_pages: u64,
    /// Pages that the workload fills once and then reads without pause.
    pub read_pages: u64,
    /// Pages of the frame buffer, and of the constant slot beside it. 0 without a display.
    pub display_pages: u64,
    /// Maximum pages in live buffers of `churn`. 0 without `churn`.
    pub churn_pages: u64,
    /// Pages that were written once and freed, before any other use of the heap.
    pub freed_pages: u64,
    /// Complete checks of the live buffers: the minimum over all vCPUs.
    pub churn_rounds: u64,
    /// Buffers allocated.
    pub buffers_allocated: u64,
    /// Buffers freed. Each was checked completely before it was freed.
    pub buffers_freed: u64,
    /// Pages of buffers written or checked. Its rate is the speed of the guest.
    pub churn_work: u64,
    /// The report of the balloon driver, if there is a balloon.
    pub balloon: Option<BalloonReport>,
    /// The progress of each vCPU.
    pub vcpus: Vec<VcpuProgress>,
}

/// The progress of one vCPU over its share of the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuProgress {
    /// Rounds over its hot pages.
    pub rounds: u64,
    /// Rounds over its filled pages.
    pub fill_rounds: u64,
    /// Rounds over the pages that it only reads.
    pub read_rounds: u64,
    /// Rounds over its live buffers.
    pub churn_rounds: u64,
    /// Timer ticks.
    pub ticks: u64,
}

impl Report {
    /// The guest-physical addresses of the report.
    pub const ADDRESSES: std::ops::Range<u64> = REPORT_ADDRESS..balloon::END;

    /// Reads the report. The guest may be running: each number is read atomically, and all are
    /// read at about the same time.
    ///
    /// # Errors
    /// If the memory does not have these addresses.
    pub fn read(memory: &GuestMemory) -> Result<Self, MemoryError> {
        let mut bytes = [0; size_of::<RawGuest>()];
        memory.read_at(REPORT_ADDRESS, &mut bytes)?;
        let guest: RawGuest = zerocopy::transmute!(bytes);
        if guest.magic != REPORT_MAGIC || guest.version != REPORT_VERSION {
            return Ok(Self::default());
        }
        let vcpus = guest.vcpus.clamp(1, MAX_VCPUS);
        // The guest may report any numbers, so sums must not overflow.
        let add = |sum: &mut u64, part: u64| *sum = sum.saturating_add(part);
        let mut report = Self {
            started: true,
            populated: true,
            rounds: u64::MAX,
            fill_rounds: u64::MAX,
            read_rounds: u64::MAX,
            churn_rounds: u64::MAX,
            ticks: u64::MAX,
            fill_pages: guest.fill_pages,
            read_pages: guest.read_pages,
            work_pages: [guest.read_pages, guest.hot_pages]
                .into_iter()
                .fold(guest.fill_pages, u64::saturating_add),
            display_pages: guest.display_pages.into(),
            churn_pages: guest.churn_pages,
            freed_pages: guest.freed_pages,
            balloon: BalloonReport::read(memory)?,
            ..Self::default()
        };
        for vcpu in 0..u64::from(vcpus) {
            let mut bytes = [0; size_of::<RawVcpu>()];
            memory.read_at(REPORT_ADDRESS + (1 + vcpu) * PAGE_SIZE as u64, &mut bytes)?;
            let vcpu: RawVcpu = zerocopy::transmute!(bytes);
            report.populated &= vcpu.phase == 1;
            report.rounds = report.rounds.min(vcpu.rounds);
            report.fill_rounds = report.fill_rounds.min(vcpu.fill_rounds);
            report.read_rounds = report.read_rounds.min(vcpu.read_rounds);
            report.churn_rounds = report.churn_rounds.min(vcpu.churn_rounds);
            add(&mut report.frames, vcpu.frames);
            add(&mut report.buffers_allocated, vcpu.buffers_allocated);
            add(&mut report.buffers_freed, vcpu.buffers_freed);
            add(&mut report.churn_work, vcpu.churn_work);
            add(&mut report.pages_written, vcpu.pages_written);
            add(&mut report.pages_checked, vcpu.pages_checked);
            add(&mut report.corruptions, vcpu.corruptions);
            if vcpu.corruptions > 0 && report.first_corruption.is_none() {
                report.first_corruption = Some(vcpu.first);
            }
            report.ticks = report.ticks.min(vcpu.ticks);
            add(&mut report.heartbeats, vcpu.heartbeats);
            report.vcpus.push(VcpuProgress {
                rounds: vcpu.rounds,
                fill_rounds: vcpu.fill_rounds,
                read_rounds: vcpu.read_rounds,
                churn_rounds: vcpu.churn_rounds,
                ticks: vcpu.ticks,
            });
            report.longest_gap_tsc = report.longest_gap_tsc.max(vcpu.longest_gap_tsc);
        }
        Ok(report)
    }

    /// Whether each vCPU has checked each of its pages since `before`, an earlier report of the
    /// same guest. A sum of all checks would not show this: hot pages are checked far more often
    /// than filled ones, and one vCPU may be faster than another.
    #[must_use]
    pub fn has_checked_all_since(&self, before: &Self) -> bool {
        // The current round may already have passed a page. Only the next round visits every page.
        let whole_round =
            |pages: u64, now: u64, then: u64| pages == 0 || now >= then.saturating_add(2);
        let constant_pages = self.fill_pages.saturating_add(self.read_pages);
        let hot_pages = self.work_pages.saturating_sub(constant_pages);
        // Both slots of a display are checked completely before each frame.
        whole_round(self.display_pages, self.frames, before.frames)
            && self.vcpus.len() == before.vcpus.len()
            && self.vcpus.iter().zip(&before.vcpus).all(|(now, then)| {
                whole_round(hot_pages, now.rounds, then.rounds)
                    && whole_round(self.fill_pages, now.fill_rounds, then.fill_rounds)
                    && whole_round(self.read_pages, now.read_rounds, then.read_rounds)
                    && whole_round(self.churn_pages, now.churn_rounds, then.churn_rounds)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(fill_pages: u64, work_pages: u64, rounds: &[(u64, u64)]) -> Report {
        let vcpus = rounds
            .iter()
            .map(|&(rounds, fill_rounds)| VcpuProgress {
                rounds,
                fill_rounds,
                read_rounds: 0,
                churn_rounds: 0,
                ticks: 0,
            })
            .collect();
        Report { fill_pages, work_pages, vcpus, ..Report::default() }
    }

    #[test]
    fn has_checked_all_needs_a_whole_round_of_every_vcpu() {
        let before = report(1, 2, &[(5, 5), (9, 9)]);
        for (now, whole) in [
            ([(5, 5), (9, 9)], false),
            ([(7, 7), (11, 10)], false),
            ([(7, 7), (9, 11)], false),
            ([(70, 6), (110, 11)], false),
            ([(7, 7), (11, 11)], true),
        ] {
            assert_eq!(report(1, 2, &now).has_checked_all_since(&before), whole, "{now:?}");
        }
        let hot_only = report(0, 2, &[(5, 0)]);
        assert!(report(0, 2, &[(7, 0)]).has_checked_all_since(&hot_only));
        assert!(!report(0, 2, &[(6, 0)]).has_checked_all_since(&hot_only));
        let fill_only = report(2, 2, &[(0, 3)]);
        assert!(report(2, 2, &[(0, 5)]).has_checked_all_since(&fill_only));
        assert!(!report(2, 2, &[(0, 4)]).has_checked_all_since(&fill_only));
        let reads = |rounds: &[u64]| {
            let vcpus = rounds.iter().map(|&read_rounds| VcpuProgress {
                rounds: 0,
                fill_rounds: 0,
                read_rounds,
                churn_rounds: 0,
                ticks: 0,
            });
            Report { read_pages: 2, work_pages: 2, vcpus: vcpus.collect(), ..Report::default() }
        };
        assert!(reads(&[5, 7]).has_checked_all_since(&reads(&[3, 5])));
        assert!(!reads(&[5, 6]).has_checked_all_since(&reads(&[3, 5])));
        let churns = |rounds: &[u64]| {
            let vcpus = rounds.iter().map(|&churn_rounds| VcpuProgress {
                rounds: 0,
                fill_rounds: 0,
                read_rounds: 0,
                churn_rounds,
                ticks: 0,
            });
            Report { churn_pages: 2, vcpus: vcpus.collect(), ..Report::default() }
        };
        assert!(churns(&[5, 7]).has_checked_all_since(&churns(&[3, 5])));
        assert!(!churns(&[5, 6]).has_checked_all_since(&churns(&[3, 5])));
        let display = |frames| Report { display_pages: 8, frames, ..report(0, 0, &[(0, 0)]) };
        assert!(display(9).has_checked_all_since(&display(7)));
        assert!(!display(8).has_checked_all_since(&display(7)));
        let idle = report(0, 0, &[(0, 0)]);
        assert!(idle.has_checked_all_since(&idle));
        assert!(!idle.has_checked_all_since(&Report::default()), "not the same guest");
    }

    #[test]
    fn report_round_trips_as_json() {
        let sent = report(1, 2, &[(5, 6)]);
        let text = serde_json::to_string(&sent).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), sent);
    }
}
