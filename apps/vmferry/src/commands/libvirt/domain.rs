//! A domain as libvirt describes it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use uuid::Uuid;
use vmferry_wire::GuestIdentity;

use super::virsh::{Virsh, VirshError, field};
use crate::commands::daemon::domains;
use crate::exit::{Code, Failure};

/// How long a libvirt that has crashed may take to serve again: systemd starts it at once.
const RESTART_PATIENCE: Duration = Duration::from_secs(10);

/// How often it is asked meanwhile.
const RETRY_PERIOD: Duration = Duration::from_millis(500);

/// A domain of this host's libvirt.
#[derive(Clone, Debug, PartialEq)]
pub struct Domain {
    /// Its name and UUID.
    pub identity: GuestIdentity,
    /// Whether it has a QEMU process.
    pub is_active: bool,
    /// Its state in libvirt's words, such as `running`.
    pub state: String,
    /// Its memory in bytes, 0 if libvirt does not say.
    pub memory_bytes: u64,
    /// Its vCPUs, if libvirt says.
    pub vcpus: Option<u64>,
}

impl Domain {
    /// The domain with this name, UUID or ID.
    pub fn find(virsh: &Virsh, guest: &str) -> Result<Self, Failure> {
        // A separate argument could be taken for an option.
        let text = virsh.run(&["dominfo".to_owned(), format!("--domain={guest}")])?;
        Self::parse(&text).ok_or_else(|| {
            let text = format!("`virsh dominfo` printed no name and UUID of {guest}: {text}");
            Failure::new(Code::Internal, text)
        })
    }

    /// Reads what `virsh dominfo` prints.
    fn parse(text: &str) -> Option<Self> {
        let kib = |name| field(text, name)?.strip_suffix("KiB")?.trim().parse::<u64>().ok();
        Some(Self {
            identity: GuestIdentity {
                name: field(text, "Name")?.to_owned(),
                uuid: field(text, "UUID")?.parse().ok()?,
            },
            is_active: field(text, "Id") != Some("-"),
            state: field(text, "State").unwrap_or_default().to_owned(),
            memory_bytes: kib("Max memory").unwrap_or_default() << 10,
            vcpus: field(text, "CPU(s)").and_then(|count| count.parse().ok()),
        })
    }

    /// Fails unless the domain can be migrated live.
    pub fn must_run(&self) -> Result<(), Failure> {
        if self.is_active {
            return Ok(());
        }
        let (name, state) = (&self.identity.name, &self.state);
        let text = format!(
            "the guest {name} does not run (libvirt: {state}), so there is nothing to move live: \
             start it with `virsh start {name}`, or copy its definition with `virsh dumpxml \
             --inactive {name}`"
        );
        Err(Failure::new(Code::WrongState, text))
    }

    /// The answer to `vmferry status`, without the migration.
    pub fn about(&self, name: &str) -> Value {
        json!({
            "name": name,
            "uuid": self.identity.uuid,
            "phase": if self.state == "paused" { "paused" } else { "migrating" },
            "guest": "libvirt",
            "choice": "moved by libvirt",
            "memory_bytes": self.memory_bytes,
            "memory_kind": "QEMU's",
            "vcpus": self.vcpus,
            "pid": std::process::id(),
            "release": env!("CARGO_PKG_VERSION"),
        })
    }
}

/// Which host has the guest after a migration that failed, as the source's libvirt knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// It runs here.
    RunsHere,
    /// It is here, paused as before the migration.
    PausedAsBefore,
    /// It is paused here, and this libvirt does not know whether it runs at the destination.
    /// Contains libvirt's words.
    PausedHere(String),
    /// Post-copy has failed: each host has a part of its memory.
    Split,
    /// It has no process here. Contains libvirt's words.
    NotHere(String),
    /// libvirt does not say. Contains the reason.
    Unknown(String),
}

impl Whereabouts {
    /// Asks the source's libvirt. One that does not answer may be starting again.
    pub fn ask(virsh: &Virsh, uuid: Uuid, was_paused: bool) -> Self {
        let deadline = Instant::now() + RESTART_PATIENCE;
        loop {
            let found = Self::ask_once(virsh, uuid, was_paused);
            if !matches!(found, Self::Unknown(_)) || Instant::now() >= deadline {
                return found;
            }
            // Nothing reports that a libvirt serves again.
            std::thread::sleep(RETRY_PERIOD);
        }
    }

    fn ask_once(virsh: &Virsh, uuid: Uuid, was_paused: bool) -> Self {
        let unknown = |error: VirshError| Self::Unknown(vmferry::chain(&error));
        match virsh.run(&["domstate", "--reason", "--domain", &uuid.to_string()]) {
            Ok(state) => Self::parse(state.trim(), was_paused),
            Err(VirshError::Failed { message, command }) if domains::is_unfound(&message) => {
                match virsh.run(domains::LIST) {
                    Ok(list) if !domains::is_listed(&list, uuid) => {
                        Self::NotHere("libvirt no longer has it".into())
                    }
                    Ok(_) => unknown(VirshError::Failed { message, command }),
                    Err(error) => unknown(error),
                }
            }
            Err(error) => unknown(error),
        }
    }

    /// Reads what `virsh domstate --reason` prints, such as `running (migration canceled)`.
    fn parse(state: &str, was_paused: bool) -> Self {
        let (word, reason) = state.split_once(" (").unwrap_or((state, ""));
        match word {
            _ if reason.starts_with("post-copy") => Self::Split,
            "running" | "idle" | "in shutdown" => Self::RunsHere,
            "paused" if was_paused && !reason.starts_with("migrati") => Self::PausedAsBefore,
            "paused" => Self::PausedHere(state.to_owned()),
            _ => Self::NotHere(format!("libvirt says: {state}")),
        }
    }

    /// Whether this host has the guest, beyond doubt.
    pub fn is_here(&self) -> bool {
        matches!(self, Self::RunsHere | Self::PausedAsBefore)
    }

    /// Says who has the guest, and what to do.
    pub fn sentence(&self, name: &str, peer: &str) -> String {
        match self {
            Self::RunsHere => "The guest runs on this host".into(),
            Self::PausedAsBefore => {
                "The guest is on this host, paused as before the migration".into()
            }
            Self::PausedHere(state) => format!(
                "The guest is paused on this host (libvirt: {state}), and it is not known whether \
                 it runs on {peer}. Ask the libvirt there with `virsh domstate --reason {name}`, \
                 and run `virsh resume {name}` here only if it does not run there"
            ),
            Self::Split => format!(
                "The guest was in post-copy, so each host has a part of its memory, and neither \
                 can run it alone: do not end either QEMU, mend the link, and continue with `virsh \
                 migrate --postcopy-resume` (libvirt 8.5 or newer on both hosts). {peer} has its \
                 CPUs"
            ),
            Self::NotHere(state) => format!(
                "This host does not run the guest any more ({state}). Ask the libvirt of {peer} \
                 with `virsh domstate --reason {name}`"
            ),
            Self::Unknown(reason) => format!(
                "It is not known which host has the guest, because this host's libvirt does not \
                 say ({reason}). Ask both with `virsh domstate --reason {name}`"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNNING: &str = "\
Id:             1
Name:           web
UUID:           6c3430f0-7f73-4552-ad67-c86146be37ca
OS Type:        hvm
State:          running
CPU(s):         2
CPU time:       0.2s
Max memory:     262144 KiB
Used memory:    262144 KiB
Persistent:     no
";

    #[test]
    fn parse_reads_what_dominfo_prints() {
        let domain = Domain::parse(RUNNING).unwrap();
        assert_eq!(domain.identity.name, "web");
        assert_eq!(domain.memory_bytes, 256 << 20);
        assert_eq!((domain.vcpus, domain.is_active), (Some(2), true));
        domain.must_run().unwrap();
        let off = RUNNING.replace("Id:             1", "Id:             -");
        let off = off.replace("running", "shut off");
        let failure = Domain::parse(&off).unwrap().must_run().unwrap_err();
        assert_eq!(failure.code, Code::WrongState);
        assert!(failure.to_string().contains("shut off"), "{failure}");
    }

    #[test]
    fn parse_tolerates_missing_lines() {
        let printed = "Name: web\nUUID: 6c3430f0-7f73-4552-ad67-c86146be37ca\n";
        let domain = Domain::parse(printed).unwrap();
        assert_eq!((domain.memory_bytes, domain.vcpus), (0, None));
        assert_eq!(Domain::parse("Name: web\n"), None);
    }

    #[test]
    fn whereabouts_are_in_doubt_only_when_the_guest_may_run_twice() {
        let at = |state: &str| Whereabouts::parse(state, false);
        assert_eq!(at("running (migration canceled)"), Whereabouts::RunsHere);
        assert_eq!(at("running (booted)"), Whereabouts::RunsHere);
        let paused = "paused (migrating)";
        assert_eq!(at(paused), Whereabouts::PausedHere(paused.into()));
        assert_eq!(at("paused (post-copy failed)"), Whereabouts::Split);
        assert_eq!(at("running (post-copy failed)"), Whereabouts::Split);
        assert!(matches!(at("shut off (migrated)"), Whereabouts::NotHere(_)));
        assert_eq!(Whereabouts::parse("paused (user)", true), Whereabouts::PausedAsBefore);
        let still = Whereabouts::parse("paused (migrating)", true);
        assert_eq!(still, Whereabouts::PausedHere("paused (migrating)".into()));
    }
}
