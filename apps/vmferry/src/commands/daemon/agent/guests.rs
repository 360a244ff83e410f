//! The guests of this host, found by their control sockets and those of their QEMUs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use uuid::Uuid;
use vmferry_control::Directories;
use vmferry_fleet::{Guest, GuestPhase, GuestVmm};

use super::qemus::Qemus;
use crate::commands::status::ask_all;
use crate::exit::Failure;

/// Pause between two looks.
const PERIOD: Duration = Duration::from_secs(1);

/// The guests as they were found last; `None` before the first look.
pub type Found = Arc<Mutex<Option<Vec<Guest>>>>;

/// Looks for guests, on a thread of its own: a VMM that is stopped answers late.
pub fn watch(directories: Directories, mut qemus: Qemus) -> Result<Found, Failure> {
    let found: Found = Arc::default();
    let shared = Arc::clone(&found);
    let looks = move || {
        let mut known = BTreeMap::new();
        loop {
            // A directory that can't be read says nothing about the guests.
            if let Ok(statuses) = ask_all(&directories, &[]) {
                known = guests(&directories, &statuses, &known);
                *shared.lock() = Some(merged(known.values().cloned(), qemus.guests()));
            }
            // Guests that start and end cause no wake-up.
            std::thread::sleep(PERIOD);
        }
    };
    std::thread::Builder::new().name("guests".into()).spawn(looks)?;
    Ok(found)
}

/// Each guest once. A QEMU's guest that is being moved has a control socket too, which knows the
/// phase.
fn merged(by_control: impl Iterator<Item = Guest>, of_qemus: Vec<Guest>) -> Vec<Guest> {
    let mut all: BTreeMap<Uuid, Guest> = by_control.map(|guest| (guest.uuid, guest)).collect();
    for guest in of_qemus {
        match all.get_mut(&guest.uuid) {
            Some(known) if known.vmm == GuestVmm::Qemu => {
                *known = Guest { phase: known.phase, ..guest };
            }
            Some(_) => {}
            None => drop(all.insert(guest.uuid, guest)),
        }
    }
    all.into_values().collect()
}

/// The guests that answer, and those that did before and are silent now, by their names.
fn guests(
    directories: &Directories,
    statuses: &[Value],
    known: &BTreeMap<String, Guest>,
) -> BTreeMap<String, Guest> {
    let mut found = BTreeMap::new();
    for status in statuses {
        let Some(name) = status["name"].as_str() else { continue };
        if status["phase"] == "not answering" {
            if let Some(guest) = known.get(name) {
                let silent = Guest { phase: GuestPhase::Silent, ..guest.clone() };
                found.insert(name.to_owned(), silent);
            }
            continue;
        }
        let Some(uuid) = status["uuid"].as_str().and_then(|uuid| uuid.parse().ok()) else {
            continue;
        };
        let is_qemu = status["guest"] == "qemu";
        let guest = Guest {
            uuid,
            name: name.to_owned(),
            vmm: if is_qemu { GuestVmm::Qemu } else { GuestVmm::Vmferry },
            phase: phase(status),
            memory_bytes: status["memory_bytes"].as_u64(),
            vcpus: status["vcpus"].as_u64(),
            socket: Some(directories.socket(name)),
        };
        found.insert(name.to_owned(), guest);
    }
    found
}

fn phase(status: &Value) -> GuestPhase {
    let migration = &status["migration"];
    if !status["crash"].is_null() {
        GuestPhase::Crashed
    } else if migration["in_doubt"] == true {
        GuestPhase::InDoubt
    } else if migration["serving"] == true {
        GuestPhase::Serving
    } else if !status["fetch"].is_null() {
        GuestPhase::Fetching
    } else if !migration.is_null() {
        GuestPhase::Sending
    } else {
        match status["phase"].as_str() {
            Some("running") => GuestPhase::Running,
            Some("paused") => GuestPhase::Paused,
            _ => GuestPhase::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use serde_json::json;

    use super::*;

    fn found(statuses: &[Value], known: &BTreeMap<String, Guest>) -> BTreeMap<String, Guest> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        std::fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        guests(&Directories::at(path.clone(), path).unwrap(), statuses, known)
    }

    #[test]
    fn guest_that_is_silent_stays_known() {
        let uuid = uuid::Uuid::from_bytes([7; 16]);
        let status = json!({
            "name": "web", "uuid": uuid, "guest": "kvm", "phase": "running", "memory_bytes": 4096,
            "vcpus": 2, "crash": null, "migration": null,
        });
        let first = found(std::slice::from_ref(&status), &BTreeMap::new());
        let guest = &first["web"];
        assert_eq!((guest.phase, guest.vcpus), (GuestPhase::Running, Some(2)));
        let silent = found(&[json!({ "name": "web", "phase": "not answering" })], &first);
        assert_eq!((silent["web"].phase, silent["web"].uuid), (GuestPhase::Silent, uuid));
        assert!(found(&[json!({ "name": "web", "phase": "gone" })], &silent).is_empty());
    }

    #[test]
    fn qemu_with_a_control_socket_is_one_guest() {
        let guest = |uuid: u8, vmm, phase, socket: &str| Guest {
            uuid: Uuid::from_bytes([uuid; 16]),
            name: "web".into(),
            vmm,
            phase,
            memory_bytes: Some(1),
            vcpus: None,
            socket: Some(socket.into()),
        };
        let sending = guest(1, GuestVmm::Qemu, GuestPhase::Sending, "web.sock");
        let own = guest(2, GuestVmm::Vmferry, GuestPhase::Running, "own.sock");
        let qemus = vec![
            guest(1, GuestVmm::Qemu, GuestPhase::Paused, "web.qmp"),
            guest(3, GuestVmm::Qemu, GuestPhase::Running, "db.qmp"),
        ];
        let all = merged([sending, own].into_iter(), qemus);
        let brief: Vec<_> = all
            .iter()
            .map(|guest| (guest.phase, guest.socket.as_ref().unwrap().to_str().unwrap()))
            .collect();
        let expected = [
            (GuestPhase::Sending, "web.qmp"),
            (GuestPhase::Running, "own.sock"),
            (GuestPhase::Running, "db.qmp"),
        ];
        assert_eq!(brief, expected);
    }

    #[test]
    fn phase_follows_the_migration() {
        let of = |members: Value| phase(&members);
        assert_eq!(of(json!({ "phase": "paused" })), GuestPhase::Paused);
        assert_eq!(of(json!({ "migration": { "round": 1 } })), GuestPhase::Sending);
        assert_eq!(of(json!({ "migration": { "in_doubt": true } })), GuestPhase::InDoubt);
        assert_eq!(of(json!({ "migration": { "serving": true } })), GuestPhase::Serving);
        assert_eq!(of(json!({ "fetch": { "faults": 1 } })), GuestPhase::Fetching);
        assert_eq!(of(json!({ "crash": "triple fault", "phase": "running" })), GuestPhase::Crashed);
    }
}
