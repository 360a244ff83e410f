//! Decodes journals and saved states.

use std::io::Read;

use serde_json::{Value, json};
use vmferry_handover::journal::{Record as Promise, SessionSummary, Side, decode_line};
use vmferry_microvm::state::{StateError, StateReader};
use vmferry_wire::{MAX_FINAL_BYTES, SessionId};

use crate::Tell;
use crate::bytes::{Bytes, Stop};
use crate::record::Record;

/// A limit far above the length of a journal's line.
const MOST_LINE_BYTES: u64 = 1 << 20;

/// Reads a journal. The file name gives its side. Otherwise the side comes from the first record
/// that only one side writes.
pub fn journal<R: Read>(name: &str, bytes: &mut Bytes<R>, tell: &mut Tell<'_>) -> Result<(), Stop> {
    let mut side = match name {
        name if name.ends_with(".source.journal") => Some(Side::Source),
        name if name.ends_with(".destination.journal") => Some(Side::Destination),
        _ => None,
    };
    let mut promises: Vec<Promise> = Vec::new();
    let cut = loop {
        let offset = bytes.offset();
        let line = bytes.line(MOST_LINE_BYTES)?;
        if line.is_empty() {
            break None;
        }
        let what = "a line of the journal";
        let Some(text) = line.strip_suffix(b"\n") else {
            if line.len() as u64 == MOST_LINE_BYTES {
                let problem = format!("it is longer than {MOST_LINE_BYTES} bytes");
                return Err(Stop::Broken { offset, what: what.into(), problem });
            }
            let found = line.len() as u64;
            break Some(Stop::Cut { offset, what: what.into(), needed: found + 1, found });
        };
        let wrong = |problem| Stop::Broken { offset, what: what.into(), problem };
        let Some(promise) = decode_line(text).map_err(|error| wrong(error.to_string()))? else {
            tell(&Record::new(offset, line.len() as u64, "optional", json!({ "known": false })))?;
            continue;
        };
        match side {
            Some(side) if !promise.is_of(side) => {
                let problem = format!("a {} must not write `{}`", side.name(), promise.name());
                return Err(wrong(problem));
            }
            None if promise.name() != "open" => {
                side =
                    [Side::Source, Side::Destination].into_iter().find(|one| promise.is_of(*one));
            }
            _ => {}
        }
        tell(&Record::new(offset, line.len() as u64, promise.name(), fields(&promise)))?;
        promises.push(promise);
    };
    // Records that both sides write do not show whose journal it is.
    if let Some(side) = side {
        let verdict = SessionSummary::new(SessionId([0; 16]), side, promises, false).verdict;
        let fields = json!({ "side": side.name(), "guest": verdict });
        tell(&Record::new(bytes.offset(), 0, "verdict", fields))?;
    }
    cut.map_or(Ok(()), Err)
}

fn fields(promise: &Promise) -> Value {
    match promise {
        Promise::Open { guest, peer, peer_names, at, order, process, witness } => {
            let mut fields = json!({
                "guest": guest.name, "uuid": guest.uuid, "peer": peer, "peer_names": peer_names,
                "at": at, "order": order,
            });
            if let Some(process) = process {
                fields["process"] = json!(process);
            }
            if let Some(witness) = witness {
                fields["witness"] = json!(witness);
            }
            fields
        }
        Promise::Given { by_operator } | Promise::Kept { by_operator } => {
            json!({ "by_operator": by_operator })
        }
        Promise::Aborted { reason } => json!({ "reason": reason }),
        Promise::Commit
        | Promise::CommitPostCopy
        | Promise::Serving
        | Promise::RunIntent
        | Promise::RunIntentPostCopy
        | Promise::Fetched
        | Promise::Ended => json!({}),
    }
}

/// Reads a saved state, up to the maximum length of FINAL.
pub fn state<R: Read>(bytes: &mut Bytes<R>, tell: &mut Tell<'_>) -> Result<(), Stop> {
    let state = bytes.rest(u64::from(MAX_FINAL_BYTES) + 1)?;
    let reader = StateReader::parse(&state).map_err(|error| match error {
        StateError::Truncated { what, offset, needed, left } => {
            Stop::Cut { offset: offset as u64, what, needed: needed as u64, found: left as u64 }
        }
        StateError::Corrupt { ref what, offset, .. }
        | StateError::Invalid { ref what, offset, .. } => {
            Stop::Broken { offset: offset as u64, what: what.clone(), problem: error.to_string() }
        }
        other => {
            let problem = other.to_string();
            Stop::Broken { offset: 0, what: "the header".into(), problem }
        }
    })?;
    for section in reader.sections() {
        let fields = json!({
            "name": section.name(), "instance": section.instance(), "version": section.version(),
        });
        let length = section.payload().len() as u64;
        tell(&Record::new(section.offset() as u64, length, "section", fields))?;
    }
    Ok(())
}
