//! The control service of a VMM process: it answers on the control socket, and migrates the guest
//! on request.
//!
//! The migration engine runs in the VMM process. The client that requested the migration has only a
//! lease on it: if the client goes away before COMMIT, the migration is canceled and the guest
//! keeps running here.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;
use serde_json::{Value, json};
use vmferry::SourceConfig;
use vmferry::destination::FetchHandle;
use vmferry::estimate::{self, Estimate};
use vmferry::source::{Orders, Progress, SourceOutcome, migrate};
use vmferry_control::{
    Answer, ChangeRequest, ControlError, ErrorCode, EstimateRequest, Handler, MigrateRequest,
    Replies, Request, Started,
};
use vmferry_handover::OperatorWord;
use vmferry_transport::Dialer;

use crate::embed::MigratingMachine;
use crate::error::MachineError;
use crate::machine::SharedMachine;
use crate::report::Report;

pub use self::status::{Status, peak_rss_bytes};

use self::busy::{Busy, still_missing};
use self::request::{bad_request, dialer, machine_error, recorder};

mod busy;
mod request;
mod status;

/// How often progress is sent to the client.
const PROGRESS_PERIOD: Duration = Duration::from_millis(200);

/// Maximum length of an estimate. A longer one would not be more accurate.
const MAX_ESTIMATE: Duration = Duration::from_secs(600);

/// How long to wait for a balloon whose guest lacks pages.
const FETCHING_PATIENCE: Duration = Duration::from_millis(50);

/// How long to wait for the guest's statistics. A running driver answers in milliseconds.
const STATISTICS_TIMEOUT: Duration = Duration::from_millis(500);

/// Why the service has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// A client asked for it.
    Quit,
    /// The guest has moved to another host.
    Migrated,
}

/// The control service of one guest.
pub struct GuestService {
    machine: SharedMachine,
    journal_directory: PathBuf,
    busy: Mutex<Busy>,
    ended: Sender<End>,
}

impl GuestService {
    /// A service for a machine. `ended` receives a message when the process is to end.
    #[must_use]
    pub fn new(machine: SharedMachine, journal_directory: PathBuf, ended: Sender<End>) -> Self {
        Self { machine, journal_directory, busy: Mutex::default(), ended }
    }

    /// The same for a guest that runs here and lacks pages. Until it has all, its pages are not
    /// touched, and it can't be paused, ended or moved.
    #[must_use]
    pub fn fetching(self, fetch: FetchHandle) -> Self {
        *self.busy.lock() = Busy::Fetching(fetch);
        self
    }

    /// Cancels the migration under way, if it can still be canceled.
    pub fn cancel(&self) {
        if let Some(orders) = self.orders() {
            orders.cancel();
        }
    }

    /// The progress of the migration under way.
    #[must_use]
    pub fn progress(&self) -> Option<Progress> {
        self.orders().as_ref().map(Orders::progress)
    }

    /// The status of the guest.
    ///
    /// # Errors
    /// If guest memory cannot be read.
    pub fn status(&self) -> Result<Status, MachineError> {
        let migration = self.progress();
        let watched = matches!(*self.busy.lock(), Busy::Estimating);
        let fetching = match &*self.busy.lock() {
            Busy::Fetching(fetch) => Some(fetch.clone()),
            _ => None,
        };
        let fetch = fetching.as_ref().and_then(FetchHandle::progress);
        let is_fetching = fetch.is_some();
        let machine = self.machine.lock();
        let config = machine.config();
        // A thread that reads a missing page waits for it, and the link may be down.
        let has_report =
            fetching.as_ref().is_none_or(|it| it.has(machine.memory(), Report::ADDRESSES));
        Ok(Status {
            name: config.identity.name.clone(),
            uuid: config.identity.uuid,
            release: env!("CARGO_PKG_VERSION"),
            phase: machine.phase(),
            guest: machine.kind(),
            choice: machine.choice().to_owned(),
            memory_bytes: config.guest.memory_bytes,
            memory_kind: config.memory_kind.to_string(),
            vcpus: config.guest.vcpus,
            workload: config.guest.command_line.clone(),
            pid: std::process::id(),
            peak_rss_bytes: peak_rss_bytes(),
            crash: machine.crash(),
            report: has_report.then(|| machine.report()).transpose()?,
            migration,
            fetch,
            watched,
            balloon: machine.balloon().and_then(|balloon| match is_fetching {
                true => balloon.status_within(FETCHING_PATIENCE),
                false => Some(balloon.status()),
            }),
        })
    }

    /// The migration under way.
    fn orders(&self) -> Option<Orders> {
        match &*self.busy.lock() {
            Busy::Migrating(orders) => Some(orders.clone()),
            Busy::Idle | Busy::Fetching(_) | Busy::Estimating => None,
        }
    }

    fn migrate(&self, request: &MigrateRequest, replies: &Replies) -> Result<Answer, ControlError> {
        let mut dialer = dialer(request, replies)?;
        let (messages, received) = std::sync::mpsc::channel();
        dialer.recorder = recorder(request, messages)?;
        let mut config = request
            .source_config(self.journal_directory.clone())
            .map_err(|error| bad_request(&error))?;
        let witness = request.open_witness();
        config.witness = witness
            .map_err(|error| ControlError::new(ErrorCode::Connect, vmferry::chain(&error)))?;
        let orders = self.begin()?;
        let started = {
            let machine = self.machine.lock();
            let (name, memory) =
                (&machine.config().identity.name, machine.config().guest.memory_bytes);
            Started::new(name, memory, &request.to, &config)
        };
        let _ = replies.event(&started);
        let result = self.migrate_with(&dialer, config, &orders, replies);
        // The client may read the files once it has its answer.
        if let Some(recorder) = &dialer.recorder {
            recorder.flush();
        }
        for message in received.try_iter() {
            let _ = replies.event(&json!({ "event": "recording", "message": message }));
        }
        if !matches!(result, Ok(SourceOutcome::Given { .. } | SourceOutcome::Lost { .. })) {
            // After a successful migration this stays set, so that no second migration begins.
            *self.busy.lock() = Busy::Idle;
        }
        match result? {
            SourceOutcome::Given { stats, .. } => Ok(self.end_after(json!(stats), End::Migrated)),
            SourceOutcome::Lost { error, .. } => {
                // Fails if the process is ending already.
                let _ = self.ended.send(End::Migrated);
                Err(ControlError::from(&error))
            }
            SourceOutcome::Kept { error, .. } => Err(ControlError::from(&error)),
        }
    }

    /// Begins a migration, if no other user has the dirty log.
    fn begin(&self) -> Result<Orders, ControlError> {
        let mut busy = self.idle_and_running()?;
        let orders = Orders::new();
        *busy = Busy::Migrating(orders.clone());
        Ok(orders)
    }

    /// Locks the dirty log's user, and checks that there is none and that the guest runs.
    fn idle_and_running(&self) -> Result<MutexGuard<'_, Busy>, ControlError> {
        let busy = self.busy.lock();
        busy.refuse()?;
        let machine = self.machine.lock();
        if !machine.is_running() {
            let text = format!("the guest is {}: `vmferry resume` it first", machine.phase());
            return Err(ControlError::new(ErrorCode::WrongState, text));
        }
        drop(machine);
        Ok(busy)
    }

    /// Measures the guest's write rate for some time. It ends early if the client goes away.
    fn estimate(
        &self,
        request: EstimateRequest,
        replies: &Replies,
    ) -> Result<Answer, ControlError> {
        if request.time > MAX_ESTIMATE {
            let text = format!("a guest is watched for at most {} s", MAX_ESTIMATE.as_secs());
            return Err(ControlError::new(ErrorCode::BadRequest, text));
        }
        *self.idle_and_running()? = Busy::Estimating;
        let estimate = self.watch(request, replies);
        *self.busy.lock() = Busy::Idle;
        Ok(json!(estimate?).into())
    }

    fn watch(&self, request: EstimateRequest, replies: &Replies) -> Result<Estimate, ControlError> {
        let ended = Arc::new(AtomicBool::new(false));
        let gone = Arc::clone(&ended);
        let _lease = replies
            .when_gone(move || gone.store(true, Ordering::Release))
            .map_err(|error| ControlError::new(ErrorCode::Internal, error.to_string()))?;
        let (memory, log) = {
            let machine = self.machine.lock();
            (machine.memory().clone(), machine.dirty_log().map_err(machine_error)?)
        };
        estimate::watch(&memory, &*log, request.time, &ended).map_err(|error| (&error).into())
    }

    fn migrate_with(
        &self,
        dialer: &Dialer,
        config: SourceConfig,
        orders: &Orders,
        replies: &Replies,
    ) -> Result<SourceOutcome<MigratingMachine>, ControlError> {
        let vm = MigratingMachine::new(Arc::clone(&self.machine)).map_err(machine_error)?;
        let lease = orders.clone();
        let _lease = replies
            .when_gone(move || lease.cancel())
            .map_err(|error| ControlError::new(ErrorCode::Internal, error.to_string()))?;
        let (over, is_over) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while is_over.recv_timeout(PROGRESS_PERIOD) == Err(RecvTimeoutError::Timeout) {
                    let progress = Event { event: "progress", progress: orders.progress() };
                    // Fails if the client has gone. The lease handles that.
                    let _ = replies.event(&progress);
                }
            });
            let outcome = migrate(vm, dialer, config, orders, &mut |report| {
                let _ = replies.event(report);
            });
            drop(over);
            Ok(outcome)
        })
    }

    fn cancel_request(&self) -> Result<Answer, ControlError> {
        self.under_way()?.cancel();
        Ok(json!({ "cancelling": true }).into())
    }

    fn change(&self, request: ChangeRequest) -> Result<Answer, ControlError> {
        let orders = self.under_way()?;
        orders.change(request.try_into().map_err(|error| bad_request(&error))?);
        Ok(json!(request).into())
    }

    fn switch_over(&self) -> Result<Answer, ControlError> {
        self.under_way()?.switch_over();
        Ok(json!({ "switching_over": true }).into())
    }

    fn balloon(&self, target_bytes: Option<u64>) -> Result<Answer, ControlError> {
        // The machine's lock is not kept while this waits for the guest.
        let balloon = self.machine.lock().balloon().ok_or_else(|| {
            let text = "this guest has no balloon: it can be given one when it is started";
            ControlError::new(ErrorCode::WrongState, text)
        })?;
        // The device may be waiting for a page that is missing.
        if let busy @ Busy::Fetching(_) = &*self.busy.lock()
            && balloon.status_within(FETCHING_PATIENCE).is_none()
        {
            busy.refuse()?;
        }
        if let Some(bytes) = target_bytes {
            balloon.set_target(bytes).map_err(machine_error)?;
        }
        let fresh = balloon.refresh_statistics(STATISTICS_TIMEOUT);
        let mut status = json!(balloon.status());
        status["statistics_fresh"] = fresh.into();
        Ok(status.into())
    }

    fn under_way(&self) -> Result<Orders, ControlError> {
        let text = "no migration of this guest is under way";
        self.orders().ok_or_else(|| ControlError::new(ErrorCode::WrongState, text))
    }

    fn resolve(&self, word: OperatorWord) -> Result<Answer, ControlError> {
        let decided = self.orders().is_some_and(|orders| orders.decide(word));
        if decided {
            Ok(json!({ "decided": word }).into())
        } else {
            let text = "this guest is not in doubt, so there is nothing to decide";
            Err(ControlError::new(ErrorCode::WrongState, text))
        }
    }

    fn give_up(&self) -> Result<Answer, ControlError> {
        if self.orders().is_some_and(|orders| orders.give_up()) {
            return Ok(json!({ "given_up": true }).into());
        }
        let text = "no other host needs pages of this guest, so there is nothing to give up";
        Err(ControlError::new(ErrorCode::WrongState, text))
    }

    /// Pauses or resumes the guest. During a migration only the engine may do that.
    fn unless_migrating(
        &self,
        act: impl FnOnce(&mut crate::Machine) -> Result<(), MachineError>,
    ) -> Result<Answer, ControlError> {
        let busy = self.busy.lock();
        busy.refuse()?;
        act(&mut self.machine.lock()).map_err(machine_error)?;
        drop(busy);
        Ok(json!({}).into())
    }

    fn quit(&self) -> Result<Answer, ControlError> {
        if let Busy::Fetching(fetch) = &*self.busy.lock()
            && let Some(progress) = fetch.progress()
        {
            let text = format!(
                "{}. If that host is lost for good, so is the guest: end process {} then",
                still_missing(&progress),
                std::process::id()
            );
            return Err(ControlError::new(ErrorCode::Busy, text));
        }
        if let Some(orders) = self.orders() {
            if orders.progress().in_doubt {
                let text = "this guest is in doubt: `vmferry resolve` decides first";
                return Err(ControlError::new(ErrorCode::InDoubt, text));
            }
            orders.cancel();
        }
        Ok(self.end_after(json!({}), End::Quit))
    }

    /// Answers the client, and then lets the process end.
    fn end_after(&self, value: Value, end: End) -> Answer {
        let ended = self.ended.clone();
        Answer::and_then(value, move || {
            // Fails if the process is ending already.
            let _ = ended.send(end);
        })
    }
}

impl Handler for GuestService {
    fn handle(&self, request: Request, replies: &Replies) -> Result<Answer, ControlError> {
        match request {
            Request::Status => Ok(json!(self.status().map_err(machine_error)?).into()),
            Request::Pause => self.unless_migrating(crate::Machine::pause),
            Request::Resume => self.unless_migrating(crate::Machine::resume),
            Request::Quit => self.quit(),
            Request::Migrate(request) => self.migrate(&request, replies),
            Request::Change(request) => self.change(request),
            Request::SwitchOver => self.switch_over(),
            Request::Estimate(request) => self.estimate(request, replies),
            Request::Cancel => self.cancel_request(),
            Request::Balloon => self.balloon(None),
            Request::SetBalloon { target_bytes } => self.balloon(Some(target_bytes)),
            Request::Resolve { word } => self.resolve(word),
            Request::GiveUp => self.give_up(),
        }
    }
}

#[derive(Serialize)]
struct Event {
    event: &'static str,
    #[serde(flatten)]
    progress: Progress,
}
