//! The handlers: a thread for each descriptor, which places a page for each fault.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, anyhow};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{ClockId, clock_gettime};
use vmferry_faults::{FaultRanges, Waited, Wake};
use vmferry_memory::PAGE_SIZE;

/// Every byte of the pages that are placed.
pub const CONTENT: u8 = 7;

/// What all handlers together have done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Handled {
    pub faults: u64,
    pub cpu_s: f64,
}

/// Runs `act` while all faults are handled.
///
/// # Errors
/// Those of `act`, and of a handler.
pub fn while_handled<T>(
    ranges: &FaultRanges,
    act: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<(T, Handled)> {
    let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
    std::thread::scope(|scope| {
        let stop = &stop;
        let handlers: Vec<_> = (0..ranges.shares())
            .map(|share| scope.spawn(move || handle(ranges, share, stop)))
            .collect();
        let result = act();
        rustix::io::write(stop, &1_u64.to_ne_bytes())?;
        let mut all = Handled::default();
        for handler in handlers {
            let handled = handler.join().map_err(|_| anyhow!("a handler panicked"))??;
            all.faults += handled.faults;
            all.cpu_s += handled.cpu_s;
        }
        Ok((result?, all))
    })
}

fn handle(ranges: &FaultRanges, share: usize, stop: &OwnedFd) -> anyhow::Result<Handled> {
    let served = serve(ranges, share, stop);
    if served.is_err() {
        // The guest continues, with zeros, and reports them.
        ranges.unregister()?;
    }
    let cpu = clock_gettime(ClockId::ThreadCPUTime);
    Ok(Handled { faults: served?, cpu_s: cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9 })
}

fn serve(ranges: &FaultRanges, share: usize, stop: &OwnedFd) -> anyhow::Result<u64> {
    let page = [CONTENT; PAGE_SIZE];
    let mut share = ranges.share(share, stop.as_fd());
    let (mut faults, mut served) = (Vec::new(), 0);
    while share.wait(&mut faults)? == Waited::Faults {
        served += faults.len() as u64;
        for fault in faults.drain(..) {
            let range = ranges.range_at(fault.address).context("a fault outside all ranges")?;
            range.descriptor.place(fault.address, &page, Wake::Now)?;
        }
    }
    Ok(served)
}
