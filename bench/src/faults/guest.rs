//! The guest: a process of this program, whose threads touch missing pages.

use std::io::{BufRead, BufReader, Lines, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Barrier;
use std::time::Instant;

use anyhow::{Context, anyhow};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use vmferry_faults::{FaultDescriptor, FaultRange, FaultRanges};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout};

use super::handlers::CONTENT;

/// What a guest does.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Order {
    pub threads: usize,
    pub descriptors: usize,
    /// Length of its memory.
    pub pages: u64,
    /// Pages that its threads touch, all different.
    pub faults: u64,
}

/// A range that the guest has registered.
#[derive(Serialize, Deserialize)]
struct Registered {
    descriptor: i32,
    first_page: u64,
    start: u64,
    end: u64,
    share: usize,
}

/// What the guest's threads have seen.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Found {
    /// Seconds from the first access to the last.
    pub total_s: f64,
    pub mean_us: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
    /// Pages with a wrong content.
    pub wrong: usize,
}

/// A guest's process, which is killed on drop.
pub struct Guest {
    child: Child,
    orders: ChildStdin,
    replies: Lines<BufReader<ChildStdout>>,
}

impl Guest {
    /// Starts the process.
    ///
    /// # Errors
    /// The system call failed.
    pub fn start(order: Order) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("the path of this program is unknown")?;
        let mut child = Command::new(program)
            .args(["faults", "--guest"])
            .arg(serde_json::to_string(&order)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("could not start another process of this benchmark")?;
        let orders = child.stdin.take().context("the process has no standard input")?;
        let replies = child.stdout.take().context("the process has no standard output")?;
        Ok(Self { child, orders, replies: BufReader::new(replies).lines() })
    }

    /// Takes the descriptors of the guest's memory.
    ///
    /// # Errors
    /// The process has ended, or its descriptors can't be taken.
    pub fn ranges(&mut self) -> anyhow::Result<FaultRanges> {
        let registered: Vec<Registered> = self.reply()?;
        let pidfd = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())?;
        let take = |range: Registered| {
            let descriptor = pidfd_getfd(&pidfd, range.descriptor, PidfdGetfdFlags::empty())?;
            anyhow::Ok(FaultRange {
                slot: SlotId(0),
                first_page: range.first_page,
                addresses: range.start..range.end,
                share: range.share,
                descriptor: FaultDescriptor::adopt(descriptor, PAGE_SIZE as u64)?,
            })
        };
        Ok(FaultRanges::of(registered.into_iter().map(take).collect::<Result<_, _>>()?)?)
    }

    /// Has the guest's threads touch their pages.
    ///
    /// # Errors
    /// The process has ended.
    pub fn fault(&mut self) -> anyhow::Result<Found> {
        self.orders.write_all(b"\n")?;
        self.reply()
    }

    fn reply<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let line = self.replies.next().context("the guest has ended")??;
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process itself. It replies on standard output, and ends when standard input does.
///
/// # Errors
/// The memory could not be mapped or registered.
pub fn run(order: &str) -> anyhow::Result<()> {
    // This process must not outlive the benchmark.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let order: Order = serde_json::from_str(order)?;
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: order.pages }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Memfd)?;
    let ranges = FaultRanges::register(&memory, order.descriptors)?;
    let registered: Vec<Registered> = ranges
        .ranges()
        .iter()
        .map(|range| Registered {
            descriptor: range.descriptor.as_fd().as_raw_fd(),
            first_page: range.first_page,
            start: range.addresses.start,
            end: range.addresses.end,
            share: range.share,
        })
        .collect();
    println!("{}", serde_json::to_string(&registered)?);
    let mut orders = std::io::stdin().lines();
    orders.next().context("the benchmark has ended")??;
    println!("{}", serde_json::to_string(&touch(&memory, order)?)?);
    orders.next().transpose()?;
    Ok(())
}

/// Touches the pages, each thread its own.
fn touch(memory: &GuestMemory, order: Order) -> anyhow::Result<Found> {
    let mut pages: Vec<u64> = (0..order.pages).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut pages);
    pages.truncate(order.faults as usize);
    let barrier = Barrier::new(order.threads);
    let seen = std::thread::scope(|scope| {
        let threads: Vec<_> = pages
            .chunks(pages.len().div_ceil(order.threads))
            .map(|pages| {
                let barrier = &barrier;
                scope.spawn(move || touch_each(memory, pages, barrier))
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Seen>| {
            thread.join().map_err(|_| anyhow!("a thread panicked"))
        };
        threads.into_iter().map(join).collect::<Result<Vec<Seen>, _>>()
    })?;
    let begun = seen.iter().map(|seen| seen.begun).min().context("there is no thread")?;
    let ended = seen.iter().map(|seen| seen.ended).max().context("there is no thread")?;
    let mut us: Vec<f64> = seen.iter().flat_map(|seen| seen.us.iter().copied()).collect();
    us.sort_by(f64::total_cmp);
    let percentile = |percent: usize| us[(us.len() - 1) * percent / 100];
    Ok(Found {
        total_s: (ended - begun).as_secs_f64(),
        mean_us: us.iter().sum::<f64>() / us.len() as f64,
        p50_us: percentile(50),
        p99_us: percentile(99),
        max_us: percentile(100),
        wrong: seen.iter().map(|seen| seen.wrong).sum(),
    })
}

/// What one thread has seen.
struct Seen {
    begun: Instant,
    ended: Instant,
    /// Time of each access in microseconds.
    us: Vec<f64>,
    wrong: usize,
}

fn touch_each(memory: &GuestMemory, pages: &[u64], barrier: &Barrier) -> Seen {
    let (mut us, mut wrong) = (Vec::with_capacity(pages.len()), 0);
    let mut byte = [0];
    barrier.wait();
    let begun = Instant::now();
    for page in pages {
        let before = Instant::now();
        let read = memory.read_at(page * PAGE_SIZE as u64, &mut byte);
        us.push(before.elapsed().as_secs_f64() * 1e6);
        wrong += usize::from(read.is_err() || byte != [CONTENT]);
    }
    Seen { begun, ended: Instant::now(), us, wrong }
}
