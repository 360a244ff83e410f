//! `vmferry status`: the guests of this host, and the migrations in its journals.

mod moved;
mod sessions;
mod unattended;

use bytesize::ByteSize;
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use vmferry_control::{ClientError, Directories, Request, call};
use vmferry_handover::journal::{self, SessionSummary, Verdict};

use self::sessions::{about_older, older_journals};
pub use self::sessions::{began, guest_name, peer, promise};
use self::unattended::Unattended;
use super::finishes::{Finish, Finishes};
use super::{directories, socket};
use crate::args::StatusOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::progress::{fetch, outlook};

/// Shows one guest, all guests, or all sessions.
pub fn run(options: &StatusOptions, output: &Output) -> Result<(), Failure> {
    match &options.guest {
        Some(guest) => one(guest, output),
        None if options.sessions => sessions::run(output),
        None => all(output),
    }
}

fn one(guest: &str, output: &Output) -> Result<(), Failure> {
    let status = match call(&socket(guest)?, &Request::Status, &mut |_| {}) {
        Err(error @ ClientError::NoGuest { .. }) => {
            let journals = directories()?.journals();
            let sessions = journal::sessions(&journals).unwrap_or_default();
            let found = sessions.iter().filter(|one| guest_name(one) == Some(guest));
            let Some(left) = found.rev().find_map(|one| Unattended::of(&journals, one)) else {
                return Err(error.into());
            };
            output.result(&left.to_json(), || left.describe());
            return Ok(());
        }
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

/// What the journals say of a guest whose VMM does not answer.
fn last_word(sessions: &[SessionSummary], guest: &str) -> Option<String> {
    let last = sessions.iter().rfind(|session| guest_name(session) == Some(guest))?;
    Some(format!("of session {}: this host {}", last.session, promise(last)))
}

/// Asks all guests in parallel, so that several stopped VMMs cost the timeout of one. A guest is
/// gone only if nothing listens on its socket: a VMM that fails to answer may be running it.
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
            "  {} of {} memory, {}process {}{}",
            ByteSize(status["memory_bytes"].as_u64().unwrap_or_default()),
            text(&status["memory_kind"]),
            // Not known of a QEMU that receives a guest.
            status["vcpus"].as_u64().map_or_else(String::new, |vcpus| format!("{vcpus} vCPUs, ")),
            text(&status["pid"]),
            // A VMM of an older release does not report it.
            status["release"].as_str().map_or_else(String::new, |it| format!(" of vmferry {it}"))
        ),
    ];
    // Only a guest of the built-in VMM has a report.
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
                "  balloon driver: {}, {} blocks of 4 MiB hinted, {} held, {} inflated",
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
    let fetching = &status["fetch"];
    if !fetching.is_null() {
        lines.push(format!("  runs here, {}", fetch::needs(fetching)));
        lines.push(format!("  {}", fetch::waits(fetching)));
        lines.extend(fetch::link(fetching).map(|link| format!("  {link}")));
    }
    let migration = &status["migration"];
    if migration["serving"] == true {
        lines.push(format!("  {}", fetch::serves(migration)));
    } else if !migration.is_null() {
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
    let mut guests = ask_all(&directory, &sessions)?;
    let live = |session: &SessionSummary| {
        // A VMM that runs and still asks the destination reports the doubt itself.
        guests.iter().any(|guest| {
            guest["migration"]["in_doubt"] == true && guest["name"].as_str() == guest_name(session)
        })
    };
    let mut doubtful: Vec<Value> = sessions
        .iter()
        .filter(|session| session.verdict == Verdict::InDoubt)
        .map(|session| {
            json!({
                "session": session.session, "guest": guest_name(session),
                "vmm_lives": live(session),
            })
        })
        .collect();
    // While a daemon leads such a session, its control socket reports it.
    let moved = Finishes::read(&directory.journals())?;
    let in_doubt = |one: &&Finish| one.is_undecided() && !one.led && !one.runs_here();
    doubtful.extend(
        moved.all.iter().filter(in_doubt).map(
            |one| json!({ "session": one.session, "guest": one.guest.name, "vmm_lives": null }),
        ),
    );
    let journals = directory.journals();
    let unattended: Vec<Unattended> =
        sessions.iter().filter_map(|session| Unattended::of(&journals, session)).collect();
    // The control socket that its killed process has left says nothing of it.
    guests.retain(|guest| {
        let is_left = |left: &Unattended<'_>| guest["name"].as_str() == left.name();
        guest["phase"] != "gone" || !unattended.iter().any(is_left)
    });
    let older = older_journals(&directory);
    let value = json!({
        "guests": guests, "in_doubt": doubtful, "directories": places(&directory), "older": older,
        "unattended": unattended.iter().map(Unattended::to_json).collect::<Vec<_>>(),
    });
    output.result(&value, || {
        let mut shown = if guests.is_empty() {
            "no guests of the built-in VMM on this host: `vmferry run NAME` starts one (`vmferry \
             status --sessions` lists the guests that QEMUs received)"
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
        for unattended in &unattended {
            shown.push_str(&format!("\n{}", unattended.describe()));
        }
        for older in &older {
            shown.push_str(&format!("\n{}", about_older(older)));
        }
        shown.push_str(&format!(
            "\njournals: {}, control sockets: {}",
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

/// A guest's phase. A guest in doubt is paused and must not be resumed, so it gets a phase of its
/// own. So does a guest that needs two hosts.
fn phase(status: &Value) -> String {
    if let Some(pages) = status["fetch"]["remaining_pages"].as_u64() {
        let of = text(&status["fetch"]["source"]);
        return format!("{}, needs {pages} pages of {of}", text(&status["phase"]));
    }
    if status["migration"]["serving"] == true {
        return fetch::serves(&status["migration"]);
    }
    if status["migration"]["in_doubt"] == true {
        return "IN DOUBT, paused".into();
    }
    text(&status["phase"])
}

/// A value without JSON's quotes; empty for null.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Where this user's sockets and journals are.
fn places(directory: &Directories) -> Value {
    json!({ "journals": directory.journals(), "sockets": directory.runtime() })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::Arc;

    use vmferry_control::{Answer, ControlError, ErrorCode, Handler, Replies, Server};

    use super::*;

    /// A VMM that runs but can't answer.
    struct Overloaded;

    impl Handler for Overloaded {
        fn handle(&self, _: Request, _: &Replies) -> Result<Answer, ControlError> {
            Err(ControlError::new(ErrorCode::Internal, "no thread for the request"))
        }
    }

    #[test]
    fn ask_all_calls_a_guest_gone_only_without_a_listener() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("vmferry");
        let directory = Directories::at(place.clone(), place).unwrap().prepare().unwrap();
        // The socket that a killed VMM leaves.
        drop(UnixListener::bind(directory.socket("killed")).unwrap());
        let _server = Server::bind(&directory.socket("living"), Arc::new(Overloaded)).unwrap();
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
