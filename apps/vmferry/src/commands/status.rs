//! `vmferry status`: the guests of this host, and what is in doubt.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use bytesize::ByteSize;
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use vmferry_control::{ClientError, Directories, Request, call};
use vmferry_handover::journal::{self, Record, SessionSummary, Side, Verdict};

use super::{directories, socket};
use crate::args::StatusOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::progress::outlook;

/// One guest, or all.
pub fn run(options: &StatusOptions, output: &Output) -> Result<(), Failure> {
    match &options.guest {
        Some(guest) => one(guest, output),
        None if options.sessions => sessions(output),
        None => all(output),
    }
}

fn one(guest: &str, output: &Output) -> Result<(), Failure> {
    let status = match call(&socket(guest)?, &Request::Status, &mut |_| {}) {
        Err(error @ ClientError::Silent { .. }) => {
            let journals = directories()?.journals();
            let known = journal::sessions(&journals).ok().and_then(|all| last_word(&all, guest));
            let known = known.unwrap_or_else(|| "nothing of a migration".into());
            let error = anyhow::Error::new(error).context(format!("the journal says {known}"));
            return Err(Failure::of(Code::NotAnswering, error));
        }
        other => other?,
    };
    output.result(&status, || describe(&status));
    Ok(())
}

/// What the journals say of a guest whose VMM says nothing.
fn last_word(sessions: &[SessionSummary], guest: &str) -> Option<String> {
    let last = sessions.iter().rfind(|session| guest_name(session) == Some(guest))?;
    Some(format!("of session {}: this host {}", last.session, promise(last)))
}

/// Asks all guests at once, so that those that are stopped cost the wait for one. One is gone only where nobody listens:
/// whoever answers anything else, or nothing, may be running it.
pub fn ask_all(
    directory: &Directories,
    sessions: &[SessionSummary],
) -> Result<Vec<Value>, Failure> {
    let names = directory.guests()?;
    let ask = |name: &String| match call(&directory.socket(name), &Request::Status, &mut |_| {}) {
        Ok(status) => status,
        Err(error @ (ClientError::NoGuest { .. } | ClientError::Vanished { .. })) => {
            json!({ "name": name, "phase": "gone", "error": error.to_string() })
        }
        Err(error) => json!({
            "name": name, "phase": "not answering", "error": vmferry::chain(&error),
            "journal": last_word(sessions, name),
        }),
    };
    Ok(std::thread::scope(|scope| {
        let asked: Vec<_> = names.iter().map(|name| scope.spawn(|| ask(name))).collect();
        let lost = json!({ "phase": "gone" });
        asked.into_iter().map(|asked| asked.join().unwrap_or_else(|_| lost.clone())).collect()
    }))
}

fn describe(status: &Value) -> String {
    let report = &status["report"];
    let mut lines = vec![
        format!("{} ({})", text(&status["name"]), text(&status["uuid"])),
        format!("  {} on {}: {}", phase(status), text(&status["guest"]), text(&status["choice"])),
        format!(
            "  {} of {} memory, {} vCPUs, process {}{}",
            ByteSize(status["memory_bytes"].as_u64().unwrap_or_default()),
            text(&status["memory_kind"]),
            text(&status["vcpus"]),
            text(&status["pid"]),
            // A VMM of an older release does not say.
            status["release"].as_str().map_or_else(String::new, |it| format!(" of vmferry {it}"))
        ),
    ];
    // Only our own guest tells what it does.
    if !report.is_null() {
        lines.push(format!("  workload: {}", text(&status["workload"])));
        lines.push(format!(
            "  {} rounds, {} pages written, {} checked, {} corruptions, {} ticks",
            report["rounds"],
            report["pages_written"],
            report["pages_checked"],
            report["corruptions"],
            report["ticks"]
        ));
        if report["churn_pages"].as_u64() > Some(0) {
            lines.push(format!(
                "  churn: {} buffers allocated, {} freed, {} pages worked on",
                report["buffers_allocated"], report["buffers_freed"], report["churn_work"]
            ));
        }
        let driver = &report["balloon"];
        if !driver.is_null() {
            lines.push(format!(
                "  driver of the balloon: {}, {} blocks of 4 MiB hinted, {} held, {} inflated",
                text(&driver["state"]),
                driver["hinted_blocks"],
                driver["held_blocks"],
                driver["inflated_blocks"]
            ));
        }
        if report["display_pages"].as_u64() > Some(0) {
            lines.push(format!("  display: {} frames", report["frames"]));
        }
    }
    if !status["crash"].is_null() {
        lines.push(format!("  CRASHED: {}", text(&status["crash"])));
    }
    if status["watched"] == true {
        lines.push("  watched by `vmferry estimate`".to_owned());
    }
    let migration = &status["migration"];
    if !migration.is_null() {
        lines.push(format!(
            "  migrating: {}, round {}, {} sent{}",
            if migration["held"] == true {
                "held before the switchover".to_owned()
            } else {
                text(&migration["phase"])
            },
            migration["round"],
            ByteSize(migration["sent_bytes"].as_u64().unwrap_or_default()),
            if migration["in_doubt"] == true { ", IN DOUBT: `vmferry resolve`" } else { "" }
        ));
        if !migration["forecast"].is_null() {
            lines.push(format!("  {}", outlook(&migration["forecast"])));
        }
        if let Some(advice) = migration["forecast"]["advice"].as_str() {
            lines.push(format!("  does not converge: {advice}"));
        }
    }
    lines.join("\n")
}

fn all(output: &Output) -> Result<(), Failure> {
    let directory = directories()?;
    let sessions = journal::sessions(&directory.journals())
        .map_err(|error| Failure::of(Code::Internal, error))?;
    let guests = ask_all(&directory, &sessions)?;
    let live = |session: &SessionSummary| {
        // A living VMM that is still asking shows it itself.
        guests.iter().any(|guest| {
            guest["migration"]["in_doubt"] == true && guest["name"].as_str() == guest_name(session)
        })
    };
    let doubtful: Vec<Value> = sessions
        .iter()
        .filter(|session| session.verdict == Verdict::InDoubt)
        .map(|session| json!({ "session": session.session, "guest": guest_name(session), "vmm_lives": live(session) }))
        .collect();
    let older = older_journals(&directory);
    let value = json!({
        "guests": guests, "in_doubt": doubtful, "directories": places(&directory), "older": older,
    });
    output.result(&value, || {
        let mut shown = if guests.is_empty() {
            "no guests of vmferry's own VMM on this host: `vmferry run NAME` starts one (which guests came into QEMUs, \
             `vmferry status --sessions` says)"
                .to_owned()
        } else {
            table(&guests)
        };
        for guest in guests.iter().filter(|guest| guest["phase"] == "not answering") {
            let journal = guest["journal"].as_str().unwrap_or("nothing of a migration");
            shown.push_str(&format!("\n{}; the journal says {journal}", text(&guest["error"])));
        }
        for session in &doubtful {
            shown.push_str(&format!(
                "\nIN DOUBT: guest {} in session {}: look at the other host with `vmferry status \
                 --sessions`, then `vmferry resolve`",
                text(&session["guest"]),
                text(&session["session"])
            ));
        }
        for older in &older {
            shown.push_str(&format!("\n{}", about_older(older)));
        }
        shown.push_str(&format!(
            "\njournals are in {}, control sockets in {}",
            directory.journals().display(),
            directory.runtime().display()
        ));
        shown
    });
    Ok(())
}

/// A line for each guest.
fn table(guests: &[Value]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_BORDERS_ONLY_CONDENSED);
    table.set_header(["guest", "phase", "on", "memory", "vCPUs", "corruptions"]);
    for guest in guests {
        let memory = guest["memory_bytes"].as_u64();
        table.add_row([
            text(&guest["name"]),
            phase(guest),
            text(&guest["guest"]),
            memory.map_or_else(String::new, |bytes| ByteSize(bytes).to_string()),
            text(&guest["vcpus"]),
            text(&guest["report"]["corruptions"]),
        ]);
    }
    table.to_string()
}

/// What a guest is doing. One in doubt stands still and must not be resumed, which is more than paused.
fn phase(status: &Value) -> String {
    if status["migration"]["in_doubt"] == true {
        return "IN DOUBT, paused".into();
    }
    text(&status["phase"])
}

/// A value without the quotes of JSON; nothing for one that is not known.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// What the journals know, for whoever must decide who has a guest.
fn sessions(output: &Output) -> Result<(), Failure> {
    let places = directories()?;
    let directory = places.journals();
    let found =
        journal::sessions(&directory).map_err(|error| Failure::of(Code::Internal, error))?;
    let older = older_journals(&places);
    let value = json!({ "sessions": found, "directory": directory, "older": older });
    output.result(&value, || {
        let mut shown = session_table(&directory, &found);
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
        return format!("no migration is known in {}", directory.display());
    }
    let mut table = Table::new();
    table.load_style(presets::ASCII_BORDERS_ONLY_CONDENSED);
    table.set_header(["guest", "session", "this host was", "the other", "and"]);
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
    format!("{table}\nby the journals in {}", directory.display())
}

/// Where this user's sockets and journals are.
fn places(directory: &Directories) -> Value {
    json!({ "journals": directory.journals(), "sockets": directory.runtime() })
}

/// The journals that a release before has left in the places where it kept them.
fn older_journals(directory: &Directories) -> Vec<Value> {
    let of = |state: PathBuf| match journal::sessions(&state.join("journal")) {
        Ok(sessions) if sessions.is_empty() => None,
        Ok(sessions) => Some(json!({ "directory": state, "sessions": sessions })),
        Err(error) => Some(json!({ "directory": state, "error": vmferry::chain(&error) })),
    };
    directory.older().into_iter().filter_map(of).collect()
}

/// What an operator is told of them.
fn about_older(older: &Value) -> String {
    let state = text(&older["directory"]);
    if let Some(error) = older["error"].as_str() {
        return format!("journals of an earlier release in {state} can't be read: {error}");
    }
    let found = older["sessions"].as_array().map_or(&[][..], Vec::as_slice);
    let doubtful = found.iter().filter(|session| session["verdict"] == "in-doubt").count();
    format!(
        "{} more sessions, {doubtful} of them IN DOUBT, in {state}, where an earlier release kept \
         them: `VMFERRY_STATE_DIR={state} vmferry status --sessions` shows what they promise, and \
         `receive` and `resolve` go on with them in the same way",
        found.len()
    )
}

/// When this host was started, in seconds since 1970 by its clock; none where the system does not
/// say.
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

/// What a restart of this host has added to its promise: no guest outlives it.
fn before_restart(session: &SessionSummary) -> &'static str {
    match (session.side, session.verdict) {
        (Side::Source, Verdict::There) | (Side::Destination, Verdict::There) => "",
        (Side::Source, Verdict::InDoubt) => {
            "; since then this host was restarted, and the guest is not paused here any more"
        }
        (_, Verdict::Here) | (Side::Destination, Verdict::InDoubt) => {
            "; since then this host was restarted, which ended the guest"
        }
    }
}

/// What this host promised in a session, in words.
pub fn promise(session: &SessionSummary) -> &'static str {
    match (session.side, session.verdict, session.led) {
        (Side::Source, Verdict::InDoubt, _) => "IN DOUBT: promised the guest away, knows no more",
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

/// When a session began, by this host's clock, and how long ago that is.
pub fn began(session: &SessionSummary) -> String {
    let at = session.records.iter().find_map(|record| match record {
        Record::Open { at, .. } => Some(*at),
        _ => None,
    });
    // What is later has no place in the format.
    const END_OF_9999: u64 = 253_402_300_799;
    let Some(at) = at.filter(|at| *at <= END_OF_9999) else { return "at an unknown time".into() };
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(at);
    match SystemTime::now().duration_since(at) {
        Ok(ago) => {
            let ago = humantime::format_duration(Duration::from_secs(ago.as_secs()));
            format!("{} ({ago} ago)", humantime::format_rfc3339_seconds(at))
        }
        // The clock has jumped back since.
        Err(_) => format!("{} by a clock that was ahead", humantime::format_rfc3339_seconds(at)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::Arc;

    use vmferry_control::{Answer, ControlError, ErrorCode, Handler, Replies, Server};

    use super::*;

    /// A VMM that lives and can't answer.
    struct Hindered;

    impl Handler for Hindered {
        fn handle(&self, _: Request, _: &Replies) -> Result<Answer, ControlError> {
            Err(ControlError::new(ErrorCode::Internal, "no thread for the request"))
        }
    }

    #[test]
    fn a_restart_ends_guests_and_no_promise() {
        let guest = vmferry_wire::GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() };
        let session = |at, more: &[Record], side| {
            let open = Record::Open {
                guest: guest.clone(),
                peer: "b".into(),
                peer_names: vec![],
                at,
                order: 1,
                process: None,
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
        assert!(before_restart(&doubt).contains("not paused here"));
        let given = session(boot - 1, &[Record::Given { by_operator: false }], Side::Source);
        assert_eq!(before_restart(&given), "");
    }

    #[test]
    fn only_where_nobody_listens_a_guest_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("vmferry");
        let directory = Directories::at(place.clone(), place).unwrap().prepare().unwrap();
        // As a VMM that was killed leaves it.
        drop(UnixListener::bind(directory.socket("killed")).unwrap());
        let _server = Server::bind(&directory.socket("living"), Arc::new(Hindered)).unwrap();
        let guests = ask_all(&directory, &[]).unwrap();
        let phases: Vec<_> =
            guests.iter().map(|guest| (text(&guest["name"]), text(&guest["phase"]))).collect();
        let expected = [("killed", "gone"), ("living", "not answering")];
        assert_eq!(phases, expected.map(|(name, phase)| (name.to_owned(), phase.to_owned())));
        assert!(text(&guests[1]["error"]).contains("no thread"), "{guests:?}");
        let shown = table(&guests);
        assert!(shown.contains("gone") && !shown.contains("null"), "{shown}");
    }
}
