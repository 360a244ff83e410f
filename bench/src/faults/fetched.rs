//! Pages that are fetched: the engine's fetch lane over TLS on loopback, in one process.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use vmferry::data::CpuMeter;
use vmferry::data::destination::fetch::lanes::FetchLanes;
use vmferry::data::destination::missing::MissingPages;
use vmferry::data::source::page_encoder::PageEncoder;
use vmferry::data::source::page_server::{FetchLaneContext, PageServer, Served};
use vmferry::link::DataChannel;
use vmferry_codec::{Compressors, HotPages, PageHashes};
use vmferry_faults::FaultRanges;
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageSet, SlotId, SlotLayout};
use vmferry_transport::{Channel, Dialer, Listener};
use vmferry_wire::FetchLanes as Announced;

use super::Sample;
use super::handlers::CONTENT;
use crate::place::warm_up;
use crate::results::{median, most};
use crate::transport::certificates;

const SLOT: SlotId = SlotId(0);
/// The fetch lane, after one data lane.
const LANE: u8 = 1;
const PAGE: u64 = PAGE_SIZE as u64;
/// The longest wait for a connection.
const PATIENCE: Duration = Duration::from_secs(10);

/// One thread touches this number of missing pages in random order. Each is requested from a page
/// server and placed when it comes.
pub fn measure(pages: u64) -> anyhow::Result<Sample> {
    warm_up(2 * pages)?;
    let layout = [SlotLayout { slot: SLOT, gpa: 0, pages }];
    let source = GuestMemory::allocate(&layout, MemoryKind::Memfd)?;
    for page in 0..pages {
        source.write_at(page * PAGE, &[CONTENT; PAGE_SIZE])?;
    }
    let destination = GuestMemory::allocate(&layout, MemoryKind::Memfd)?;
    let mut all = PageSet::for_memory(&destination);
    all.bitmap_mut(SLOT).set_all();
    let hashes = Arc::new(PageHashes::for_memory(&destination));
    let register = |memory: &GuestMemory| Ok(FaultRanges::register(memory, 1)?);
    let missing = MissingPages::register(destination.clone(), hashes, all, register)?;
    let (results, _failed) = crossbeam_channel::unbounded();
    let cpu = CpuMeter::default();
    let mut lanes = FetchLanes::new(LANE, Announced { faults: 1, background: 1 });
    lanes.start(missing, results, cpu.clone())?;
    let (from, to) = connect()?;
    let (results, _lost) = crossbeam_channel::unbounded();
    let unsent = PageSet::for_memory(&source).into();
    let serving = FetchLaneContext {
        lane: LANE,
        attempt: 0,
        served: Arc::new(OnceLock::from(Served { round: 2, zero: None, unsent })),
        background: None,
        results,
        cpu: cpu.clone(),
        sent: Arc::default(),
    };
    let (sent, hot) = (PageHashes::for_memory(&source), HotPages::new(0));
    let encoder = PageEncoder::new(source, Arc::new(sent), Compressors::default(), Arc::new(hot));
    let server = PageServer::start(from, encoder, serving)?;
    ensure!(lanes.expect(LANE, 0), "the lane has a channel already");
    lanes.join(LANE, to)?;
    let touched = touch(&destination, pages)?;
    let missing = lanes.missing().map(Arc::clone);
    // The thread that has placed the last page counts it after the guest has gone on.
    drop((lanes, server));
    let left = missing.map_or(0, |missing| missing.left());
    ensure!(left == 0, "{left} pages are still missing");
    Ok(Sample { handlers_cpu_s: cpu.seconds(), ..touched })
}

/// Touches all pages in random order, and measures each access.
fn touch(memory: &GuestMemory, pages: u64) -> anyhow::Result<Sample> {
    let mut order: Vec<u64> = (0..pages).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut order);
    let mut us = Vec::with_capacity(order.len());
    let (begun, mut byte) = (Instant::now(), [0]);
    for page in order {
        let at = Instant::now();
        memory.read_at(page * PAGE, &mut byte)?;
        us.push(at.elapsed().as_secs_f64() * 1e6);
        ensure!(byte == [CONTENT], "page {page} has a wrong content");
    }
    let total_s = begun.elapsed().as_secs_f64();
    us.sort_by(f64::total_cmp);
    Ok(Sample {
        faults_per_s: pages as f64 / total_s,
        mean_us: us.iter().sum::<f64>() / pages as f64,
        p50_us: median(us.iter().copied()),
        p99_us: us[us.len() * 99 / 100],
        max_us: most(us.iter().copied()),
        handlers_cpu_s: 0.0,
    })
}

/// Both ends of a TLS channel on loopback.
fn connect() -> anyhow::Result<(DataChannel, DataChannel)> {
    let directory = tempfile::tempdir()?;
    certificates::make(directory.path())?;
    let identity = Arc::new(certificates::identity(directory.path())?);
    let listener = Listener::bind(&"tls:127.0.0.1:0".parse()?, Some(Arc::clone(&identity)))?;
    let dialer = Dialer::new(listener.local_address().clone(), Some(identity));
    let dialing = std::thread::spawn(move || dialer.connect());
    let accepted = listener.accept()?.context("nobody has connected")?.handshake(PATIENCE)?;
    let dialed = dialing.join().map_err(|_| anyhow!("a thread panicked"))??;
    Ok((data(dialed), data(accepted)))
}

fn data(channel: Channel) -> DataChannel {
    let closer = channel.closer();
    let (reader, writer) = channel.split();
    DataChannel { reader, writer, closer }
}
