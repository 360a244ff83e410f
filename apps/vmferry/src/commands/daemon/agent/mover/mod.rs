//! Carries out migrations that were ordered in the fleet: admits guests that come here, and sends
//! guests of this host. All state is in etcd and in the records of the processes that send, so the
//! next agent goes on where this one has ended.

mod admission;
mod sender;
mod sending;

use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;

use serde_json::Value;
use uuid::Uuid;
use vmferry_control::Directories;
use vmferry_fleet::{Fleet, FleetError, Host, HostName, Migration, MigrationPhase};

use self::admission::Coming;
pub use self::admission::{ADMITS, Admitted, FleetAdmission};
use self::sender::Sender;
use super::guests::Found;
use super::parent::Parent;

/// The migrations of this host.
pub struct Mover {
    config: PathBuf,
    name: HostName,
    about: Host,
    directories: Directories,
    guests: Found,
    /// The processes that send guests, by the numbers of their migrations.
    senders: HashMap<Uuid, Sender>,
    daemon: Rc<Parent>,
    /// What the daemon was told last to admit, and the number of that list.
    admitted: Option<Vec<Coming>>,
    number: u64,
}

/// Tells the daemon of an event, with a sentence for people.
pub type Tell<'a> = &'a mut dyn FnMut(Value, &str);

impl Mover {
    /// The mover of a host with these guests.
    pub fn new(
        config: PathBuf,
        name: HostName,
        about: Host,
        directories: Directories,
        guests: Found,
        daemon: Rc<Parent>,
    ) -> Self {
        let senders = HashMap::new();
        let (admitted, number) = (None, 0);
        Self { config, name, about, directories, guests, senders, daemon, admitted, number }
    }

    /// Does what is next in each migration of this host.
    ///
    /// # Errors
    /// The first one; the other migrations go on.
    pub fn turn(&mut self, fleet: &Fleet, tell: Tell<'_>) -> Result<(), FleetError> {
        let mut problem = None;
        let mut note = |result: Result<(), FleetError>| {
            if let Err(error) = result {
                problem.get_or_insert(error);
            }
        };
        // Before they were read the daemon is told nothing, not that it admits nobody.
        let Some(views) = fleet.followed_migrations() else { return Ok(()) };
        let mut ours = Vec::new();
        for view in views {
            match view.migration {
                Ok(migration) => ours.push(migration),
                Err(error) => note(Err(error.into())),
            }
        }
        ours.retain(|one| one.source == self.name || one.destination == self.name);
        self.tell_admitted(fleet, &ours, None, tell)?;
        for migration in &ours {
            let mine = (migration.destination == self.name, migration.source == self.name);
            note(match (&migration.phase, mine) {
                (MigrationPhase::Ordered, (true, _)) => self.admit(fleet, migration, &ours, tell),
                (MigrationPhase::Admitted { address }, (_, true)) => {
                    self.send(fleet, migration, address, tell)
                }
                (MigrationPhase::Sending { .. }, (_, true)) => self.watch(fleet, migration, tell),
                _ => Ok(()),
            });
        }
        // Their orders are over, or were replaced.
        let live = |id: &Uuid| ours.iter().any(|one| one.id == *id && !one.phase.is_over());
        self.senders.retain(|id, sender| {
            let stays = live(id) || sender.lives();
            if !stays {
                sender.forget();
            }
            stays
        });
        problem.map_or(Ok(()), Err)
    }

    fn set(
        fleet: &Fleet,
        migration: &Migration,
        phase: MigrationPhase,
    ) -> Result<bool, FleetError> {
        let before = migration.phase.clone();
        let now = fleet.change_migration(migration, |found| {
            // Somebody else may have decided meanwhile.
            (found.phase == before).then(|| Migration { phase: phase.clone(), ..found.clone() })
        })?;
        Ok(now.is_some_and(|now| now.phase == phase))
    }
}
