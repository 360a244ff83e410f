//! A session's missing pages, with post-copy.

use std::time::{Duration, Instant};

use vmferry_memory::{PageRun, PageSet};

use super::Session;
use crate::data::destination::missing::{MissingPages, MissingSet};
use crate::data::destination::target::Target;
use crate::error::MigrateError;
use crate::link::lost;
use crate::stats::FetchStats;
use crate::vmm::DestinationVm;

impl<V: DestinationVm> Session<'_, V> {
    /// Frees pages that are outdated.
    pub(super) fn free_outdated(&self, runs: &[PageRun]) -> Result<(), MigrateError> {
        let Some(Target::Memory(target)) = &self.target else { return Ok(()) };
        for &run in runs {
            target.memory.discard(run)?;
            target.hashes.forget(run);
        }
        Ok(())
    }

    /// Fetches all missing pages that are touched from now on.
    pub(super) fn fetch_missing(&mut self, missing: PageSet) -> Result<(), MigrateError> {
        // No thread places pages in the old way from here on.
        self.end_lanes();
        let (Some(Target::Memory(target)), Some(lanes)) = (&self.target, &mut self.fetch_lanes)
        else {
            let reason = "post-copy of a guest that is streamed";
            return Err(MigrateError::protocol("control", 0, reason));
        };
        let (target, set) = (target.clone(), MissingSet::new(missing));
        let missing = MissingPages::register(target.memory, target.hashes, set, |memory| {
            self.vm.register_faults(memory).map_err(|source| MigrateError::Vm {
                action: "register its memory for missing pages",
                source,
            })
        })?;
        lanes.start(missing, self.inputs.0.clone(), self.cpu.clone())
    }

    /// Loads the guest's state. With post-copy the VMM may wait for pages meanwhile, so this ends
    /// when the source is lost or silent.
    pub(super) fn load(&mut self, state: &[u8], paused: bool) -> Result<Duration, MigrateError> {
        let begun = Instant::now();
        let missing = self.fetch_lanes.as_ref().and_then(|lanes| lanes.missing()).cloned();
        let patience = self.config.timeouts.ready;
        let failed = |source| MigrateError::Vm { action: "load the guest's state", source };
        let (loaded, loads) = crossbeam_channel::bounded::<()>(0);
        let watched = missing.clone().map(|missing| {
            std::thread::Builder::new().name("load-watch".into()).spawn(move || {
                // The other end is dropped when the load has ended.
                if loads.recv_timeout(patience).is_err_and(|error| error.is_timeout()) {
                    // Fails only for memory that was unmapped meanwhile.
                    let _ = missing.give_up_load();
                }
            })
        });
        let ready = if paused { self.vm.stay_paused() } else { Ok(()) };
        let done = match ready {
            Ok(()) if !self.is_loaded => self.vm.load(state),
            ready => ready,
        };
        drop(loaded);
        watched.transpose().map_err(MigrateError::no_thread)?;
        if missing.is_some_and(|missing| !missing.end_load()) {
            let cut = std::io::Error::other("the pages that the state needs have not arrived");
            return Err(lost("fetch lanes", "the loading of the state", &cut));
        }
        done.map(|()| begun.elapsed()).map_err(failed)
    }

    /// The last missing page has arrived.
    pub(super) fn note_fetched(&mut self) {
        let Some(missing) = self.fetch_lanes.as_ref().and_then(|lanes| lanes.missing()) else {
            return;
        };
        let (counts, waits) = missing.counts();
        let fetch = self.guest_started.map_or(Duration::ZERO, |started| started.elapsed());
        self.fetch_stats = Some(FetchStats {
            missing_pages: counts.fault_pages + counts.background_pages,
            fault_pages: counts.fault_pages,
            background_pages: counts.background_pages,
            again_pages: counts.again_pages,
            faults: counts.faults,
            zero_faults: counts.zero_faults,
            fetch_ms: fetch.as_secs_f64() * 1e3,
            waited_ms: waits.total().as_secs_f64() * 1e3,
            wait_mean_us: waits.mean_us(),
            wait_p50_us: waits.quantile_us(0.5),
            wait_p99_us: waits.quantile_us(0.99),
            wait_max_us: waits.max_us(),
        });
    }
}
