//! Converts greetings, messages and frames to fields. Tokens are never printed.

use serde_json::{Value, json};
use vmferry_microvm::state::StateReader;
use vmferry_transport::{Direction, RECORDING_HEADER_BYTES, RecordingHeader, RecordingSide};
use vmferry_wire::{
    Compared, ControlMessage, FetchLanes, Hello, HelloReply, HelloStatus, LaneOffer, LaneToken,
    LateStreamsId, ProbeMessage, Reason, Role, SessionKind,
};

use crate::record::Record;

/// The fields of a probe message.
pub fn probe(message: &ProbeMessage) -> Value {
    match message {
        ProbeMessage::Ask { guest } => json!({ "guest": guest }),
        ProbeMessage::Tell { refusal, facts } => json!({
            "refusal": refusal, "facts": serde_json::from_slice::<Value>(facts).ok(),
        }),
        ProbeMessage::Echo { nonce } => json!({ "nonce": nonce }),
        ProbeMessage::Echoed { nonce, clock_us } => json!({ "nonce": nonce, "clock_us": clock_us }),
        ProbeMessage::Load { filler } => json!({ "bytes": filler.len() }),
        ProbeMessage::Compare { vmm, config, layout } => {
            json!({ "vmm": vmm, "config_bytes": config.len(), "slots": layout.len() })
        }
        ProbeMessage::Compared(compared) => match compared {
            Compared::Fits => json!({ "verdict": "fits" }),
            Compared::Differs(why) => json!({ "verdict": "differs", "why": why }),
            Compared::Unknown(why) => json!({ "verdict": "unknown", "why": why }),
        },
    }
}

/// The record of a recording's header.
pub fn recording(header: &RecordingHeader) -> Record {
    let side = match header.side {
        RecordingSide::Source => "source",
        RecordingSide::Destination => "destination",
    };
    let direction = match header.direction {
        Direction::ToDestination => "to-destination",
        Direction::ToSource => "to-source",
    };
    let fields = json!({
        "recorded_by": side, "direction": direction, "connection": header.connection,
        "at": header.at,
    });
    Record::new(0, RECORDING_HEADER_BYTES as u64, "recording", fields)
}

/// The fields of a greeting.
pub fn hello(hello: &Hello) -> Value {
    let mut fields = json!({
        "role": match hello.role {
            Role::Control => "control".to_owned(),
            Role::Data => "data".to_owned(),
            Role::Query => "query".to_owned(),
            Role::Resume => "resumed-control".to_owned(),
            Role::Probe => "probe".to_owned(),
            Role::Stream => "stream".to_owned(),
            Role::Other(number) => format!("role {number}"),
        },
        "versions": [hello.version_min, hello.version_max],
    });
    if hello.role == Role::Data {
        fields["lane"] = json!(hello.lane);
    }
    if matches!(hello.role, Role::Data | Role::Resume) {
        fields["attempt"] = json!(hello.attempt);
    }
    fields
}

/// The fields of the reply to a greeting.
pub fn reply(reply: &HelloReply) -> Value {
    let status = match reply.status {
        HelloStatus::Ok => "ok".to_owned(),
        HelloStatus::Version => "no-common-version".to_owned(),
        HelloStatus::Busy => "busy".to_owned(),
        HelloStatus::BadToken => "bad-token".to_owned(),
        HelloStatus::BadLane => "bad-lane".to_owned(),
        HelloStatus::Refused => "refused".to_owned(),
        HelloStatus::TooLate => "too-late".to_owned(),
        HelloStatus::NoReceiver => "no-receiver".to_owned(),
        HelloStatus::Other(number) => format!("status {number}"),
    };
    json!({
        "status": status, "versions": [reply.version_min, reply.version_max],
        "version": reply.version, "placed": reply.placed,
    })
}

/// The fields of a control message.
pub fn control(message: &ControlMessage) -> Value {
    let reason = |reason: &Reason| json!({ "code": u16::from(reason.code), "text": reason.text });
    match message {
        ControlMessage::Begin {
            session,
            guest,
            vmm,
            config,
            layout,
            lanes,
            verify,
            reconnect_ms,
            release,
            streams,
            fetch_lanes,
            witness,
            ..
        } => {
            let pages = layout.iter().fold(0_u64, |sum, slot| sum.saturating_add(slot.pages));
            let mut begin = json!({
                "session": session, "guest": guest.name, "uuid": guest.uuid, "vmm": vmm,
                "config_bytes": config.len(), "slots": layout.len(), "pages": pages,
                "lanes": lanes, "verify": verify, "reconnect_ms": reconnect_ms,
                "release": release, "streams": streams,
            });
            if let Some(FetchLanes { faults, background }) = fetch_lanes {
                begin["fetch_lanes"] = json!({ "faults": faults, "background": background });
            }
            if let Some(witness) = witness {
                begin["witness"] = json!(witness);
            }
            begin
        }
        ControlMessage::Accept {
            release, verifies_placed, post_copy, compares_storage, ..
        } => {
            let mut accept = json!({ "token": "(secret)", "release": release });
            if *verifies_placed {
                accept["verifies_placed"] = true.into();
            }
            if *compares_storage {
                accept["compares_storage"] = true.into();
            }
            match post_copy {
                Some(Ok(())) => accept["post_copy"] = true.into(),
                Some(Err(why)) => accept["no_post_copy"] = why.as_str().into(),
                None => {}
            }
            accept
        }
        ControlMessage::Refuse { reason: why, .. } | ControlMessage::Abort { reason: why } => {
            reason(why)
        }
        ControlMessage::Placed { lane, sequence } => json!({ "lane": lane, "sequence": sequence }),
        ControlMessage::Final { lane_sequences, digest, state, kind, storage_sample, .. } => {
            let mut last = json!({
                "lane_sequences": lane_sequences, "digest": hex(*digest),
                "state_bytes": state.len(), "state_sections": sections(state),
            });
            if *kind == SessionKind::PostCopy {
                last["post_copy"] = true.into();
            }
            if !storage_sample.is_empty() {
                last["storage_sample_bytes"] = storage_sample.len().into();
            }
            last
        }
        ControlMessage::Ready { digest, load_us, .. } => {
            json!({ "digest": hex(*digest), "load_us": load_us })
        }
        ControlMessage::Verified { hash, pages, elapsed_us, .. } => {
            json!({ "hash": hex(*hash), "pages": pages, "elapsed_us": elapsed_us })
        }
        ControlMessage::Running { session, start_us, .. } => {
            json!({ "session": session, "start_us": start_us })
        }
        ControlMessage::Aborted { session, reason: why, .. } => {
            json!({ "session": session, "code": u16::from(why.code), "text": why.text })
        }
        ControlMessage::Commit { session } => json!({ "session": session }),
        ControlMessage::Query { session, offer } => {
            let mut query = json!({ "session": session });
            if let Some(LaneOffer { first, lanes, streams }) = offer {
                query["offer"] = json!({
                    "first": first, "faults": lanes.faults, "background": lanes.background,
                });
                if let Some(LateStreamsId(number)) = streams {
                    query["offer"]["streams"] = json!(number);
                }
            }
            query
        }
        ControlMessage::Ping { nonce, .. } | ControlMessage::Pong { nonce, .. } => {
            json!({ "nonce": nonce })
        }
        ControlMessage::Answer { session, word, token } => {
            let mut answer = json!({ "session": session, "word": word });
            if let Some(LaneToken { streams, .. }) = token {
                answer["token"] = json!("(secret)");
                if let Some(LateStreamsId(number)) = streams {
                    answer["streams"] = json!(number);
                }
            }
            answer
        }
        ControlMessage::Free { slot, runs, .. } => {
            let pages = runs.iter().fold(0_u64, |sum, (_, pages)| sum.saturating_add(*pages));
            json!({ "slot": slot.0, "runs": runs.len(), "pages": pages })
        }
        ControlMessage::Lacking { slot, first, bits } => {
            let pages: u64 = bits.iter().map(|byte| u64::from(byte.count_ones())).sum();
            json!({ "slot": slot.0, "first": first, "pages": pages })
        }
        ControlMessage::Verify { .. } | ControlMessage::Withdraw { .. } => json!({}),
    }
}

/// Whether only the source sends this message (`true`) or only the destination (`false`). `None` if
/// both do.
pub fn is_of_source(message: &ControlMessage) -> Option<bool> {
    Some(match message {
        ControlMessage::Ping { .. } | ControlMessage::Pong { .. } => return None,
        ControlMessage::Begin { .. }
        | ControlMessage::Final { .. }
        | ControlMessage::Verify { .. }
        | ControlMessage::Commit { .. }
        | ControlMessage::Abort { .. }
        | ControlMessage::Query { .. }
        | ControlMessage::Withdraw { .. }
        | ControlMessage::Free { .. }
        | ControlMessage::Lacking { .. } => true,
        _ => false,
    })
}

/// Formats a number that is only compared, such as a hash.
pub fn hex(number: u64) -> String {
    format!("{number:#018x}")
}

/// The number of sections in a microvm's state. `null` for other VMMs.
fn sections(state: &[u8]) -> Value {
    if !state.starts_with(b"VMFSTATE") {
        return Value::Null;
    }
    match StateReader::parse(state) {
        Ok(reader) => json!(reader.sections().len()),
        Err(error) => json!(error.to_string()),
    }
}
