//! Runs, stops and throttles all vCPUs of a machine together.
//!
//! A throttle stops and runs the vCPUs in turn, by the same two orders that pause and resume the
//! machine (see [`super::vcpu`]). A thread gives these orders while a throttle is in force:
//!
//! ```text
//!             slice over: kick
//!   running -------------------> resting: the vCPUs are parked, and wait for orders
//!      ^                             |
//!      +------- rest over: Run ------+
//! ```
//!
//! A resting vCPU is parked, so it can be called, paused and ended as promptly as any other. All
//! orders are given under one lock. Each order from outside begins a new *turn*, and the throttle's
//! thread gives an order only in the turn in which it began to wait. So the end of a rest never
//! runs a machine that was paused meanwhile.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::KvmError;
use super::vcpu::Vcpu;
use crate::pace::Pace;

/// The vCPUs of a machine. Dropping them ends their threads, and the one that throttles them.
pub(super) struct Vcpus {
    shared: Arc<Shared>,
    throttle: Option<JoinHandle<()>>,
}

struct Shared {
    vcpus: Vec<Vcpu>,
    orders: Mutex<Orders>,
    changed: Condvar,
}

/// The current orders to the vCPUs.
#[derive(Default)]
struct Orders {
    /// Whether the vCPUs run, apart from the rests of a throttle.
    running: bool,
    pace: Option<Pace>,
    /// Counts the changes of `running` and `pace`.
    turn: u64,
}

impl Vcpus {
    /// The vCPUs of a machine that is not running.
    pub(super) fn new(vcpus: Vec<Vcpu>) -> Self {
        let shared = Shared { vcpus, orders: Mutex::default(), changed: Condvar::new() };
        Self { shared: Arc::new(shared), throttle: None }
    }

    /// All vCPUs, by index.
    pub(super) fn each(&self) -> &[Vcpu] {
        &self.shared.vcpus
    }

    /// Runs all vCPUs.
    pub(super) fn run(&self) -> Result<(), KvmError> {
        let mut orders = self.shared.begin_turn();
        orders.running = true;
        self.shared.let_run()
    }

    /// Makes all vCPUs leave the guest soon. A vCPU that answers a later call has left it.
    pub(super) fn stop(&self) {
        let mut orders = self.shared.begin_turn();
        orders.running = false;
        self.shared.kick();
    }

    /// Throttles all vCPUs, whether they run or not. `None` lifts the throttle.
    pub(super) fn throttle(&mut self, pace: Option<Pace>) -> Result<(), KvmError> {
        let set = self.shared.set_pace(pace);
        match (pace, self.throttle.take()) {
            (Some(_), None) => {
                let shared = Arc::clone(&self.shared);
                let builder = std::thread::Builder::new().name("throttle".into());
                match builder.spawn(move || shared.keep_pace()) {
                    Ok(thread) => self.throttle = Some(thread),
                    Err(source) => {
                        self.shared.orders.lock().pace = None;
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
        // Fails for vCPUs that have ended, which no longer matters.
        let _ = self.throttle(None);
    }
}

impl Shared {
    /// Begins a new turn, which ends the current wait of the throttle's thread.
    fn begin_turn(&self) -> MutexGuard<'_, Orders> {
        let mut orders = self.orders.lock();
        orders.turn = orders.turn.wrapping_add(1);
        self.changed.notify_all();
        orders
    }

    fn set_pace(&self, pace: Option<Pace>) -> Result<(), KvmError> {
        if self.orders.lock().pace == pace {
            return Ok(());
        }
        let mut orders = self.begin_turn();
        orders.pace = pace;
        // The new turn may have begun during a rest, and nothing else would end it.
        if orders.running { self.let_run() } else { Ok(()) }
    }

    fn let_run(&self) -> Result<(), KvmError> {
        self.vcpus.iter().try_for_each(Vcpu::run)
    }

    fn kick(&self) {
        self.vcpus.iter().for_each(Vcpu::kick);
    }

    /// The loop of the throttle's thread. It ends when the throttle is lifted.
    fn keep_pace(&self) {
        let mut orders = self.orders.lock();
        while let Some(pace) = orders.pace {
            let turn = orders.turn;
            if !orders.running {
                self.changed.wait_while(&mut orders, |orders| orders.turn == turn);
                continue;
            }
            let let_run = Instant::now();
            self.wait(&mut orders, pace.slice());
            if orders.turn != turn {
                continue;
            }
            self.kick();
            self.wait(&mut orders, pace.rest_after(let_run.elapsed()));
            if orders.turn == turn {
                // Fails if the thread of a vCPU has ended. The next request to it reports that.
                let _ = self.let_run();
            }
        }
    }

    /// Waits until `time` has passed or a new turn has begun.
    fn wait(&self, orders: &mut MutexGuard<'_, Orders>, time: Duration) {
        let turn = orders.turn;
        self.changed.wait_while_for(orders, |orders| orders.turn == turn, time);
    }
}
