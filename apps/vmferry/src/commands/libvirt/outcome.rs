//! How a migration of libvirt ended: exit statuses for its messages, and the final statistics.

use std::fmt::Write;

use bytesize::ByteSize;
use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Value, json};
use vmferry_api::RecordedRound;

use super::domain::Whereabouts;
use super::job::JobStats;
use super::virsh::VirshError;
use super::watch::Watch;
use crate::exit::{Code, Failure};
use crate::tables::recorded;

/// Parts of messages, in lower case, in the order in which they are looked for.
const MESSAGES: &[(&str, Code)] = &[
    ("failed to get domain", Code::UnknownGuest),
    ("domain not found", Code::UnknownGuest),
    ("canceled by client", Code::Cancelled),
    ("cancelled by client", Code::Cancelled),
    ("domain is not running", Code::WrongState),
    ("may not send", Code::Authentication),
    ("has no policy", Code::Authentication),
    ("vmferry refused", Code::Authentication),
    ("authentication failed", Code::Authentication),
    ("certificate", Code::Authentication),
    ("access denied", Code::Authentication),
    ("operation forbidden", Code::Authentication),
    ("permission denied", Code::Authentication),
    ("failed to connect to the hypervisor", Code::NotAnswering),
    ("disconnected from", Code::NotAnswering),
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

/// The exit status for a message of libvirt.
fn code_of(message: &str) -> Code {
    let message = message.to_lowercase();
    let found = MESSAGES.iter().find(|(part, _)| message.contains(part));
    found.map_or(Code::Internal, |(_, code)| *code)
}

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
        Code::LinkLost => {
            "look at the logs of `vmferry daemon` on both hosts, which say when and why"
        }
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

/// The failure of a migration.
pub fn failure(
    error: VirshError,
    aborted: Option<&AbortReason>,
    guest: &str,
    peer: &str,
    whereabouts: &Whereabouts,
) -> Failure {
    let failed = Failure::from(error);
    let (mut code, why) = match (aborted, failed.code) {
        // libvirt has noticed the order, in whichever words.
        (Some(AbortReason::Cancelled), _) => (Code::Cancelled, "it was cancelled".to_owned()),
        (Some(AbortReason::NotConverging(why)), _) => (Code::NotConverging, why.clone()),
        (None, code) => (code, failed.to_string()),
    };
    if !whereabouts.is_here() {
        code = Code::InDoubt;
    }
    let why = why.trim_end_matches('.');
    let whereabouts = whereabouts.sentence(guest, peer);
    Failure::new(code, format!("{guest} was not moved to {peer}: {why}. {whereabouts}"))
}

/// Where the final statistics are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// libvirt's report of the completed job.
    Completed,
    /// The last question before the end: libvirt has not reported more.
    LastPoll,
}

/// The statistics of a guest that has moved, with the members that other guests' statistics have
/// and that libvirt reports.
pub fn statistics(watch: &Watch, origin: Origin, total_ms: f64, about: Value) -> Value {
    let last = watch.last();
    let milliseconds = |name| match origin {
        // During pre-copy, `downtime` is a prediction.
        Origin::LastPoll if name == "downtime" => None,
        _ => last.get(name),
    };
    let mut stats = json!({
        "rounds": watch.rounds(),
        "total_ms": last.get("time_elapsed").map_or(total_ms, |ms| total_ms.max(ms as f64)),
        "downtime_ms": milliseconds("downtime"),
        "predicted_downtime_ms": watch.predicted_downtime_ms(),
        "sent_bytes": last.sent_bytes(),
        "memory_bytes": last.number("memory_total"),
        "libvirt": about,
    });
    stats["libvirt"]["job"] = last.facts();
    stats["libvirt"]["setup_ms"] = json!(milliseconds("setup_time"));
    stats["libvirt"]["iterations"] = json!(last.get("memory_iteration"));
    stats["libvirt"]["postcopy_requests"] = json!(last.get("memory_postcopy_requests"));
    stats["libvirt"]["disk_sent_bytes"] = json!(last.get("disk_processed"));
    stats["libvirt"]["complete"] = json!(origin == Origin::Completed);
    stats
}

/// The result as text.
pub fn text(stats: &Value) -> String {
    let read = recorded(stats);
    let bytes = |number: Option<f64>| ByteSize(number.unwrap_or_default() as u64);
    let ms = |number: Option<f64>| {
        number.map_or_else(|| "unknown".to_owned(), |number| format!("{number:.1} ms"))
    };
    let mut text = if read.rounds.is_empty() { String::new() } else { rounds(&read.rounds) };
    let _ = writeln!(
        text,
        "downtime {}, predicted {}\ntotal {:.0} ms, {} sent by QEMU for {} of guest memory",
        ms(read.downtime_ms),
        ms(read.predicted_downtime_ms),
        read.total_ms.unwrap_or_default(),
        bytes(read.sent_bytes),
        bytes(read.memory_bytes),
    );
    if let Some(disks) = stats["libvirt"]["disk_sent_bytes"].as_f64().filter(|bytes| *bytes > 0.0) {
        let _ = writeln!(text, "  of it {} for disks", bytes(Some(disks)));
    }
    if let Some(requests) = stats["libvirt"]["postcopy_requests"].as_u64().filter(|it| *it > 0) {
        let _ =
            writeln!(text, "  {requests} pages were fetched in post-copy when the guest used them");
    }
    text.push_str("the guest runs at the destination");
    text
}

/// The rounds that were seen, with the columns that libvirt has numbers for.
fn rounds(rounds: &[RecordedRound]) -> String {
    let number = |number: Option<f64>| number.unwrap_or_default();
    let mut table = Table::new();
    table.load_style(presets::ASCII_BORDERS_ONLY_CONDENSED);
    table.set_header(["round", "pages", "zero", "bytes", "ms", "MB/s", "dirty pages/s"]);
    for round in rounds {
        table.add_row([
            number(round.round).to_string(),
            number(round.pages).to_string(),
            number(round.zero_pages).to_string(),
            number(round.bytes).to_string(),
            format!("{:.1}", number(round.ms)),
            format!("{:.0}", number(round.bytes_per_s) / 1e6),
            format!("{:.0}", number(round.dirty_pages_per_s)),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{table}\n")
}

/// Statistics that contain the downtime and not only a prediction.
pub fn is_final(stats: &JobStats) -> bool {
    stats.has_memory() && stats.get("time_elapsed").is_some()
}

#[cfg(test)]
mod tests {
    use super::super::watch::PostCopy;
    use super::*;

    #[test]
    fn messages_of_libvirt_have_exit_statuses() {
        for (message, code) in [
            ("failed to get domain 'nope'", Code::UnknownGuest),
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
                "host-a may not send guest web here: no rule of the policy is for it",
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

    #[test]
    fn failure_says_why_and_who_has_the_guest() {
        let error = failed("End of file while reading data: Input/output error");
        let failure = failure(error, None, "web", "host-b", &Whereabouts::RunsHere);
        assert_eq!(failure.code, Code::LinkLost);
        let text = failure.to_string();
        assert!(text.starts_with("web was not moved to host-b: `virsh migrate` failed:"), "{text}");
        assert!(text.ends_with("The guest runs on this host"), "{text}");
    }

    #[test]
    fn failure_that_vmferry_ordered_has_its_reason() {
        let stuck = AbortReason::NotConverging("too slow".into());
        for (reason, code) in
            [(AbortReason::Cancelled, Code::Cancelled), (stuck, Code::NotConverging)]
        {
            let here = Whereabouts::RunsHere;
            assert_eq!(failure(failed("any"), Some(&reason), "web", "b", &here).code, code);
            let paused = Whereabouts::PausedHere("paused (migrating)".into());
            let doubtful = failure(failed("any"), Some(&reason), "web", "b", &paused);
            assert_eq!(doubtful.code, Code::InDoubt);
            assert!(doubtful.to_string().contains("virsh resume web"), "{doubtful}");
        }
    }

    #[test]
    fn downtime_of_the_last_poll_is_unknown() {
        let mut watch = Watch::new(300.0, PostCopy::Off);
        let stats = JobStats::parse(
            "Job type: 2\nmemory_total: 409600\nmemory_processed: 9\nmemory_iteration: 2\n\
             downtime: 42\ntime_elapsed: 700\n",
        );
        watch.observe(&stats, 500.0);
        watch.finish(None, 800.0);
        let polled = statistics(&watch, Origin::LastPoll, 800.0, json!({}));
        assert!(polled["downtime_ms"].is_null() && polled["predicted_downtime_ms"] == 42.0);
        assert!(text(&polled).contains("downtime unknown, predicted 42.0 ms"), "{}", text(&polled));
        let known = statistics(&watch, Origin::Completed, 800.0, json!({}));
        assert_eq!((&known["downtime_ms"], &known["total_ms"]), (&42.into(), &800.0.into()));
        assert!(text(&known).ends_with("the guest runs at the destination"));
    }
}
