//! A guest that consists of memory which eight threads rewrite repeatedly with other pages of its
//! class.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use fastrand::Rng;
use parking_lot::Mutex;
use vmferry::{StateEstimate, VmError};
use vmferry_dirty::{DirtyLog, DirtyLogError, UffdLog};
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun, PageSet, SlotId};

use super::content::{CHUNK_PAGES, Pool};
use super::system::{run_when_idle, this_thread};
use crate::guest::{Behavior, NO_STATE, never_paused};

/// The published guest had this many vCPUs.
const WRITERS: u64 = 8;

/// Fills memory with pages of a pool.
pub fn fill(memory: &GuestMemory, pool: &Pool) -> anyhow::Result<()> {
    let mut random = Rng::with_seed(3);
    for first in (0..memory.total_pages()).step_by(CHUNK_PAGES) {
        let pages = (memory.total_pages() - first).min(CHUNK_PAGES as u64);
        let chunk = &pool.chunk(&mut random)[..pages as usize * PAGE_SIZE];
        memory.copy_in(PageRun { slot: SlotId(0), first, pages }, chunk)?;
    }
    Ok(())
}

/// Progress of the threads, and the request to stop.
#[derive(Debug, Default)]
struct Writing {
    stop: AtomicBool,
    /// Pages that each thread has rewritten.
    pages: [AtomicU64; WRITERS as usize],
}

/// The threads that write the guest's memory. They stop when this is dropped.
///
/// They run only when the processors are otherwise idle. How the processors are shared between the
/// guest and the migration is not measured.
pub struct Writers {
    writing: Arc<Writing>,
    pages_each: u64,
    threads: Vec<JoinHandle<()>>,
    /// The thread IDs.
    pub numbers: Vec<i32>,
}

impl Writers {
    /// Starts the threads.
    ///
    /// # Errors
    /// The threads cannot be started, or cannot get idle priority.
    pub fn start(memory: &GuestMemory, pool: &Arc<Pool>) -> anyhow::Result<Self> {
        let writing = Arc::new(Writing::default());
        let pages_each = memory.total_pages() / WRITERS;
        let (tell, told) = mpsc::channel::<anyhow::Result<i32>>();
        let mut writers = Self {
            writing: Arc::clone(&writing),
            pages_each,
            threads: Vec::new(),
            numbers: Vec::new(),
        };
        for writer in 0..WRITERS {
            let (memory, pool, writing) = (memory.clone(), Arc::clone(pool), Arc::clone(&writing));
            let tell = tell.clone();
            let thread = std::thread::Builder::new().name(format!("guest{writer}"));
            writers.threads.push(thread.spawn(move || {
                let ready = run_when_idle().map(|()| this_thread());
                let is_ready = ready.is_ok();
                if tell.send(ready).is_ok() && is_ready {
                    write(writer, pages_each, &memory, &pool, &writing);
                }
            })?);
        }
        drop(tell);
        for _ in 0..WRITERS {
            writers.numbers.push(told.recv().context("a guest thread ended early")??);
        }
        Ok(writers)
    }

    /// Makes a dirty log for one migration of this memory.
    ///
    /// # Errors
    /// userfaultfd is not available.
    pub fn log(&self, memory: &GuestMemory) -> anyhow::Result<Arc<RewrittenLog>> {
        Ok(Arc::new(RewrittenLog {
            log: UffdLog::new(memory).context("the userfaultfd dirty log is not available")?,
            writing: Arc::clone(&self.writing),
            pages: memory.total_pages(),
            pages_each: self.pages_each,
            since: Mutex::new([0; WRITERS as usize]),
            waits: Mutex::new(WaitTimes {
                begun: Instant::now(),
                over: Duration::ZERO,
                since: None,
            }),
            released: AtomicBool::new(false),
        }))
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.writing.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic was already reported.
            let _ = thread.join();
        }
    }
}

fn write(writer: u64, pages: u64, memory: &GuestMemory, pool: &Pool, writing: &Writing) {
    let mut random = Rng::with_seed(100 + writer);
    let mut at = 0;
    while !writing.stop.load(Ordering::Relaxed) {
        let count = (pages - at).min(CHUNK_PAGES as u64);
        let run = PageRun { slot: SlotId(0), first: writer * pages + at, pages: count };
        let chunk = &pool.chunk(&mut random)[..count as usize * PAGE_SIZE];
        if memory.copy_in(run, chunk).is_err() {
            return;
        }
        writing.pages[writer as usize].fetch_add(count, Ordering::Relaxed);
        at = (at + count) % pages;
    }
}

/// userfaultfd's dirty log for a guest that is never slower than its migration. A harvest waits
/// until all memory was rewritten since the last harvest.
///
/// On eight processors of its own the guest would have rewritten it by then. With fewer processors
/// its threads run only when the migration leaves them time. The wait is not part of the measured
/// time: [`active`](Self::active) excludes it.
pub struct RewrittenLog {
    log: UffdLog,
    writing: Arc<Writing>,
    pages: u64,
    pages_each: u64,
    /// Pages that each thread had written at the last harvest.
    since: Mutex<[u64; WRITERS as usize]>,
    waits: Mutex<WaitTimes>,
    /// Harvests no longer wait.
    released: AtomicBool,
}

struct WaitTimes {
    begun: Instant,
    /// Total length of the waits that have ended.
    over: Duration,
    /// Start of the current wait.
    since: Option<Instant>,
}

impl RewrittenLog {
    /// Time since the log was made, excluding the waits of harvests.
    pub fn active(&self) -> Duration {
        let (waits, now) = (self.waits.lock(), Instant::now());
        let waiting = waits.since.map_or(Duration::ZERO, |since| now - since);
        (now - waits.begun).saturating_sub(waits.over + waiting)
    }

    /// Makes harvests stop waiting.
    pub fn release(&self) {
        self.released.store(true, Ordering::Relaxed);
    }

    fn written(&self) -> [u64; WRITERS as usize] {
        std::array::from_fn(|writer| self.writing.pages[writer].load(Ordering::Relaxed))
    }

    fn wait_until_rewritten(&self) {
        self.waits.lock().since = Some(Instant::now());
        let since = *self.since.lock();
        // Part of the chunk that was in progress then may have been written before the harvest.
        let all = self.pages_each + CHUNK_PAGES as u64;
        let rewritten = || self.written().iter().zip(since).all(|(now, then)| *now >= then + all);
        while !rewritten()
            && !self.released.load(Ordering::Relaxed)
            && !self.writing.stop.load(Ordering::Relaxed)
        {
            // The writers do not signal progress.
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut waits = self.waits.lock();
        if let Some(begun) = waits.since.take() {
            waits.over += begun.elapsed();
        }
    }
}

impl DirtyLog for RewrittenLog {
    fn name(&self) -> &'static str {
        self.log.name()
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        self.log.start()?;
        *self.since.lock() = self.written();
        Ok(())
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        self.wait_until_rewritten();
        self.log.collect(into)?;
        if self.released.load(Ordering::Relaxed) {
            // The few pages rewritten so far would make a handover look cheap.
            into.bitmap_mut(SlotId(0)).set_run(0, self.pages);
        }
        *self.since.lock() = self.written();
        Ok(())
    }

    fn rearm(&self, slot: SlotId, first_word: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        self.log.rearm(slot, first_word, words)
    }

    fn give_back(&self, pages: &PageSet) {
        self.log.give_back(pages);
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        self.log.stop()
    }
}

/// The behavior of a guest that is never handed over. Its threads are not paused either.
pub struct NeverHandedOver;

impl Behavior for NeverHandedOver {
    fn pause(&mut self) -> Result<(), VmError> {
        Err(never_paused())
    }

    fn state_estimate(&self) -> StateEstimate {
        NO_STATE
    }
}

#[cfg(test)]
mod tests {
    use super::super::content::Content;
    use super::*;
    use crate::guest::memory;

    #[test]
    fn harvest_waits_until_all_pages_are_rewritten() {
        let memory = memory(1024).unwrap();
        let pool = Arc::new(Pool::new(Content::Text, 1 << 20).unwrap());
        fill(&memory, &pool).unwrap();
        let writers = Writers::start(&memory, &pool).unwrap();
        assert_eq!(writers.numbers.len(), 8);
        let log = writers.log(&memory).expect("this test needs userfaultfd (Linux 6.7)");
        log.start().unwrap();
        for _ in 0..2 {
            let mut pages = PageSet::for_memory(&memory);
            log.collect(&mut pages).unwrap();
            assert_eq!(pages.bitmap(SlotId(0)).count(), 1024);
        }
        assert!(log.waits.lock().over > Duration::ZERO);
        assert!(log.active() > Duration::ZERO);
        log.release();
        log.collect(&mut PageSet::for_memory(&memory)).unwrap();
        log.stop().unwrap();
    }
}
