//! What this host's libvirt says about a domain.

use std::process::{Command, Output};

use uuid::Uuid;
use vmferry_handover::{DomainSeen, GuestIdentity};
use vmferry_proxy::{DomainState, Domains};

/// libvirt of this host.
const URI: &str = "qemu:///system";

/// How long virsh may take. libvirt itself waits up to 30 s for another job of the domain.
const TIMEOUT_S: &str = "40";

/// How long a virsh that was told to end may take, until it is killed.
const KILL_AFTER_S: &str = "5";

/// The beginning of what virsh prints if a domain is not there. It prints the same if it has lost
/// its connection, or for any other error.
const NOT_FOUND: &str = "failed to get domain";

/// Asks through `virsh`.
#[derive(Debug)]
pub struct LibvirtDomains;

impl Domains for LibvirtDomains {
    fn look(&self, guest: &GuestIdentity) -> DomainState {
        let look = DomainLook::at(guest.uuid);
        match look.said.ends_with("(post-copy failed)") {
            true => DomainState::PostCopyFailed,
            false => DomainState::Seen(look.seen),
        }
    }
}

/// What libvirt says about a domain now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainLook {
    /// In libvirt's words, such as `running (migrated)`, or why it does not say.
    pub said: String,
    /// What that means.
    pub seen: DomainSeen,
}

impl DomainLook {
    /// Asks libvirt of this host. Changes nothing.
    pub fn at(uuid: Uuid) -> Self {
        match virsh(&["domstate", "--reason", "--domain", &uuid.to_string()]) {
            Ok(said) => Self { seen: seen(said.trim()), said: said.trim().to_owned() },
            Err(problem) if is_unfound(&problem) => Self::unfound(uuid, problem),
            Err(problem) => Self { seen: DomainSeen::NoAnswer, said: problem },
        }
    }

    /// libvirt does not have the domain only if it answers, and lists all others.
    fn unfound(uuid: Uuid, problem: String) -> Self {
        let no_answer = |said: String| Self { seen: DomainSeen::NoAnswer, said };
        match virsh(LIST) {
            Ok(list) if !is_listed(&list, uuid) => {
                Self { seen: DomainSeen::Gone, said: "no such domain".into() }
            }
            Ok(_) => no_answer(problem),
            Err(again) => no_answer(format!("{problem}: {again}")),
        }
    }

    /// libvirt was not asked.
    pub fn not_asked() -> Self {
        Self { said: "not asked".into(), seen: DomainSeen::NoAnswer }
    }

    /// Whether post-copy is under way or has failed, so that each host has a part of the memory.
    pub fn is_split(&self) -> bool {
        self.said.contains("(post-copy")
    }
}

/// Makes virsh print the UUIDs of all domains, also of those that are shut off.
pub(crate) const LIST: &[&str] = &["list", "--all", "--uuid"];

/// Whether what [`LIST`] prints contains a domain.
pub(crate) fn is_listed(list: &str, uuid: Uuid) -> bool {
    list.split_whitespace().any(|one| one.parse() == Ok(uuid))
}

/// Whether virsh has not found a domain, or has lost its connection. [`LIST`] tells which.
pub(crate) fn is_unfound(problem: &str) -> bool {
    problem.contains(NOT_FOUND)
}

/// Whether libvirt has a job for the domain, such as a migration that arrives. It is assumed if
/// libvirt does not say.
pub fn has_job(uuid: Uuid) -> bool {
    // libvirt refuses to answer about a migration that arrives.
    virsh(&["domjobinfo", "--domain", &uuid.to_string()])
        .map_or(true, |said| !said.lines().any(is_without_job))
}

fn is_without_job(line: &str) -> bool {
    line.split_once(':')
        .is_some_and(|(name, value)| (name.trim(), value.trim()) == ("Job type", "None"))
}

/// Whether the domain's QEMU has loaded the guest's memory and devices.
pub fn is_loaded(uuid: Uuid) -> bool {
    let query = r#"{"execute":"query-status"}"#;
    let said = virsh(&["qemu-monitor-command", "--domain", &uuid.to_string(), query]);
    let answer = said.ok().and_then(|said| serde_json::from_str::<serde_json::Value>(&said).ok());
    answer.is_some_and(|answer| answer["return"]["status"] == "paused")
}

/// Resumes a paused domain.
///
/// # Errors
/// libvirt's words.
pub fn resume(uuid: Uuid) -> Result<(), String> {
    virsh(&["resume", "--domain", &uuid.to_string()]).map(drop)
}

/// Ends a domain at once.
///
/// # Errors
/// libvirt's words.
pub fn destroy(uuid: Uuid) -> Result<(), String> {
    virsh(&["destroy", "--domain", &uuid.to_string()]).map(drop)
}

/// Aborts the domain's job, such as its migration.
///
/// # Errors
/// libvirt's words.
pub fn abort_job(uuid: Uuid) -> Result<(), String> {
    virsh(&["domjobabort", "--domain", &uuid.to_string()]).map(drop)
}

/// Runs `virsh`, and returns what it prints, or its errors.
pub(super) fn virsh(arguments: &[&str]) -> Result<String, String> {
    let mut virsh = limited("virsh", (TIMEOUT_S, KILL_AFTER_S));
    virsh.args(["--quiet", "--connect", URI]).args(arguments);
    let Output { status, stdout, stderr } = virsh
        .env("LC_ALL", "C")
        .env_remove("LANGUAGE")
        .output()
        .map_err(|error| format!("`virsh` can't be started: {error}"))?;
    if status.success() {
        return Ok(String::from_utf8_lossy(&stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&stderr);
    let lines = errors.lines().map(|line| line.trim_start_matches("error: ").trim());
    let text = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(": ");
    Err(if text.is_empty() { format!("`virsh` ended with {status}") } else { text })
}

/// A program that is told to end after a time, and killed after another one.
fn limited(program: &str, (seconds, kill_after): (&str, &str)) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after", kill_after, seconds, program]);
    command
}

/// The meaning of a state and its reason, as `virsh domstate --reason` prints them.
///
/// Between its Prepare and its Finish, libvirt lets nobody pause a domain: `paused (user)` means
/// that Finish has succeeded, of a guest that was paused before its migration
/// (`VIR_MIGRATE_PAUSED`) or since.
fn seen(said: &str) -> DomainSeen {
    let (state, reason) = said.split_once(" (").unwrap_or((said, ""));
    let reason = reason.trim_end_matches(')');
    match (state, reason) {
        // The source still has memory that the guest needs.
        ("running" | "paused", reason) if reason.starts_with("post-copy") => DomainSeen::Waits,
        ("running" | "idle" | "in shutdown" | "crashed" | "pmsuspended", _) => DomainSeen::Runs,
        ("paused", "" | "migrating" | "unknown" | "starting up") => DomainSeen::Waits,
        ("paused", _) => DomainSeen::Runs,
        ("no state", _) => DomainSeen::Waits,
        ("shut off", _) => DomainSeen::Gone,
        _ => DomainSeen::NoAnswer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_tell_whether_the_finish_has_succeeded() {
        for (said, expected) in [
            ("running (migrated)", DomainSeen::Runs),
            ("running (unpaused)", DomainSeen::Runs),
            ("running (post-copy)", DomainSeen::Waits),
            ("running (post-copy failed)", DomainSeen::Waits),
            ("paused (post-copy failed)", DomainSeen::Waits),
            ("paused (migrating)", DomainSeen::Waits),
            ("paused (starting up)", DomainSeen::Waits),
            ("paused (unknown)", DomainSeen::Waits),
            ("paused", DomainSeen::Waits),
            ("paused (I/O error)", DomainSeen::Runs),
            ("paused (watchdog)", DomainSeen::Runs),
            ("paused (user)", DomainSeen::Runs),
            ("paused (saving)", DomainSeen::Runs),
            ("shut off (destroyed)", DomainSeen::Gone),
            ("", DomainSeen::NoAnswer),
        ] {
            assert_eq!(seen(said), expected, "{said}");
        }
    }

    #[test]
    fn is_split_recognizes_post_copy() {
        let look = |said: &str| DomainLook { said: said.into(), seen: seen(said) };
        assert!(look("paused (post-copy failed)").is_split());
        assert!(!look("paused (migrating)").is_split());
    }

    #[test]
    fn is_without_job_reads_virsh() {
        assert!(is_without_job("Job type:         None        "));
        assert!(!is_without_job("Job type:         Unbounded"));
        assert!(!is_without_job("Operation:        None"));
    }

    #[test]
    fn program_that_ignores_the_signal_to_end_is_killed() {
        let mut stubborn = limited("sh", ("0.05", "0.05"));
        stubborn.args(["-c", "trap '' TERM; while :; do sleep 1; done"]);
        let status = stubborn.status().unwrap();
        assert!(!status.success(), "{status}");
    }

    #[test]
    fn is_listed_reads_virsh() {
        let list = "5b0c0f4e-0000-4000-8000-000000000001\n\n";
        assert!(is_listed(list, Uuid::from_u128(0x5b0c0f4e_0000_4000_8000_000000000001)));
        assert!(!is_listed(list, Uuid::nil()) && !is_listed("\n", Uuid::nil()));
    }
}
