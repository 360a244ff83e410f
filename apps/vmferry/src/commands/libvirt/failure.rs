//! Why a migration of libvirt failed: exit statuses for its messages, and the daemon's reasons.

use vmferry_libvirt_rpc::REFUSED;

use super::domain::Whereabouts;
use super::virsh::VirshError;
use crate::commands::daemon::streams::{Failed, FailureKind};
use crate::exit::{Code, Failure};

/// Parts of libvirt's own messages, in lower case, in the order in which they are looked for.
const MESSAGES: &[(&str, Code)] = &[
    // Before the next: virsh adds that to it when libvirtd ends in the middle.
    ("disconnected from", Code::NotAnswering),
    ("failed to get domain", Code::UnknownGuest),
    ("domain not found", Code::UnknownGuest),
    ("canceled by client", Code::Cancelled),
    ("cancelled by client", Code::Cancelled),
    ("domain is not running", Code::WrongState),
    ("authentication failed", Code::Authentication),
    ("certificate", Code::Authentication),
    ("access denied", Code::Authentication),
    ("operation forbidden", Code::Authentication),
    ("permission denied", Code::Authentication),
    ("failed to connect to the hypervisor", Code::NotAnswering),
    ("/libvirt': no such file", Code::Connect),
    ("/libvirt': connection refused", Code::Connect),
    ("is already active", Code::Busy),
    ("another migration job", Code::Busy),
    ("cannot acquire state change lock", Code::Busy),
    ("already exists", Code::Incompatible),
    ("unsafe migration", Code::Incompatible),
    ("incompatible", Code::Incompatible),
    ("unsupported configuration", Code::Incompatible),
    ("does not match", Code::Incompatible),
    ("doesn't match", Code::Incompatible),
    ("not supported", Code::Incompatible),
    ("not provide required features", Code::Incompatible),
    ("cannot be migrated", Code::Incompatible),
    ("cannot migrate", Code::Incompatible),
    ("cannot access storage file", Code::Incompatible),
    ("keepalive", Code::LinkLost),
    ("end of file", Code::LinkLost),
    ("connection reset", Code::LinkLost),
    ("broken pipe", Code::LinkLost),
    ("lost connection", Code::LinkLost),
    ("client socket is closed", Code::LinkLost),
    ("unable to write to socket", Code::LinkLost),
    ("unable to read from socket", Code::LinkLost),
    ("channel error", Code::LinkLost),
    ("input/output error", Code::LinkLost),
    ("timed out", Code::LinkLost),
];

/// The exit status for a message of libvirt, or for a daemon's refusal.
fn code_of(message: &str) -> Code {
    if message.contains(REFUSED) {
        return Code::Authentication;
    }
    let message = message.to_lowercase();
    let found = MESSAGES.iter().find(|(part, _)| message.contains(part));
    found.map_or(Code::Internal, |(_, code)| *code)
}

const LOOK_AT_LOGS: &str =
    "look at the logs of `vmferry daemon` on both hosts, which say when and why";

/// What to do about a message, if vmferry knows.
fn advice(code: Code, message: &str) -> Option<&'static str> {
    Some(match code {
        Code::UnknownGuest => {
            "`virsh list --all` shows the guests; --connect names another libvirt"
        }
        Code::NotAnswering => {
            "start this host's libvirt (`systemctl start libvirtd` or `virtqemud.socket`), or name \
             another one with --connect"
        }
        Code::Connect => "`vmferry daemon` does not run on this host any more: start it again",
        Code::Authentication => {
            "look at the policy and the log of `vmferry daemon` on the destination"
        }
        Code::LinkLost => LOOK_AT_LOGS,
        Code::Incompatible if message.contains("Unsafe migration") => {
            "use cache='none' for shared disks, --copy-storage-all for those that are not shared, \
             or --unsafe if the storage is coherent"
        }
        _ => return None,
    })
}

impl From<VirshError> for Failure {
    fn from(error: VirshError) -> Self {
        let (code, advice) = match &error {
            VirshError::Missing { .. } | VirshError::System { .. } => (Code::Internal, None),
            VirshError::Silent { .. } => (Code::NotAnswering, advice(Code::NotAnswering, "")),
            VirshError::Failed { message, .. } => {
                let code = code_of(message);
                (code, advice(code, message))
            }
        };
        match advice {
            Some(advice) => Self::new(code, format!("{}; {advice}", vmferry::chain(&error))),
            None => Self::of(code, error),
        }
    }
}

/// Why vmferry told libvirt to abort the migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AbortReason {
    /// The user.
    Cancelled,
    /// The timeout. Contains the last verdict.
    NotConverging(String),
}

/// A migration that has failed.
pub struct Ended<'a> {
    /// What `virsh migrate` said.
    pub error: VirshError,
    /// The order to abort it, if there was one.
    pub aborted: Option<&'a AbortReason>,
    /// Which host has the guest.
    pub whereabouts: Whereabouts,
}

impl Ended<'_> {
    /// The failure for the user. `link` asks the daemon why a connection of libvirt or QEMU has
    /// ended, of which they only see the end.
    pub fn failure(
        self,
        guest: &str,
        peer: &NamedPeer,
        link: impl FnOnce() -> Option<Failed>,
    ) -> Failure {
        let said = vmferry::chain(&self.error);
        let failed = Failure::from(self.error);
        let (mut code, why) = match (self.aborted, failed.code) {
            // libvirt has noticed the order, in whichever words.
            (Some(AbortReason::Cancelled), _) => (Code::Cancelled, "it was cancelled".to_owned()),
            (Some(AbortReason::NotConverging(why)), _) => (Code::NotConverging, why.clone()),
            (None, Code::LinkLost) => match link() {
                Some(failed) => {
                    let (code, why) = of_link(&failed, peer);
                    (code, format!("{why} ({})", said.trim_end_matches('.')))
                }
                None => (Code::LinkLost, failed.to_string()),
            },
            (None, code) => (code, failed.to_string()),
        };
        if !self.whereabouts.is_here() {
            code = Code::InDoubt;
        }
        let (why, peer) = (why.trim_end_matches('.'), &peer.name);
        let whereabouts = self.whereabouts.sentence(guest, peer);
        Failure::new(code, format!("{guest} was not moved to {peer}: {why}. {whereabouts}"))
    }
}

/// A peer's name, and where its daemon listens.
#[derive(Clone, Debug)]
pub struct NamedPeer {
    /// The name.
    pub name: String,
    /// The address in the daemon's configuration.
    pub address: String,
}

/// The exit status and the text for a stream that failed.
fn of_link(failed: &Failed, NamedPeer { name, address }: &NamedPeer) -> (Code, String) {
    let reason = &failed.reason;
    match failed.kind {
        FailureKind::Unreachable => {
            let why = format!(
                "the daemon of {name} at {address} can't be reached: {reason}; start it there, \
                 open its port, and check the rest with `vmferry doctor --libvirt GUEST --to \
                 {name}`"
            );
            (Code::Connect, why)
        }
        FailureKind::Refused if reason.contains(REFUSED) => (Code::Authentication, reason.clone()),
        FailureKind::Refused => (Code::Connect, reason.clone()),
        FailureKind::LinkLost | FailureKind::Other => {
            let why = format!("the link to {name} at {address} failed: {reason}; {LOOK_AT_LOGS}");
            (Code::LinkLost, why)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_libvirt_have_exit_statuses() {
        for (message, code) in [
            ("failed to get domain 'nope'", Code::UnknownGuest),
            (
                "Disconnected from qemu:///system due to end of file: failed to get domain 'web'",
                Code::NotAnswering,
            ),
            ("operation aborted: migration out job: canceled by client", Code::Cancelled),
            (
                "failed to connect to the hypervisor: Failed to connect socket to \
              '/run/libvirt/libvirt-sock': No such file or directory",
                Code::NotAnswering,
            ),
            (
                "Disconnected from qemu:///system due to end of file: End of file while reading",
                Code::NotAnswering,
            ),
            (
                "Failed to connect socket to '/run/vmferry-peers/host-b/libvirt': Connection \
              refused",
                Code::Connect,
            ),
            ("Requested operation is not valid: domain is not running", Code::WrongState),
            (
                "vmferry refused: host-a may not send guest web here: no rule is for it",
                Code::Authentication,
            ),
            ("operation failed: domain 'web' already exists with uuid 6c34", Code::Incompatible),
            ("Unsafe migration: Migration may lead to data corruption", Code::Incompatible),
            ("the CPU is incompatible with host CPU", Code::Incompatible),
            ("internal error: connection closed due to keepalive timeout", Code::LinkLost),
            ("End of file while reading data: Input/output error", Code::LinkLost),
            (
                "operation failed: job 'migration out' failed: Unable to write to socket: Broken \
              pipe",
                Code::LinkLost,
            ),
            ("something new", Code::Internal),
        ] {
            assert_eq!(code_of(message), code, "{message}");
        }
    }

    fn failed(message: &str) -> VirshError {
        VirshError::Failed { command: "migrate".into(), message: message.into() }
    }

    fn peer() -> NamedPeer {
        NamedPeer { name: "host-b".into(), address: "b.example:7002".into() }
    }

    fn of(message: &str, aborted: Option<&AbortReason>, whereabouts: Whereabouts) -> Failure {
        let error = failed(message);
        Ended { error, aborted, whereabouts }.failure("web", &peer(), || None)
    }

    #[test]
    fn failure_says_why_and_who_has_the_guest() {
        let eof = "End of file while reading data: Input/output error";
        let failure = of(eof, None, Whereabouts::RunsHere);
        assert_eq!(failure.code, Code::LinkLost);
        let text = failure.to_string();
        assert!(text.starts_with("web was not moved to host-b: `virsh migrate` failed:"), "{text}");
        assert!(text.ends_with("The guest runs on this host"), "{text}");
    }

    #[test]
    fn failure_of_a_link_has_the_reason_that_the_daemon_knows() {
        let refused = "host-b refuses the stream: vmferry refused: host-a may not send guests here";
        for (kind, reason, code, said) in [
            (
                FailureKind::Unreachable,
                "connection refused",
                Code::Connect,
                "the daemon of host-b at b.example:7002 can't be reached: connection refused",
            ),
            (FailureKind::LinkLost, "silent", Code::LinkLost, "b.example:7002 failed: silent"),
            (FailureKind::Refused, refused, Code::Authentication, "may not send guests here"),
            (FailureKind::Refused, "no libvirt", Code::Connect, "host-b: no libvirt"),
        ] {
            let link = || {
                let (peer, target) = ("host-b".into(), "libvirt".into());
                Some(Failed { peer, target, kind, reason: reason.into(), age_ms: 0 })
            };
            let ended = Ended {
                error: failed("End of file while reading data"),
                aborted: None,
                whereabouts: Whereabouts::RunsHere,
            };
            let failure = ended.failure("web", &peer(), link);
            assert_eq!(failure.code, code, "{failure}");
            let text = failure.to_string();
            assert!(text.contains(said), "{text}");
            assert!(text.contains("(`virsh migrate` failed: End of file"), "{text}");
            assert!(text.ends_with("The guest runs on this host"), "{text}");
        }
    }

    #[test]
    fn failure_that_vmferry_ordered_has_its_reason() {
        let stuck = AbortReason::NotConverging("too slow".into());
        for (reason, code) in
            [(AbortReason::Cancelled, Code::Cancelled), (stuck, Code::NotConverging)]
        {
            assert_eq!(of("any", Some(&reason), Whereabouts::RunsHere).code, code);
            let paused = Whereabouts::PausedHere("paused (migrating)".into());
            let doubtful = of("any", Some(&reason), paused);
            assert_eq!(doubtful.code, Code::InDoubt);
            assert!(doubtful.to_string().contains("virsh resume web"), "{doubtful}");
        }
    }
}
