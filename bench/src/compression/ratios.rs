//! Ratios between the methods, and their targets.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use vmferry_memory::PAGE_SIZE;

use super::content::Content;
use super::hot::{HotRow, delta_over_best};
use super::rows::Cell;
use super::way::Way;
use super::yardsticks::{CodecRow, best_ratio};
use super::{Key, Link};
use crate::aims::{Ratios, Target};

/// All measurements of the benchmark.
pub struct Measured<'a> {
    /// Every case.
    pub cells: &'a BTreeMap<Key, Cell>,
    /// Each codec alone.
    pub codecs: &'a [CodecRow],
    /// Pages that change a little between rounds.
    pub hot: &'a [HotRow],
    /// The contents and links that were measured.
    pub plan: (&'a [Content], &'a [Link]),
}

impl Measured<'_> {
    /// Computes the ratios.
    ///
    /// # Errors
    /// A case is missing, or a ratio is not finite.
    pub fn ratios(&self) -> anyhow::Result<Ratios> {
        use Target::{AtLeast, AtMost};
        let mut ratios = Ratios::default();
        let program = |way| self.pages_per_s((Content::Program, Link::Uncapped, way));
        ratios.aim(
            "pipeline_over_percall_zlib",
            program(Way::ZlibPipeline)? / program(Way::ZlibPerCall)?,
            AtLeast(2.0),
            "pages/s, program-like, no cap: zlib by a pool over zlib per page, as published",
        );
        ratios.aim(
            "auto_over_percall_zlib_uncapped",
            program(Way::Auto)? / program(Way::ZlibPerCall)?,
            AtLeast(4.0),
            "the same: auto over zlib per page",
        );
        self.of_link_limit(&mut ratios)?;
        self.over_others(&mut ratios)?;
        ratios.aim(
            "delta_over_best_nodelta_hot",
            delta_over_best(self.hot)?,
            AtLeast(8.0),
            "hot pages: bytes with the best codec alone over bytes as deltas",
        );
        let pools = || self.cells.iter().filter(|((_, _, way), _)| way.is_pipeline());
        ratios.aim(
            "allocations_per_page",
            worst(pools().map(|(_, cell)| cell.profile.allocations_per_page), f64::max)?,
            AtMost(0.0),
            "both sides, worst of the ways with a pool; \
             all of it are messages and the conductor, frames have none",
        );
        ratios.aim(
            "migration_thread_cpu_share",
            worst(
                pools().map(|(_, cell)| cell.profile.migration_thread_percent / 100.0),
                f64::max,
            )?,
            AtMost(0.1),
            "of the source's CPU time, worst of the ways with a pool: \
             that thread never compresses",
        );
        let per_call = (Content::Program, Link::Uncapped, Way::ZlibPerCall);
        let per_call = self.cells.get(&per_call).context("zlib per call was not measured")?;
        ratios
            .values
            .insert("allocations_per_page_percall".into(), per_call.profile.allocations_per_page);
        for (name, value) in &ratios.values {
            ensure!(value.is_finite(), "{name} is not finite");
        }
        Ok(ratios)
    }

    /// Throughput of auto on the slow link, relative to what the link carries at the best codec's
    /// ratio.
    fn of_link_limit(&self, ratios: &mut Ratios) -> anyhow::Result<()> {
        let cap = Link::Mbit350.cap().context("the link has no cap")? as f64;
        let mut all = Vec::new();
        for content in self.plan.0.iter().filter(|content| content.is_compressible()) {
            let limit = cap * best_ratio(self.codecs, *content) / PAGE_SIZE as f64;
            let part = self.pages_per_s((*content, Link::Mbit350, Way::Auto))? / limit;
            ratios.values.insert(format!("auto_of_link_limit_350mbit_{}", content.key()), part);
            all.push(part);
        }
        ratios.aim(
            "auto_of_link_limit_350mbit",
            worst(all.into_iter(), f64::min)?,
            Target::AtLeast(0.9),
            "pages/s over what the cap allows at the best ratio of any codec; \
             worst content that compresses",
        );
        Ok(())
    }

    /// Auto relative to raw without a cap, and to the best fixed method in every case.
    fn over_others(&self, ratios: &mut Ratios) -> anyhow::Result<()> {
        let (mut over_raw, mut over_best) = (Vec::new(), Vec::new());
        for content in self.plan.0 {
            for link in self.plan.1 {
                let auto = self.pages_per_s((*content, *link, Way::Auto))?;
                let mut best: f64 = 0.0;
                for way in Way::GRID.into_iter().filter(|way| way.is_fixed()) {
                    let fixed = self.pages_per_s((*content, *link, way))?;
                    best = best.max(fixed);
                    if way == Way::Raw && *link == Link::Uncapped {
                        over_raw.push(auto / fixed);
                        let name = format!("auto_over_raw_uncapped_{}", content.key());
                        ratios.values.insert(name, auto / fixed);
                    }
                }
                let name = format!("auto_over_best_fixed_{}_{}", content.key(), link.name());
                ratios.values.insert(name, auto / best);
                over_best.push(auto / best);
            }
        }
        ratios.aim(
            "auto_over_raw_uncapped",
            worst(over_raw.into_iter(), f64::min)?,
            Target::AtLeast(0.95),
            "pages/s without a cap, worst content: \
             what it costs to leave auto on where raw is best",
        );
        ratios.aim(
            "auto_worst_over_best_fixed",
            worst(over_best.into_iter(), f64::min)?,
            Target::AtLeast(0.9),
            "pages/s over the best of raw, zlib, lz4, zstd:1 and zstd:3; \
             worst of all contents and links",
        );
        Ok(())
    }

    fn pages_per_s(&self, key: Key) -> anyhow::Result<f64> {
        let (content, link, way) = key;
        let cell = self.cells.get(&key).map(|cell| cell.pages_per_s).with_context(|| {
            format!("{}, {}, {} was not measured", content.name(), link.name(), way.name())
        })?;
        ensure!(cell > 0.0, "{}, {}, {}: no pages", content.name(), link.name(), way.name());
        Ok(cell)
    }
}

fn worst(all: impl Iterator<Item = f64>, pick: fn(f64, f64) -> f64) -> anyhow::Result<f64> {
    all.reduce(pick).context("nothing was measured")
}
