//! `vmferry status --sessions`: the migrations in this host's journals, and what the host promised.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use comfy_table::{Table, presets};
use serde_json::{Value, json};
use vmferry_control::Directories;
use vmferry_handover::journal::{self, Record, SessionSummary, Side, Verdict};

use super::moved::Moved;
use super::text;
use crate::commands::directories;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Shows all sessions in the journals, for the operator who decides which host has a guest.
pub fn run(output: &Output) -> Result<(), Failure> {
    let places = directories()?;
    let directory = places.journals();
    let found =
        journal::sessions(&directory).map_err(|error| Failure::of(Code::Internal, error))?;
    let older = older_journals(&places);
    let moved = Moved::read(&directory)?;
    let value = json!({
        "sessions": found, "finishes": moved.to_json(), "unreadable": moved.unreadable_json(),
        "directory": directory, "older": older,
    });
    output.result(&value, || {
        let mut shown = session_table(&directory, &found);
        if let Some(table) = moved.table() {
            shown.push_str(&format!("\n{table}"));
        }
        for older in &older {
            shown.push_str(&format!("\n{}", about_older(older)));
        }
        shown
    });
    Ok(())
}

/// A line for each session of a directory.
fn session_table(directory: &Path, found: &[SessionSummary]) -> String {
    if found.is_empty() {
        return format!("no migrations in {}", directory.display());
    }
    let mut table = Table::new();
    table.load_style(presets::ASCII_BORDERS_ONLY_CONDENSED);
    table.set_header(["guest", "session", "this host was", "peer", "and"]);
    let boot = boot_time();
    for session in found {
        let since = if began_before(session, boot) { before_restart(session) } else { "" };
        table.add_row([
            guest_name(session).unwrap_or("?").to_owned(),
            session.session.to_string(),
            match session.side {
                Side::Source => "source".into(),
                Side::Destination => "destination".into(),
            },
            peer(session).unwrap_or("?").to_owned(),
            format!("{}{since}", promise(session)),
        ]);
    }
    format!("{table}\nfrom the journals in {}", directory.display())
}

/// The journals that an earlier release left in its directories.
pub fn older_journals(directory: &Directories) -> Vec<Value> {
    let of = |state: PathBuf| match journal::sessions(&state.join("journal")) {
        Ok(sessions) if sessions.is_empty() => None,
        Ok(sessions) => Some(json!({ "directory": state, "sessions": sessions })),
        Err(error) => Some(json!({ "directory": state, "error": vmferry::chain(&error) })),
    };
    directory.older().into_iter().filter_map(of).collect()
}

/// A message about them for the operator.
pub fn about_older(older: &Value) -> String {
    let state = text(&older["directory"]);
    if let Some(error) = older["error"].as_str() {
        return format!("journals of an earlier release in {state} can't be read: {error}");
    }
    let found = older["sessions"].as_array().map_or(&[][..], Vec::as_slice);
    let doubtful = found.iter().filter(|session| session["verdict"] == "in-doubt").count();
    format!(
        "{} more sessions, {doubtful} of them IN DOUBT, in {state}, the directory of an earlier \
         release: `VMFERRY_STATE_DIR={state} vmferry status --sessions` shows them; `receive` and \
         `resolve` handle them with the same variable",
        found.len()
    )
}

/// When this host booted, in seconds since 1970 by its clock, if the system reports it.
fn boot_time() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

fn began_before(session: &SessionSummary, boot: Option<u64>) -> bool {
    let at = session.records.iter().find_map(|record| match record {
        Record::Open { at, .. } => Some(*at),
        _ => None,
    });
    matches!((at, boot), (Some(at), Some(boot)) if at < boot) && !session.led
}

/// What a reboot of this host since the session adds to the promise: no guest survives a reboot.
fn before_restart(session: &SessionSummary) -> &'static str {
    match (session.side, session.verdict) {
        (Side::Source, Verdict::There) | (Side::Destination, Verdict::There) => "",
        (Side::Source, Verdict::InDoubt) => {
            "; this host was rebooted since, and the guest is no longer paused here"
        }
        (_, Verdict::Here) | (Side::Destination, Verdict::InDoubt) => {
            "; this host was rebooted since, which ended the guest"
        }
    }
}

/// What this host promised in a session, as text.
pub fn promise(session: &SessionSummary) -> &'static str {
    if session.lacks_pages() {
        return match session.side {
            Side::Source => "has pages that the guest at the other host may still need",
            Side::Destination => "has the guest, which may still need pages of the other host",
        };
    }
    match (session.side, session.verdict, session.led) {
        (Side::Source, Verdict::InDoubt, _) => {
            "IN DOUBT: committed the handover, got no confirmation"
        }
        (Side::Source, Verdict::There, _) => "gave the guest away",
        (Side::Source, Verdict::Here, true) => "is sending the guest",
        (Side::Source, _, _) => "kept the guest",
        (Side::Destination, Verdict::Here, _) => {
            "has the guest: it runs here, or ran until it crashed"
        }
        (Side::Destination, _, true) => "is receiving the guest, which has not run here yet",
        (Side::Destination, _, false) => "never ran the guest and never will",
    }
}

/// The other host.
pub fn peer(session: &SessionSummary) -> Option<&str> {
    session.records.iter().find_map(|record| match record {
        Record::Open { peer, .. } => Some(peer.as_str()),
        _ => None,
    })
}

/// The guest's name, if the journal has its first record.
pub fn guest_name(session: &SessionSummary) -> Option<&str> {
    session.guest().map(|guest| guest.name.as_str())
}

/// When a session began, by this host's clock, and how long ago that was.
pub fn began(session: &SessionSummary) -> String {
    let at = session.records.iter().find_map(|record| match record {
        Record::Open { at, .. } => Some(*at),
        _ => None,
    });
    // The format ends there.
    const END_OF_9999: u64 = 253_402_300_799;
    let Some(at) = at.filter(|at| *at <= END_OF_9999) else { return "at an unknown time".into() };
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(at);
    match SystemTime::now().duration_since(at) {
        Ok(ago) => {
            let ago = humantime::format_duration(Duration::from_secs(ago.as_secs()));
            format!("{} ({ago} ago)", humantime::format_rfc3339_seconds(at))
        }
        // The clock was set back since.
        Err(_) => format!("{} by a clock that was ahead", humantime::format_rfc3339_seconds(at)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn began_before_is_true_of_guests_but_not_of_promises() {
        let guest = vmferry_wire::GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() };
        let session = |at, more: &[Record], side| {
            let open = Record::Open {
                guest: guest.clone(),
                peer: "b".into(),
                peer_names: vec![],
                at,
                order: 1,
                process: None,
                witness: None,
            };
            let records = [&[open], more].concat();
            SessionSummary::new(vmferry_wire::SessionId([1; 16]), side, records, false)
        };
        let boot = boot_time().expect("Linux says when it was started");
        let before = |session: &SessionSummary| began_before(session, Some(boot));
        let owns = session(boot - 1, &[Record::RunIntent], Side::Destination);
        assert!(before(&owns) && !before(&session(boot + 1, &[], Side::Source)));
        assert_eq!(owns.verdict, Verdict::Here, "its word is still OWNS");
        assert!(before_restart(&owns).contains("ended the guest"));
        let doubt = session(boot - 1, &[Record::Commit], Side::Source);
        assert!(before_restart(&doubt).contains("no longer paused here"));
        let given = session(boot - 1, &[Record::Given { by_operator: false }], Side::Source);
        assert_eq!(before_restart(&given), "");
        let serves = session(boot, &[Record::CommitPostCopy, Record::Serving], Side::Source);
        assert!(promise(&serves).contains("may still need"));
        let fetches = session(boot, &[Record::RunIntentPostCopy], Side::Destination);
        assert!(promise(&fetches).contains("may still need"));
    }
}
