//! All vCPUs of a machine: let run and held together, and throttled.
//!
//! To throttle is to hold and let run again, over and over, by the same two orders that pause and resume
//! the machine (see [`super::vcpu`]). A thread gives them, which is there only while there is a throttle:
//!
//! ```text
//!             slice over: kick
//!   let run -------------------> resting: the vCPUs are parked, and wait for orders
//!      ^                             |
//!      +------- rest over: Run ------+
//! ```
//!
//! A resting vCPU is thus a parked one: it is called, paused and ended as promptly as any. Orders are
//! given under one lock, and each but the thread's own begins a new *turn*; the thread gives an order only
//! in the turn that it has waited in. So a machine that was paused is not let run by a rest that ends.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::KvmError;
use super::vcpu::Vcpu;
use crate::pace::Pace;

/// The vCPUs of a machine. Dropping them ends their threads, and the one that throttles them.
pub(super) struct Vcpus {
    crew: Arc<Crew>,
    throttle: Option<JoinHandle<()>>,
}

struct Crew {
    vcpus: Vec<Vcpu>,
    orders: Mutex<Orders>,
    changed: Condvar,
}

/// What the vCPUs are to do.
#[derive(Default)]
struct Orders {
    /// They run, but for the rests of a throttle.
    running: bool,
    pace: Option<Pace>,
    /// Counts the changes of the two.
    turn: u64,
}

impl Vcpus {
    /// Those of a machine that does not run.
    pub(super) fn new(vcpus: Vec<Vcpu>) -> Self {
        let crew = Crew { vcpus, orders: Mutex::default(), changed: Condvar::new() };
        Self { crew: Arc::new(crew), throttle: None }
    }

    /// Each of them.
    pub(super) fn each(&self) -> &[Vcpu] {
        &self.crew.vcpus
    }

    /// Lets all run.
    pub(super) fn run(&self) -> Result<(), KvmError> {
        let mut orders = self.crew.begin_turn();
        orders.running = true;
        self.crew.let_run()
    }

    /// Makes all leave the guest soon. Calls that are answered afterwards prove that they have.
    pub(super) fn hold(&self) {
        let mut orders = self.crew.begin_turn();
        orders.running = false;
        self.crew.kick();
    }

    /// Takes time from all, or with `None` no longer, whether they run or not.
    pub(super) fn throttle(&mut self, pace: Option<Pace>) -> Result<(), KvmError> {
        let set = self.crew.set_pace(pace);
        match (pace, self.throttle.take()) {
            (Some(_), None) => {
                let crew = Arc::clone(&self.crew);
                let builder = std::thread::Builder::new().name("throttle".into());
                match builder.spawn(move || crew.keep_pace()) {
                    Ok(thread) => self.throttle = Some(thread),
                    Err(source) => {
                        self.crew.orders().pace = None;
                        return Err(KvmError::Throttle { source });
                    }
                }
            }
            (None, Some(thread)) => {
                // A panic of the thread has already been printed.
                let _ = thread.join();
            }
            (_, thread) => self.throttle = thread,
        }
        set
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        // It fails for vCPUs that have ended, as all are about to.
        let _ = self.throttle(None);
    }
}

impl Crew {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends what the throttle's thread waits for.
    fn begin_turn(&self) -> MutexGuard<'_, Orders> {
        let mut orders = self.orders();
        orders.turn = orders.turn.wrapping_add(1);
        self.changed.notify_all();
        orders
    }

    fn set_pace(&self, pace: Option<Pace>) -> Result<(), KvmError> {
        if self.orders().pace == pace {
            return Ok(());
        }
        let mut orders = self.begin_turn();
        orders.pace = pace;
        // A turn that begins in a rest ends it.
        if orders.running { self.let_run() } else { Ok(()) }
    }

    fn let_run(&self) -> Result<(), KvmError> {
        self.vcpus.iter().try_for_each(Vcpu::run)
    }

    fn kick(&self) {
        self.vcpus.iter().for_each(Vcpu::kick);
    }

    /// The throttle's thread, until there is no pace any more.
    fn keep_pace(&self) {
        let mut orders = self.orders();
        while let Some(pace) = orders.pace {
            let turn = orders.turn;
            if !orders.running {
                orders = self
                    .changed
                    .wait_while(orders, |orders| orders.turn == turn)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let let_run = Instant::now();
            orders = self.wait(orders, pace.slice());
            if orders.turn != turn {
                continue;
            }
            self.kick();
            orders = self.wait(orders, pace.rest_after(let_run.elapsed()));
            if orders.turn == turn {
                // The thread of a vCPU that has ended is told of by the next request to it.
                let _ = self.let_run();
            }
        }
    }

    /// Until the time is over or a new turn has begun.
    fn wait<'a>(&self, orders: MutexGuard<'a, Orders>, time: Duration) -> MutexGuard<'a, Orders> {
        let turn = orders.turn;
        self.changed
            .wait_timeout_while(orders, time, |orders| orders.turn == turn)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }
}
