//! What the process of a VMM does around its guest: it answers on the control socket, and migrates
//! the guest when asked.
//!
//! The VMM's process is the guardian of its guest. The engine runs here, and the client that asked
//! for the migration only holds its lease: whatever becomes of that client before COMMIT, the
//! guest runs on here.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};
use vmferry::SourceConfig;
use vmferry::estimate::{self, Estimate};
use vmferry::source::{Orders, Progress, SourceOutcome, migrate};
use vmferry_handover::OperatorWord;
use vmferry_transport::{Address, Dialer, Recorder, RecordingSide};

use crate::embed::MigratingMachine;
use crate::error::MachineError;
use crate::machine::{SharedMachine, lock};
use crate::report::Report;
use crate::virtio::BalloonStatus;
use vmferry_control::{
    Answer, ChangeRequest, ControlError, ErrorCode, EstimateRequest, Handler, MigrateRequest,
    RecordRequest, Replies, Request, Started,
};

/// How often a client is told how far its migration is.
const PROGRESS_PERIOD: Duration = Duration::from_millis(200);

/// Watching a guest for longer says nothing more.
const LONGEST_ESTIMATE: Duration = Duration::from_secs(600);

/// How long a guest has for its statistics: its driver answers in milliseconds if it runs at all.
const STATISTICS_PATIENCE: Duration = Duration::from_millis(500);

/// Why the service has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// Somebody asked for it.
    Quit,
    /// The guest has moved to another host.
    Migrated,
}

/// A glance at a guest.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// Name.
    pub name: String,
    /// UUID.
    pub uuid: uuid::Uuid,
    /// The release of vmferry that its VMM is of.
    pub release: &'static str,
    /// `running`, `paused` or `not started`.
    pub phase: &'static str,
    /// `kvm` or `process`.
    pub guest: &'static str,
    /// Why it is that kind.
    pub choice: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// What the memory is made of.
    pub memory_kind: String,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// What it does.
    pub workload: String,
    /// Process that runs it.
    pub pid: u32,
    /// Peak resident memory of that process in bytes.
    pub peak_rss_bytes: u64,
    /// Why it has stopped by itself, if it has.
    pub crash: Option<String>,
    /// What it says of itself.
    pub report: Report,
    /// The migration under way.
    pub migration: Option<Progress>,
    /// Whether it is watched for an estimate.
    pub watched: bool,
    /// Its balloon, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonStatus>,
}

/// What is being done to the guest's memory. One at a time: there is one dirty log.
#[derive(Default)]
enum Busy {
    #[default]
    Idle,
    Migrating(Orders),
    Estimating,
}

impl Busy {
    fn refuse(&self) -> Result<(), ControlError> {
        let text = match self {
            Self::Idle => return Ok(()),
            Self::Migrating(_) => {
                "a migration of this guest is under way: `vmferry status` shows it, `vmferry cancel` ends it"
            }
            Self::Estimating => {
                "this guest is watched by `vmferry estimate`: wait until that has ended"
            }
        };
        Err(ControlError::new(ErrorCode::Busy, text))
    }
}

/// Answers for one guest.
pub struct GuestService {
    machine: SharedMachine,
    journal_directory: PathBuf,
    busy: Mutex<Busy>,
    ended: Sender<End>,
}

impl GuestService {
    /// A service for a machine. `ended` hears when the process shall end.
    #[must_use]
    pub fn new(machine: SharedMachine, journal_directory: PathBuf, ended: Sender<End>) -> Self {
        Self { machine, journal_directory, busy: Mutex::default(), ended }
    }

    /// Ends the migration under way, if it can still be ended.
    pub fn cancel(&self) {
        if let Some(orders) = self.orders() {
            orders.cancel();
        }
    }

    /// How far the migration under way is.
    #[must_use]
    pub fn progress(&self) -> Option<Progress> {
        self.orders().as_ref().map(Orders::progress)
    }

    /// A glance at the guest.
    ///
    /// # Errors
    /// If its memory can't be read.
    pub fn status(&self) -> Result<Status, MachineError> {
        let migration = self.progress();
        let watched = matches!(*self.busy(), Busy::Estimating);
        let machine = lock(&self.machine);
        let config = machine.config();
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
            report: machine.report()?,
            migration,
            watched,
            balloon: machine.balloon().map(|balloon| balloon.status()),
        })
    }

    fn busy(&self) -> MutexGuard<'_, Busy> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The migration under way.
    fn orders(&self) -> Option<Orders> {
        match &*self.busy() {
            Busy::Migrating(orders) => Some(orders.clone()),
            Busy::Idle | Busy::Estimating => None,
        }
    }

    fn migrate(&self, request: &MigrateRequest, replies: &Replies) -> Result<Answer, ControlError> {
        let mut dialer = dialer(request, replies)?;
        let (said, ends) = std::sync::mpsc::channel();
        dialer.recorder = recorder(request, said)?;
        let config = request.source_config(self.journal_directory.clone());
        config.check().map_err(|error| bad_request(&error))?;
        let orders = self.begin()?;
        let started = {
            let machine = lock(&self.machine);
            let (name, memory) =
                (&machine.config().identity.name, machine.config().guest.memory_bytes);
            Started::new(name, memory, &request.to, &config)
        };
        let _ = replies.event(&started);
        let result = self.migrate_with(&dialer, config, &orders, replies);
        // The client may look at the files once it has its answer. Where the guest runs is settled.
        if let Some(recorder) = &dialer.recorder {
            recorder.flush();
        }
        for message in ends.try_iter() {
            let _ = replies.event(&json!({ "event": "recording", "message": message }));
        }
        if !matches!(result, Ok(SourceOutcome::Given { .. })) {
            // Given away, the migration stays on record, so that no second one begins.
            *self.busy() = Busy::Idle;
        }
        match result? {
            SourceOutcome::Given { stats, .. } => Ok(self.end_after(json!(stats), End::Migrated)),
            SourceOutcome::Kept { error, .. } => Err(ControlError::from(&error)),
        }
    }

    /// Takes the place of the one migration that there may be.
    fn begin(&self) -> Result<Orders, ControlError> {
        let mut busy = self.idle_and_running()?;
        let orders = Orders::new();
        *busy = Busy::Migrating(orders.clone());
        Ok(orders)
    }

    /// The place that a migration or an estimate takes.
    fn idle_and_running(&self) -> Result<MutexGuard<'_, Busy>, ControlError> {
        let busy = self.busy();
        busy.refuse()?;
        let machine = lock(&self.machine);
        if !machine.is_running() {
            let text = format!("the guest is {}: `vmferry resume` it first", machine.phase());
            return Err(ControlError::new(ErrorCode::WrongState, text));
        }
        drop(machine);
        Ok(busy)
    }

    /// Watches the guest for some time. A client that goes away ends it.
    fn estimate(
        &self,
        request: EstimateRequest,
        replies: &Replies,
    ) -> Result<Answer, ControlError> {
        if request.time > LONGEST_ESTIMATE {
            let text = format!("a guest is watched for at most {} s", LONGEST_ESTIMATE.as_secs());
            return Err(ControlError::new(ErrorCode::BadRequest, text));
        }
        *self.idle_and_running()? = Busy::Estimating;
        let estimate = self.watch(request, replies);
        *self.busy() = Busy::Idle;
        Ok(json!(estimate?).into())
    }

    fn watch(&self, request: EstimateRequest, replies: &Replies) -> Result<Estimate, ControlError> {
        let ended = Arc::new(AtomicBool::new(false));
        let gone = Arc::clone(&ended);
        let _lease = replies
            .when_gone(move || gone.store(true, Ordering::Release))
            .map_err(|error| ControlError::new(ErrorCode::Internal, error.to_string()))?;
        let (memory, log) = {
            let machine = lock(&self.machine);
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
                    // A client that has gone is the lease's affair.
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
        self.under_way()?.change(request.into()).map_err(|error| bad_request(&error))?;
        Ok(json!(request).into())
    }

    fn switch_over(&self) -> Result<Answer, ControlError> {
        self.under_way()?.switch_over();
        Ok(json!({ "switching_over": true }).into())
    }

    fn balloon(&self, target_bytes: Option<u64>) -> Result<Answer, ControlError> {
        // The machine is free while the guest is waited for.
        let balloon = lock(&self.machine).balloon().ok_or_else(|| {
            let text = "this guest has no balloon: it can be given one when it is started";
            ControlError::new(ErrorCode::WrongState, text)
        })?;
        if let Some(bytes) = target_bytes {
            balloon.set_target(bytes).map_err(machine_error)?;
        }
        let fresh = balloon.refresh_statistics(STATISTICS_PATIENCE);
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

    /// Pausing and resuming are the engine's while it migrates.
    fn unless_migrating(
        &self,
        act: impl FnOnce(&mut crate::Machine) -> Result<(), MachineError>,
    ) -> Result<Answer, ControlError> {
        let busy = self.busy();
        busy.refuse()?;
        act(&mut lock(&self.machine)).map_err(machine_error)?;
        drop(busy);
        Ok(json!({}).into())
    }

    fn quit(&self) -> Result<Answer, ControlError> {
        if let Some(orders) = self.orders() {
            if orders.progress().in_doubt {
                let text = "this guest is in doubt: `vmferry resolve` decides first";
                return Err(ControlError::new(ErrorCode::InDoubt, text));
            }
            orders.cancel();
        }
        Ok(self.end_after(json!({}), End::Quit))
    }

    /// The process ends once the client has its answer.
    fn end_after(&self, value: Value, end: End) -> Answer {
        let ended = self.ended.clone();
        Answer::and_then(value, move || {
            // A process that is ending already needs no second word.
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
        }
    }
}

#[derive(Serialize)]
struct Event {
    event: &'static str,
    #[serde(flatten)]
    progress: Progress,
}

fn dialer(request: &MigrateRequest, replies: &Replies) -> Result<Dialer, ControlError> {
    let address: Address = request.to.parse().map_err(|error| bad_request(&error))?;
    if let Address::Fd(_) = address {
        let mut dialer =
            Dialer::over(replies.take_descriptors()).map_err(|error| bad_request(&error))?;
        // Sockets of the caller have no names: whoever wants one is refused.
        dialer.destination_id = request.tls.as_ref().and_then(|files| files.destination_id.clone());
        return Ok(dialer);
    }
    let mut dialer = match &request.tls {
        Some(files) => files
            .dialer_opened(address, replies.take_descriptors())
            .map_err(|error| ControlError::from(&vmferry::MigrateError::from(error)))?,
        None => Dialer::new(address, None),
    };
    dialer.known_addresses.clone_from(&request.addresses);
    Ok(dialer)
}

/// The recorder that is asked for; `said` hears if it ends before the channels do.
fn recorder(
    request: &MigrateRequest,
    said: std::sync::mpsc::Sender<String>,
) -> Result<Option<Recorder>, ControlError> {
    let Some(RecordRequest { directory, limit }) = &request.record else { return Ok(None) };
    let recorder = Recorder::new(directory, RecordingSide::Source, *limit)
        .map_err(|error| bad_request(&error))?;
    recorder.tell(move |text| {
        // The migration may be over.
        let _ = said.send(text.to_owned());
    });
    Ok(Some(recorder))
}

fn bad_request(error: &dyn std::error::Error) -> ControlError {
    ControlError::new(ErrorCode::BadRequest, vmferry::chain(error))
}

fn machine_error(error: MachineError) -> ControlError {
    let code = match &error {
        MachineError::Config { .. } => ErrorCode::BadRequest,
        MachineError::WrongState { .. } => ErrorCode::WrongState,
        _ => ErrorCode::Internal,
    };
    ControlError::new(code, vmferry::chain(&error))
}

/// `VmHWM` of this process, from `/proc/self/status`; 0 if it can't be read.
#[must_use]
pub fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|number| number.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
