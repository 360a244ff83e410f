//! The agent's process, `vmferry join-fleet`.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use vmferry::witness::Witness;
use vmferry_control::{Directories, WitnessServer};
use vmferry_fleet::{EtcdWitness, Fleet};

use super::reports::Reports;
use crate::args::AgentOptions;
use crate::commands::fleet::config::FleetTable;
use crate::commands::fleet::witness::witness_socket;
use crate::commands::prepared_directories;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// How often the journals are looked at. A source in doubt waits for what they say.
const PERIOD: Duration = Duration::from_millis(500);

/// How often the fleet's object is checked, if nothing else asks etcd.
const CHECK_EVERY: u32 = 20;

/// Pause between attempts to join.
const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// Represents this host in the fleet until the daemon ends.
pub fn serve(options: &AgentOptions, output: &Output) -> Result<(), Failure> {
    // It ends when the daemon does.
    crate::signals::ignore()?;
    std::thread::Builder::new().name("daemon-end".into()).spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    })?;
    let directories = prepared_directories()?;
    let table = FleetTable::read(&options.config)?;
    table.check()?;
    let mut told = String::new();
    loop {
        match join(&table, &directories, output) {
            // The operator is told once, whatever the number of attempts.
            Err(failure) if failure.to_string() != told => {
                told = failure.to_string();
                let event = json!({ "event": "fleet-absent", "message": told });
                output.event(&event, || told.clone());
            }
            Err(_) => {}
            Ok(failure) => {
                let event = json!({ "event": "fleet-left", "message": failure.to_string() });
                output.event(&event, || failure.to_string());
                told.clear();
            }
        }
        // etcd tells nobody when it serves.
        std::thread::sleep(RETRY_PERIOD);
    }
}

/// Joins the fleet, and returns why this host is not in it any more.
fn join(
    table: &FleetTable,
    directories: &Directories,
    output: &Output,
) -> Result<Failure, Failure> {
    let fleet = Arc::new(table.join()?);
    let witness = Arc::new(EtcdWitness::new(Arc::clone(&fleet)));
    let (path, id) = (witness_socket(directories), witness.id());
    let server = WitnessServer::bind(&path, Arc::clone(&witness) as Arc<dyn Witness>);
    let _server = server.map_err(|error| {
        let text = format!("the witness can't be provided at {}", path.display());
        Failure::of(Code::Busy, anyhow::Error::new(error).context(text))
    })?;
    let message = format!("joined {}; the witness is at {}", fleet.prefix(), path.display());
    let joined = json!({
        "event": "fleet-joined", "prefix": fleet.prefix().to_string(), "witness": id,
        "socket": path, "message": message,
    });
    output.event(&joined, || message.clone());
    let mut reports = Reports::new(directories.journals(), witness);
    Ok(follow(&fleet, &mut reports, output))
}

/// Reports what the journals say, until the fleet is another one.
fn follow(fleet: &Fleet, reports: &mut Reports, output: &Output) -> Failure {
    let mut problem = String::new();
    for turn in 1_u32.. {
        let reported = reports.turn(&mut |event, message| {
            let mut event = event;
            event["message"] = message.into();
            output.event(&event, || message.to_owned());
        });
        if reported.is_err() || turn.is_multiple_of(CHECK_EVERY) {
            match fleet.check_incarnation() {
                Err(error) if error.is_lasting() => return error.into(),
                checked => {
                    let failed = reported.or(checked.map_err(Failure::from)).err();
                    let now = failed.map_or_else(String::new, |failure| failure.to_string());
                    if now != problem && !now.is_empty() {
                        let event = json!({ "event": "fleet-silent", "message": now });
                        output.event(&event, || now.clone());
                    }
                    problem = now;
                }
            }
        }
        // Journals cause no wake-up.
        std::thread::sleep(PERIOD);
    }
    unreachable!("turns never end")
}
