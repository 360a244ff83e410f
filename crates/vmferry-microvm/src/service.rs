//! What the process of a VMM does around its guest: it answers on the control socket, and migrates
//! the guest when asked.
//!
//! The VMM's process is the guardian of its guest. The engine runs here, and the client that asked
//! for the migration only holds its lease: whatever becomes of that client before COMMIT, the
//! guest runs on here.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};
use vmferry::SourceConfig;
use vmferry::handover::OperatorWord;
use vmferry::source::{Orders, Progress, SourceOutcome, migrate};
use vmferry_transport::{Address, Dialer, Recorder, RecordingSide};

use crate::control::{
    Answer, ControlError, ErrorCode, Handler, MigrateRequest, RecordRequest, Replies, Request,
};
use crate::embed::MigratingMachine;
use crate::error::MachineError;
use crate::machine::{SharedMachine, lock};
use crate::report::Report;
use crate::virtio::BalloonStatus;

/// How often a client is told how far its migration is.
const PROGRESS_PERIOD: Duration = Duration::from_millis(200);

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
    /// Its balloon, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonStatus>,
}

/// Answers for one guest.
pub struct GuestService {
    machine: SharedMachine,
    journal_directory: PathBuf,
    migration: Mutex<Option<Orders>>,
    ended: Sender<End>,
}

impl GuestService {
    /// A service for a machine. `ended` hears when the process shall end.
    #[must_use]
    pub fn new(machine: SharedMachine, journal_directory: PathBuf, ended: Sender<End>) -> Self {
        Self { machine, journal_directory, migration: Mutex::new(None), ended }
    }

    /// Ends the migration under way, if it can still be ended.
    pub fn cancel(&self) {
        if let Some(orders) = &*self.migration() {
            orders.cancel();
        }
    }

    /// How far the migration under way is.
    #[must_use]
    pub fn progress(&self) -> Option<Progress> {
        self.migration().as_ref().map(Orders::progress)
    }

    /// A glance at the guest.
    ///
    /// # Errors
    /// If its memory can't be read.
    pub fn status(&self) -> Result<Status, MachineError> {
        let migration = self.progress();
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
            balloon: machine.balloon().map(|balloon| balloon.status()),
        })
    }

    fn migration(&self) -> MutexGuard<'_, Option<Orders>> {
        self.migration.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn migrate(&self, request: &MigrateRequest, replies: &Replies) -> Result<Answer, ControlError> {
        let mut dialer = dialer(request, replies)?;
        let (said, ends) = std::sync::mpsc::channel();
        dialer.recorder = recorder(request, said)?;
        let config = self.source_config(request);
        config.check().map_err(|error| bad_request(&error))?;
        let orders = self.begin()?;
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
            *self.migration() = None;
        }
        match result? {
            SourceOutcome::Given { stats, .. } => Ok(self.end_after(json!(stats), End::Migrated)),
            SourceOutcome::Kept { error, .. } => Err(ControlError::from(&error)),
        }
    }

    /// Takes the place of the one migration that there may be.
    fn begin(&self) -> Result<Orders, ControlError> {
        let mut migration = self.migration();
        if migration.is_some() {
            let text = "a migration of this guest is under way: `vmferry status` shows it, \
                        `vmferry cancel` ends it";
            return Err(ControlError::new(ErrorCode::Busy, text));
        }
        let machine = lock(&self.machine);
        if !machine.is_running() {
            let text = format!("the guest is {}: `vmferry resume` it first", machine.phase());
            return Err(ControlError::new(ErrorCode::WrongState, text));
        }
        let orders = Orders::new();
        *migration = Some(orders.clone());
        Ok(orders)
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

    fn source_config(&self, request: &MigrateRequest) -> SourceConfig {
        let mut config = SourceConfig::new(self.journal_directory.clone());
        config.channels = request.channels;
        config.downtime_limit = request.downtime_limit;
        config.max_bandwidth = request.max_bandwidth;
        config.max_rounds = request.max_rounds;
        config.timeouts.reconnect = request.reconnect_timeout;
        config.timeout = request.timeout;
        config.when_stuck = request.when_stuck;
        config.throttle = request.throttle;
        config.compression.way = request.compress;
        config.compression.when_busy = request.when_busy;
        config.compression.workers = request.workers;
        config.compression.delta_memory = request.delta_memory;
        config.free_page_hints = request.free_page_hints;
        config.verify = request.verify;
        if let Some(version) = request.protocol {
            config.protocol = version..=version;
        }
        config
    }

    fn cancel_request(&self) -> Result<Answer, ControlError> {
        self.under_way()?.cancel();
        Ok(json!({ "cancelling": true }).into())
    }

    fn set(&self, max_bandwidth: Option<u64>) -> Result<Answer, ControlError> {
        self.under_way()?.set_max_bandwidth(max_bandwidth).map_err(|error| bad_request(&error))?;
        Ok(json!({ "max_bandwidth": max_bandwidth }).into())
    }

    fn balloon(&self, target_bytes: Option<u64>) -> Result<Answer, ControlError> {
        // The machine is free while the guest is waited for.
        let balloon = lock(&self.machine).balloon().ok_or_else(|| {
            let text = "this guest has no balloon: it is made with one by `vmferry run --balloon`";
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
        self.migration().clone().ok_or_else(|| ControlError::new(ErrorCode::WrongState, text))
    }

    fn resolve(&self, word: OperatorWord) -> Result<Answer, ControlError> {
        let decided = self.migration().as_ref().is_some_and(|orders| orders.decide(word));
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
        let migration = self.migration();
        if migration.is_some() {
            return Err(ControlError::new(ErrorCode::Busy, "the guest is being migrated"));
        }
        act(&mut lock(&self.machine)).map_err(machine_error)?;
        Ok(json!({}).into())
    }

    fn quit(&self) -> Result<Answer, ControlError> {
        if let Some(orders) = &*self.migration() {
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
            Request::Status {} => Ok(json!(self.status().map_err(machine_error)?).into()),
            Request::Pause {} => self.unless_migrating(crate::Machine::pause),
            Request::Resume {} => self.unless_migrating(crate::Machine::resume),
            Request::Quit {} => self.quit(),
            Request::Migrate(request) => self.migrate(&request, replies),
            Request::Set { max_bandwidth } => self.set(max_bandwidth),
            Request::Cancel {} => self.cancel_request(),
            Request::Balloon { target_bytes } => self.balloon(target_bytes),
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
