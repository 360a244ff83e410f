//! A guest without a machine: memory that eight threads rewrite again and again, each page with another one
//! of its class.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use vmferry::{GuestDescription, Resume, SourceVm, StateEstimate, VmError};
use vmferry_dirty::{DirtyLog, DirtyLogError, UffdLog};
use vmferry_memory::{GuestBytes, GuestMemory, PAGE_SIZE, PageRun, PageSet, SlotId};

use super::content::{CHUNK_PAGES, Pool, Random};
use super::system::{run_when_idle, this_thread};
use crate::guest::describe;

/// As many as the published guest had vCPUs.
const WRITERS: u64 = 8;

/// Fills memory with pages of a pool.
pub fn fill(memory: &GuestMemory, pool: &Pool) -> anyhow::Result<()> {
    let mut random = Random::new(3);
    for first in (0..memory.total_pages()).step_by(CHUNK_PAGES) {
        let pages = (memory.total_pages() - first).min(CHUNK_PAGES as u64);
        let chunk = &pool.chunk(random.next())[..pages as usize * PAGE_SIZE];
        memory.copy_in(PageRun { slot: SlotId(0), first, pages }, chunk)?;
    }
    Ok(())
}

/// What the threads have done, and what they are to do.
#[derive(Debug, Default)]
struct Writing {
    stop: AtomicBool,
    /// Pages that each has rewritten.
    pages: [AtomicU64; WRITERS as usize],
}

/// The threads, until they are dropped. They run only when the processors have nothing else to do: how
/// processors are shared between the guest and the migration is not what is measured.
pub struct Writers {
    writing: Arc<Writing>,
    pages_each: u64,
    threads: Vec<JoinHandle<()>>,
    /// Their numbers.
    pub numbers: Vec<i32>,
}

impl Writers {
    /// Starts them.
    ///
    /// # Errors
    /// No threads, or none of low priority.
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
            writers.numbers.push(told.recv().context("a guest's thread has gone")??);
        }
        Ok(writers)
    }

    /// A dirty log for one migration of their memory.
    ///
    /// # Errors
    /// No userfaultfd.
    pub fn log(&self, memory: &GuestMemory) -> anyhow::Result<Arc<RewrittenLog>> {
        Ok(Arc::new(RewrittenLog {
            log: UffdLog::new(memory).context("no dirty log: userfaultfd")?,
            writing: Arc::clone(&self.writing),
            pages: memory.total_pages(),
            pages_each: self.pages_each,
            since: Mutex::new([0; WRITERS as usize]),
            waits: Mutex::new(Waits { begun: Instant::now(), over: Duration::ZERO, since: None }),
            released: AtomicBool::new(false),
        }))
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.writing.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // One that has panicked has said so.
            let _ = thread.join();
        }
    }
}

fn write(writer: u64, pages: u64, memory: &GuestMemory, pool: &Pool, writing: &Writing) {
    let mut random = Random::new(100 + writer);
    let mut at = 0;
    while !writing.stop.load(Ordering::Relaxed) {
        let count = (pages - at).min(CHUNK_PAGES as u64);
        let run = PageRun { slot: SlotId(0), first: writer * pages + at, pages: count };
        let chunk = &pool.chunk(random.next())[..count as usize * PAGE_SIZE];
        if memory.copy_in(run, chunk).is_err() {
            return;
        }
        writing.pages[writer as usize].fetch_add(count, Ordering::Relaxed);
        at = (at + count) % pages;
    }
}

/// userfaultfd's log of a guest that is never slower than its migration: a harvest waits until all memory
/// was rewritten since the last one. On eight processors of their own the guest's threads would have done
/// that by then; on the two that there are here they run only when the migration leaves them time. The wait is no
/// time of the measurement: [`active`](Self::active) does without it.
pub struct RewrittenLog {
    log: UffdLog,
    writing: Arc<Writing>,
    pages: u64,
    pages_each: u64,
    /// What each thread had written at the last harvest.
    since: Mutex<[u64; WRITERS as usize]>,
    waits: Mutex<Waits>,
    /// Nobody waits any more.
    released: AtomicBool,
}

struct Waits {
    begun: Instant,
    /// Waits that are over.
    over: Duration,
    /// Since when there is one.
    since: Option<Instant>,
}

impl RewrittenLog {
    /// Time that has passed since it was made, without that in which a harvest waited.
    pub fn active(&self) -> Duration {
        let (waits, now) = (lock(&self.waits), Instant::now());
        let waiting = waits.since.map_or(Duration::ZERO, |since| now - since);
        (now - waits.begun).saturating_sub(waits.over + waiting)
    }

    /// Has nobody wait from now on.
    pub fn release(&self) {
        self.released.store(true, Ordering::Relaxed);
    }

    fn written(&self) -> [u64; WRITERS as usize] {
        std::array::from_fn(|writer| self.writing.pages[writer].load(Ordering::Relaxed))
    }

    fn wait_until_rewritten(&self) {
        lock(&self.waits).since = Some(Instant::now());
        let since = *lock(&self.since);
        // Of the chunk that was being written then a part may have been written before.
        let all = self.pages_each + CHUNK_PAGES as u64;
        let rewritten = || self.written().iter().zip(since).all(|(now, then)| *now >= then + all);
        while !rewritten()
            && !self.released.load(Ordering::Relaxed)
            && !self.writing.stop.load(Ordering::Relaxed)
        {
            // Whoever writes the guest's memory wakes nobody.
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut waits = lock(&self.waits);
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
        *lock(&self.since) = self.written();
        Ok(())
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        self.wait_until_rewritten();
        self.log.collect(into)?;
        if self.released.load(Ordering::Relaxed) {
            // The few pages that were rewritten by now would make a handover look cheap.
            into.bitmap_mut(SlotId(0)).set_run(0, self.pages);
        }
        *lock(&self.since) = self.written();
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

/// As the engine sees a guest whose memory is all that there is of it.
pub struct Bare {
    /// Its memory.
    pub memory: GuestMemory,
    /// Who logs what is written there.
    pub log: Arc<dyn DirtyLog>,
}

impl Resume for Bare {
    fn resume(&mut self) -> Result<(), VmError> {
        Ok(())
    }
}

impl SourceVm for Bare {
    fn describe(&self) -> GuestDescription {
        describe(&self.memory)
    }

    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }

    fn dirty_log(&self) -> Arc<dyn DirtyLog> {
        Arc::clone(&self.log)
    }

    fn pause(&mut self) -> Result<Duration, VmError> {
        Err("this guest is never handed over".into())
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        Ok(GuestBytes::new())
    }

    fn state_estimate(&self) -> StateEstimate {
        NO_STATE
    }
}

/// What the guests have that are never handed over. Their limits are below what their pages take,
/// but a limit below what a handover takes without pages would be refused at once: round trips, on
/// a busy machine, are enough.
pub const NO_STATE: StateEstimate = StateEstimate { bytes: 0, handling: Duration::ZERO };

/// Locks what no panic leaves half done.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::content::Content;
    use super::*;
    use crate::guest::memory;

    #[test]
    fn a_harvest_finds_all_pages_and_the_wait_for_them_is_not_counted() {
        let memory = memory(1024).unwrap();
        let pool = Arc::new(Pool::new(Content::Text, 1 << 20).unwrap());
        fill(&memory, &pool).unwrap();
        let writers = Writers::start(&memory, &pool).unwrap();
        assert_eq!(writers.numbers.len(), 8);
        let log = writers.log(&memory).expect("this test needs userfaultfd of Linux 6.7");
        log.start().unwrap();
        for _ in 0..2 {
            let mut pages = PageSet::for_memory(&memory);
            log.collect(&mut pages).unwrap();
            assert_eq!(pages.bitmap(SlotId(0)).count(), 1024);
        }
        assert!(lock(&log.waits).over > Duration::ZERO);
        assert!(log.active() > Duration::ZERO);
        log.release();
        log.collect(&mut PageSet::for_memory(&memory)).unwrap();
        log.stop().unwrap();
    }
}
