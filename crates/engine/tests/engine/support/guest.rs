//! A guest without a VMM: threads that write memory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use vmferry_memory::{GuestMemory, PAGE_SIZE, SlotId, SlotLayout};

pub const PAGES: u64 = 4096;

/// Pages that a thread writes without a rest: enough to race with copies of many pages.
const BURST_PAGES: usize = 64;
const REST: Duration = Duration::from_micros(100);

/// Threads that rewrite memory. Page `n` has a count that only increases and is written by one
/// thread.
#[derive(Clone)]
pub struct Guest {
    pub memory: GuestMemory,
    run: Arc<Mutex<Option<Run>>>,
    /// Passes of each thread over all of its pages.
    rounds: Arc<[AtomicU64; 2]>,
    pub hot_pages: u64,
}

struct Run {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Guest {
    pub fn new(memory: GuestMemory, hot_pages: u64) -> Self {
        Self { memory, run: Arc::default(), rounds: Arc::default(), hot_pages }
    }

    pub fn layout() -> Vec<SlotLayout> {
        vec![
            SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES / 2 },
            SlotLayout { slot: SlotId(1), gpa: 1 << 32, pages: PAGES / 2 },
        ]
    }

    pub fn is_running(&self) -> bool {
        self.run.lock().unwrap().is_some()
    }

    pub fn start(&self) {
        let mut run = self.run.lock().unwrap();
        if run.is_some() {
            return;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..self.rounds.len())
            .map(|thread| {
                let (guest, stop) = (self.clone(), Arc::clone(&stop));
                std::thread::spawn(move || guest.work(thread, &stop))
            })
            .collect();
        *run = Some(Run { stop, threads });
    }

    pub fn pause(&self) {
        if let Some(run) = self.run.lock().unwrap().take() {
            run.stop.store(true, Ordering::Release);
            run.threads.into_iter().for_each(|thread| thread.join().unwrap());
        }
    }

    fn work(&self, thread: usize, stop: &AtomicBool) {
        loop {
            let pages = (thread as u64..self.hot_pages).step_by(self.rounds.len());
            for (written, page) in pages.enumerate() {
                // A guest that never rests takes the processors from the other tests.
                if written % BURST_PAGES == 0 {
                    std::thread::sleep(REST);
                }
                if stop.load(Ordering::Acquire) {
                    return;
                }
                let at = address(page);
                let mut count = [0; 8];
                self.memory.read_at(at, &mut count).unwrap();
                let next = u64::from_le_bytes(count) + 1;
                self.memory.write_at(at, &next.to_le_bytes()).unwrap();
                self.memory.write_at(at + 4088, &next.to_le_bytes()).unwrap();
            }
            self.rounds[thread].fetch_add(1, Ordering::Release);
        }
    }

    /// Waits until the guest has written all of its pages again.
    pub fn wait_for_work(&self) {
        let done = |thread: &AtomicU64| thread.load(Ordering::Acquire);
        // The present pass began before this call.
        let until: Vec<u64> = self.rounds.iter().map(|thread| done(thread) + 2).collect();
        while self.rounds.iter().zip(&until).any(|(thread, until)| done(thread) < *until) {
            assert!(self.is_running(), "the guest does not run");
            std::thread::yield_now();
        }
    }
}

/// The guest-physical address of a page. Half of the pages are in each slot.
pub fn address(page: u64) -> u64 {
    let half = PAGES / 2;
    if page < half { page * PAGE_SIZE as u64 } else { (1 << 32) + (page - half) * PAGE_SIZE as u64 }
}
