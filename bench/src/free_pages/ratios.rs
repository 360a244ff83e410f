//! The savings by hints, with the published savings and the targets.

use std::collections::BTreeMap;

use super::guest::Sample;
use super::{Case, Work};
use crate::aims::{Ratios, Target};
use crate::results::{least, median, most};

/// Computes the ratios from the samples by case and hints.
pub fn of(cases: &[Case], samples: &BTreeMap<(usize, bool), Vec<Sample>>) -> Ratios {
    let mut ratios = Ratios::default();
    let (mut over_nonfree, mut work, mut in_spans) = (Vec::new(), Vec::new(), Vec::new());
    for (index, case) in cases.iter().enumerate() {
        let of = |hints, part: fn(&Sample) -> f64| {
            let samples = samples.get(&(index, hints)).map_or(&[][..], Vec::as_slice);
            median(samples.iter().map(part))
        };
        let reduction =
            1.0 - of(true, |sample| sample.total_ms) / of(false, |sample| sample.total_ms);
        let aim = match (case.work, case.memory_mib > 64 << 10) {
            (Work::Idle { .. }, false) => 0.92,
            (Work::Idle { .. }, true) => 0.95,
            (Work::Churn { .. }, false) => 0.7,
            (Work::Churn { .. }, true) => 0.82,
        };
        let name = format!("{}_reduction", case.name);
        ratios.aim(&name, reduction, Target::AtLeast(aim), "of the total time, by hints");
        if let Some((with, without)) = case.published_ms(true).zip(case.published_ms(false)) {
            ratios.values.insert(format!("{name}_published"), 1.0 - with / without);
        }
        let nonfree = of(true, |sample| sample.page_bytes / sample.nonfree_bytes);
        ratios.values.insert(format!("{}_sent_over_nonfree", case.name), nonfree);
        over_nonfree.push(nonfree);
        if let Work::Churn { .. } = case.work {
            let during = |hints| of(hints, |sample| sample.work_per_s_during);
            let ratio = during(true) / during(false);
            ratios.values.insert(format!("{}_guest_work_ratio", case.name), ratio);
            work.push(ratio);
            let in_span = |hints| of(hints, |sample| sample.work_per_s_in_span);
            let ratio = in_span(true) / in_span(false);
            ratios.values.insert(format!("{}_guest_work_ratio_in_span", case.name), ratio);
            in_spans.push(ratio);
        }
    }
    ratios.aim(
        "sent_over_nonfree",
        most(over_nonfree),
        Target::AtMost(1.15),
        "bytes of guest pages sent with hints over those in use, the worst guest",
    );
    ratios.aim(
        "guest_work_ratio",
        least(work),
        Target::AtLeast(0.98),
        "the guest's work per second while it moves, with hints over without, the worst",
    );
    ratios.aim(
        "guest_work_ratio_in_span",
        least(in_spans),
        Target::AtLeast(0.98),
        "the same over the time that the move without hints took, as the published build's time",
    );
    ratios
}
