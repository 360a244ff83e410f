//! `vmferry status`: the guests of this host, and what is in doubt.

use bytesize::ByteSize;
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use vmferry::journal::{self, Record, SessionSummary, Verdict};
use vmferry_microvm::control::{Request, call};

use super::{directory, socket};
use crate::args::StatusOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// One guest, or all.
pub fn run(options: &StatusOptions, output: &Output) -> Result<(), Failure> {
    match &options.guest {
        Some(guest) => one(guest, output),
        None => all(output),
    }
}

fn one(guest: &str, output: &Output) -> Result<(), Failure> {
    let status = call(&socket(guest)?, &Request::Status {}, &mut |_| {})?;
    output.result(&status, || describe(&status));
    Ok(())
}

fn describe(status: &Value) -> String {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let report = &status["report"];
    let mut lines = vec![
        format!("{} ({})", text(&status["name"]), text(&status["uuid"])),
        format!(
            "  {} on {}: {}",
            text(&status["phase"]),
            text(&status["guest"]),
            text(&status["choice"])
        ),
        format!(
            "  {} of {} memory, {} vCPUs, process {}",
            ByteSize(status["memory_bytes"].as_u64().unwrap_or_default()),
            text(&status["memory_kind"]),
            text(&status["vcpus"]),
            text(&status["pid"])
        ),
        format!("  workload: {}", text(&status["workload"])),
        format!(
            "  {} rounds, {} pages written, {} checked, {} corruptions, {} ticks",
            report["rounds"],
            report["pages_written"],
            report["pages_checked"],
            report["corruptions"],
            report["ticks"]
        ),
    ];
    if !status["crash"].is_null() {
        lines.push(format!("  CRASHED: {}", text(&status["crash"])));
    }
    let migration = &status["migration"];
    if !migration.is_null() {
        lines.push(format!(
            "  migrating: {}, round {}, {} sent{}",
            text(&migration["phase"]),
            migration["round"],
            ByteSize(migration["sent_bytes"].as_u64().unwrap_or_default()),
            if migration["in_doubt"] == true { ", IN DOUBT: `vmferry resolve`" } else { "" }
        ));
    }
    lines.join("\n")
}

fn all(output: &Output) -> Result<(), Failure> {
    let directory = directory()?;
    let names = directory.guests()?;
    let guests: Vec<Value> = names
        .iter()
        .map(|name| match call(&directory.socket(name), &Request::Status {}, &mut |_| {}) {
            Ok(status) => status,
            Err(error) => json!({ "name": name, "phase": "gone", "error": error.to_string() }),
        })
        .collect();
    let sessions = journal::sessions(&directory.journals())
        .map_err(|error| Failure::of(Code::Internal, error))?;
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
    output.result(&json!({ "guests": guests, "in_doubt": doubtful }), || {
        let mut table = Table::new();
        table.load_style(presets::ASCII_BORDERS_ONLY_CONDENSED);
        table.set_header(["guest", "phase", "on", "memory", "vCPUs", "corruptions"]);
        for guest in &guests {
            let cell = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            table.add_row([
                cell(&guest["name"]),
                cell(&guest["phase"]),
                cell(&guest["guest"]),
                guest["memory_bytes"].as_u64().map_or_else(String::new, |bytes| ByteSize(bytes).to_string()),
                cell(&guest["vcpus"]),
                cell(&guest["report"]["corruptions"]),
            ]);
        }
        let mut text = if guests.is_empty() {
            "no guests on this host: `vmferry run NAME` starts one".to_owned()
        } else {
            table.to_string()
        };
        for session in &doubtful {
            text.push_str(&format!(
                "\nIN DOUBT: guest {} in session {}: look at the other host, then `vmferry resolve`",
                session["guest"], session["session"]
            ));
        }
        text
    });
    Ok(())
}

fn guest_name(session: &SessionSummary) -> Option<&str> {
    session.records.iter().find_map(|record| match record {
        Record::Open { guest, .. } => Some(guest.name.as_str()),
        _ => None,
    })
}
