//! Decodes control channels.

use std::io::Read;

use serde_json::json;
use vmferry_microvm::state::StateReader;
use vmferry_transport::{Direction, RecordingHeader};
use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlHeader, ControlMessage, Decoded, HELLO_BYTES, HELLO_REPLY_BYTES,
    Hello, HelloReply, LaneOffer, LaneToken, PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN,
    ProbeHeader, Role,
};

use crate::bytes::{Bytes, Stop};
use crate::fetch::is_request;
use crate::record::Record;
use crate::{Inspector, Tell, message};

impl Inspector {
    /// Decodes what the source sent on a channel. The greeting gives the kind of channel.
    pub(crate) fn read_from_source<R: Read>(
        &mut self,
        header: &RecordingHeader,
        bytes: &mut Bytes<R>,
        tell: &mut Tell<'_>,
    ) -> Result<(), Stop> {
        let offset = bytes.offset();
        let hello = Hello::parse(&bytes.array::<HELLO_BYTES>("the source's greeting")?)
            .map_err(|error| broken(offset, "the source's greeting", &error))?;
        let fields = message::hello(&hello);
        tell(&Record::new(offset, HELLO_BYTES as u64, "hello", fields))?;
        match hello.role {
            Role::Data => return self.data(header, &hello, bytes, tell),
            Role::Resume => self.sessions.join(header, hello.token),
            Role::Control | Role::Query | Role::Probe => {}
            // Links of streams are not recorded.
            Role::Stream | Role::Other(_) => {
                let problem = format!("unknown role {}", u8::from(hello.role));
                let what = "the source's greeting".into();
                return Err(Stop::Broken { offset: offset + 12, what, problem });
            }
        }
        self.messages(header, bytes, tell)
    }

    /// Decodes what the destination sent on a channel: the reply to the greeting, then messages on
    /// a control channel and requests on a fetch lane.
    pub(crate) fn read_from_destination<R: Read>(
        &mut self,
        header: &RecordingHeader,
        bytes: &mut Bytes<R>,
        tell: &mut Tell<'_>,
    ) -> Result<(), Stop> {
        let offset = bytes.offset();
        let reply =
            HelloReply::parse(&bytes.array::<HELLO_REPLY_BYTES>("the reply to the greeting")?)
                .map_err(|error| broken(offset, "the reply to the greeting", &error))?;
        let fields = message::reply(&reply);
        tell(&Record::new(offset, HELLO_REPLY_BYTES as u64, "reply", fields))?;
        if self.sessions.fetch_channel(header).is_some() || is_request(bytes.peek(8)?) {
            return self.requests(header, bytes, tell);
        }
        self.messages(header, bytes, tell)
    }

    fn messages<R: Read>(
        &mut self,
        header: &RecordingHeader,
        bytes: &mut Bytes<R>,
        tell: &mut Tell<'_>,
    ) -> Result<(), Stop> {
        let mut begun = false;
        while !bytes.is_at_end()? {
            let offset = bytes.offset();
            let what = "the header of a message";
            let head = bytes.array::<CONTROL_HEADER_BYTES>(what)?;
            if let Ok(head) = ProbeHeader::parse(&head) {
                let body = bytes.take(head.body_bytes(), "a message", offset)?;
                let message = head
                    .decode(&body)
                    .map_err(|error| broken(offset, "a message of a probe", &error))?;
                let length = bytes.offset() - offset;
                tell(&Record::new(offset, length, message.name(), message::probe(&message)))?;
                continue;
            }
            let head = ControlHeader::parse(&head).map_err(|error| broken(offset, what, &error))?;
            let body = bytes.take(head.body_bytes(), "a message", offset)?;
            // Messages differ between versions only by their fields.
            let Decoded { message, ignored } =
                head.decode(PROTOCOL_VERSION_MAX, &body).map_err(|error| {
                    broken(offset + CONTROL_HEADER_BYTES as u64, "a message", &error)
                })?;
            let wrong =
                |problem: String| Stop::Broken { offset, what: message.name().into(), problem };
            let from_source = header.direction == Direction::ToDestination;
            if message::is_of_source(&message).is_some_and(|side| side != from_source) {
                let side = if from_source { "source" } else { "destination" };
                return Err(wrong(format!("the {side} must not send it")));
            }
            if matches!(message, ControlMessage::Begin { .. })
                && std::mem::replace(&mut begun, true)
            {
                return Err(wrong("this channel already has a BEGIN".into()));
            }
            self.note(header, &message);
            let length = bytes.offset() - offset;
            let mut fields = message::control(&message);
            if !ignored.is_empty() {
                fields["unknown_fields"] = json!(ignored);
            }
            tell(&Record::new(offset, length, message.name(), fields))?;
            if let ControlMessage::Final { state, .. } = &message {
                // Fields follow the state, except in version 1, which has none.
                let mut without_fields = Vec::new();
                message.encode(PROTOCOL_VERSION_MIN, &mut without_fields);
                let at = offset + (without_fields.len() - state.len()) as u64;
                self.final_state(at, state, tell)?;
            }
        }
        Ok(())
    }

    /// Reports the sections of the state in FINAL, if a vmferry microvm saved it.
    fn final_state(&self, at: u64, state: &[u8], tell: &mut Tell<'_>) -> Result<(), Stop> {
        if !state.starts_with(b"VMFSTATE") {
            return Ok(());
        }
        let reader =
            StateReader::parse(state).map_err(|error| broken(at, "the state in FINAL", &error))?;
        if self.runs {
            for section in reader.sections() {
                let bytes = section.payload().len() as u64;
                let fields = json!({
                    "name": section.name(), "instance": section.instance(),
                    "version": section.version(),
                });
                tell(&Record::new(at + section.offset() as u64, bytes, "section", fields))?;
            }
        }
        Ok(())
    }

    /// Remembers what a message says about the session's other channels.
    fn note(&mut self, header: &RecordingHeader, message: &ControlMessage) {
        match message {
            ControlMessage::Begin { session, layout, lanes, fetch_lanes, .. } => {
                let known = self.sessions.of_connection(header);
                known.id = Some(*session);
                known.announced = Some((layout.clone(), *lanes));
                known.first_fetch_lane = fetch_lanes.map(|_| *lanes);
            }
            ControlMessage::Query { session, offer } => {
                let known = self.sessions.of_question(header, *session);
                if let Some(LaneOffer { first, .. }) = offer {
                    known.first_fetch_lane = Some(*first);
                }
            }
            ControlMessage::Accept { token, .. }
            | ControlMessage::Answer { token: Some(LaneToken { token, .. }), .. } => {
                self.sessions.join(header, *token)
            }
            ControlMessage::Placed { lane, sequence, .. } => {
                let lane = self.sessions.of_connection(header).lanes.entry(*lane).or_default();
                lane.placed = lane.placed.max(*sequence);
            }
            ControlMessage::Final { lane_sequences, .. } => {
                self.sessions.of_connection(header).last = Some(lane_sequences.clone());
            }
            ControlMessage::Withdraw { .. } => self.sessions.of_connection(header).last = None,
            _ => {}
        }
    }
}

/// Makes a [`Stop`] from a decoder's error.
pub fn broken(offset: u64, what: &str, error: &(impl std::error::Error + 'static)) -> Stop {
    Stop::Broken { offset, what: what.into(), problem: vmferry::chain(error) }
}
