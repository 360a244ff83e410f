//! `vmferry fleet move`, `cancel`, `cordon` and `uncordon`.

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytesize::ByteSize;
use serde_json::{Value, json};
use uuid::Uuid;
use vmferry_fleet::placement::{Needs, NoPlace, choose};
use vmferry_fleet::{
    EtcdError, Fleet, FleetError, Guest, GuestPhase, GuestVmm, HostName, HostOrders, HostView,
    Migration, MigrationPhase,
};
use vmferry_wire::GuestIdentity;

use crate::args::MoveOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// How long changes are waited for before etcd is asked.
const ASK_PERIOD: Duration = Duration::from_secs(2);

/// How often its progress is a line for people.
const PROGRESS_PERIOD: Duration = Duration::from_secs(2);

/// Orders a migration, and follows it to its end.
pub fn order(fleet: &Fleet, options: &MoveOptions, output: &Output) -> Result<(), Failure> {
    let hosts = fleet.hosts()?;
    let (source, guest) = find(&hosts, &options.guest)?;
    if source.presence.is_none() {
        let text = format!(
            "guest {} is on {}, which is not heard: look at that host, and start its daemon",
            guest.name, source.name
        );
        return Err(Failure::new(Code::WrongState, text));
    }
    if !matches!(guest.phase, GuestPhase::Running | GuestPhase::Paused) {
        let phase = json!(guest.phase);
        let text = format!(
            "guest {} on {} can't be moved now: it is {}",
            guest.name,
            source.name,
            phase.as_str().unwrap_or_default()
        );
        return Err(Failure::new(Code::WrongState, text));
    }
    if guest.vmm != GuestVmm::Qemu {
        let text = format!(
            "guest {} is not one of QEMU, so the fleet can't move it: use `vmferry send` on {}",
            guest.name, source.name
        );
        return Err(Failure::new(Code::WrongState, text));
    }
    let wanted = options.to.as_deref().map(HostName::new).transpose()?;
    if let Some(wanted) = &wanted
        && !hosts.iter().any(|view| view.name == *wanted)
    {
        let (prefix, name) = (fleet.prefix().to_string(), wanted.clone());
        return Err(FleetError::UnknownHost { prefix, name }.into());
    }
    let labels: BTreeMap<String, String> = options.labels.iter().cloned().collect();
    let needs = Needs { host: wanted.as_ref(), labels, template: &options.template };
    let migrations = fleet.migrations()?;
    let readable: Vec<Migration> =
        migrations.into_iter().filter_map(|view| view.migration.ok()).collect();
    let choice = choose(&hosts, &readable, source, guest, &needs)?;
    let order = Migration {
        id: Uuid::new_v4(),
        guest: GuestIdentity { uuid: guest.uuid, name: guest.name.clone() },
        source: source.name.clone(),
        destination: choice.host,
        why: choice.why,
        template: options.template.clone(),
        max_bandwidth: options.max_bandwidth,
        memory_bytes: guest.memory_bytes.unwrap_or_default(),
        ordered_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        cancel: false,
        phase: MigrationPhase::Ordered,
    };
    fleet.order_migration(&order)?;
    tell(&order, output, || {
        let Migration { guest, source, destination, why, .. } = &order;
        format!("moving {} from {source} to {destination}: {why}", guest.name)
    });
    match options.no_wait {
        true => Ok(()),
        false => follow(fleet, order, output),
    }
}

/// The guest with this name or UUID, on the host that has it.
fn find<'a>(hosts: &'a [HostView], wanted: &str) -> Result<(&'a HostView, &'a Guest), Failure> {
    let matches = |guest: &Guest| guest.name == wanted || guest.uuid.to_string() == wanted;
    let alive = hosts.iter().filter(|view| view.orders.lost.is_none());
    let all = alive.flat_map(|view| view.guests.iter().flatten().map(move |it| (view, it)));
    let found: Vec<_> = all.filter(|(_, guest)| matches(guest)).collect();
    let here: Vec<_> = found.iter().copied().filter(|(_, guest)| guest.phase.is_here()).collect();
    match (&here[..], &found[..]) {
        ([one], _) | ([], [one]) => Ok(*one),
        ([], _) => Err(Failure::new(
            Code::UnknownGuest,
            format!("no host of the fleet has a guest {wanted}"),
        )),
        (several, _) => {
            let places =
                several.iter().map(|(view, guest)| format!("{} on {}", guest.uuid, view.name));
            let text = format!(
                "{wanted} is more than one guest ({}): name one by its UUID; a UUID that two hosts \
                 have is moved by none",
                places.collect::<Vec<_>>().join(", ")
            );
            Err(Failure::new(Code::WrongState, text))
        }
    }
}

/// Shows the progress until the migration is over.
fn follow(fleet: &Fleet, mut last: Migration, output: &Output) -> Result<(), Failure> {
    let (changed, changes) = channel();
    let _watch = fleet.follow_migrations(move || {
        // The command ends.
        let _ = changed.send(());
    });
    let (mut told, mut is_silent) = (Instant::now(), false);
    loop {
        let now = match changes.recv_timeout(ASK_PERIOD) {
            Ok(()) => {
                let mut all = fleet.followed_migrations().into_iter().flatten();
                let uuid = last.guest.uuid.to_string();
                let ours = all.find(|view| view.guest == uuid).map(|view| view.migration);
                ours.transpose().map_err(FleetError::from)?.filter(|now| now.id == last.id)
            }
            Err(_) => match fleet.change_migration(&last, |_| None) {
                Err(FleetError::Etcd(EtcdError::NoAnswer { .. })) => {
                    if !std::mem::replace(&mut is_silent, true) {
                        output.note("etcd does not answer; the migration goes on meanwhile");
                    }
                    continue;
                }
                now => now?,
            },
        };
        is_silent = false;
        let Some(now) = now else {
            let text = "the migration was replaced by another order: `vmferry fleet status`";
            return Err(Failure::new(Code::WrongState, text));
        };
        let same_step = std::mem::discriminant(&now.phase) == std::mem::discriminant(&last.phase);
        if now != last && (!same_step || output.is_json() || told.elapsed() > PROGRESS_PERIOD) {
            told = Instant::now();
            if !now.phase.is_over() {
                tell(&now, output, || in_words(&now.phase));
            }
        }
        last = now;
        match &last.phase {
            MigrationPhase::Done { downtime_ms, carried, .. } => {
                output.result(&json!(last), || {
                    let paused = downtime_ms
                        .map_or_else(String::new, |ms| format!("; it was paused for {ms:.1} ms"));
                    let carried = carried.as_ref().map_or_else(String::new, |why| {
                        format!("\nit was moved by QEMU's own migration, because {why}")
                    });
                    format!("{} runs on {}{paused}{carried}", last.guest.name, last.destination)
                });
                return Ok(());
            }
            MigrationPhase::Failed { reason } => {
                return Err(Failure::new(
                    Code::Internal,
                    format!("the guest has not moved: {reason}"),
                ));
            }
            MigrationPhase::Cancelled => {
                let text = format!("cancelled: {} stays on {}", last.guest.name, last.source);
                return Err(Failure::new(Code::Cancelled, text));
            }
            _ => {}
        }
    }
}

fn tell(migration: &Migration, output: &Output, text: impl FnOnce() -> String) {
    let mut event = json!(migration);
    event["event"] = Value::from("move");
    output.event(&event, text);
}

/// A phase for people.
pub fn in_words(phase: &MigrationPhase) -> String {
    match phase {
        MigrationPhase::Ordered => "waiting for the destination".to_owned(),
        MigrationPhase::Admitted { address } => format!("admitted; it is sent to {address}"),
        MigrationPhase::Sending { progress, .. } => match progress {
            Some(progress) if progress.in_doubt => "in doubt: the witness decides".to_owned(),
            Some(progress) => {
                let eta = progress
                    .eta_ms
                    .map_or_else(String::new, |ms| format!(", {:.1} s left", ms / 1e3));
                format!("{}: {} sent{eta}", progress.phase, ByteSize(progress.sent_bytes))
            }
            None => "sending".to_owned(),
        },
        MigrationPhase::Done { .. } => "done".to_owned(),
        MigrationPhase::Failed { reason } => format!("failed: {reason}"),
        MigrationPhase::Cancelled => "cancelled".to_owned(),
    }
}

/// Cancels the migration of a guest.
pub fn cancel(fleet: &Fleet, guest: &str, output: &Output) -> Result<(), Failure> {
    let migrations = fleet.migrations()?.into_iter().filter_map(|view| view.migration.ok());
    let mut of_guest = migrations.filter(|migration| {
        let identity = &migration.guest;
        identity.name == guest || identity.uuid.to_string() == guest
    });
    let Some(migration) = of_guest.find(|migration| !migration.phase.is_over()) else {
        return Err(Failure::new(
            Code::WrongState,
            format!("no migration of {guest} is under way"),
        ));
    };
    fleet.change_migration(&migration, |found| {
        let open = !found.phase.is_over() && !found.cancel;
        open.then(|| Migration { cancel: true, ..found.clone() })
    })?;
    let done = json!({ "guest": migration.guest, "cancelling": true });
    output.result(&done, || {
        format!(
            "the migration of {} to {} is being cancelled; after its handover it is too late",
            migration.guest.name, migration.destination
        )
    });
    Ok(())
}

/// Sets whether a host is cordoned.
pub fn cordon(fleet: &Fleet, host: &str, cordoned: bool, output: &Output) -> Result<(), Failure> {
    let host = HostName::new(host)?;
    let changed = fleet.order(&host, |found| HostOrders { cordoned, ..found.clone() })?;
    let done = json!({ "host": host, "cordoned": cordoned, "changed": changed });
    output.result(&done, || {
        let already = if changed { "" } else { " already" };
        match cordoned {
            true => format!("{host} is cordoned{already}: no guest is moved there without --to"),
            false => format!("{host} is not cordoned{already}"),
        }
    });
    Ok(())
}

impl From<NoPlace> for Failure {
    fn from(error: NoPlace) -> Self {
        Self::of(Code::Incompatible, error)
    }
}
