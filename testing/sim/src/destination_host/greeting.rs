//! New channels of the destination: their greetings, and queries of a source in doubt.

use std::time::Duration;

use vmferry::link::{ControlReader, Speaker, channel_name, lost};
use vmferry::machine::destination::io::{Input, LinkId};
use vmferry_handover::DestinationState;
use vmferry_handover::journal::{Journal, Record, recover_destination};
use vmferry_wire::{
    ControlMessage, HELLO_BYTES, Hello, HelloReply, HelloStatus, PROTOCOL_VERSION_MIN, Role,
    SessionId, SessionWord, common_version,
};

use super::DestinationHost;
use crate::host::Host;
use crate::network::{ChannelId, Event, Network};
use crate::plan::Sabotage;

impl DestinationHost {
    /// Reads the greeting of a new channel.
    pub(super) fn greet(&mut self, channel: ChannelId, bytes: &[u8], network: &mut Network) {
        let hello = <&[u8; HELLO_BYTES]>::try_from(bytes).ok().and_then(|b| Hello::parse(b).ok());
        let Some(hello) = hello else { return network.close(channel, Host::Destination) };
        let (version_min, version_max) = (PROTOCOL_VERSION_MIN, network.protocol);
        let common = common_version(&(version_min..=version_max), &hello.versions());
        // A greeting that was damaged in transit may contain anything.
        let Some(version) = common.filter(|version| *version == network.protocol) else {
            return network.close(channel, Host::Destination);
        };
        let answer = match (hello.role, &mut self.session) {
            (Role::Query, _) => {
                self.queries.push(channel);
                Ok(0)
            }
            (Role::Data, Some(session)) => session.join(channel, &hello, network),
            (Role::Resume, Some(session)) => match session.resume(channel, &hello, network) {
                HelloStatus::Ok => Ok(0),
                status => Err(status),
            },
            (Role::Data | Role::Resume, None) => Err(HelloStatus::BadToken),
            (Role::Control, Some(session)) if session.machine.is_waiting_for_source() => {
                // Later messages would belong to a session of their own.
                network.close(channel, Host::Destination);
                return self.tell(Input::Superseded, network);
            }
            _ => Err(HelloStatus::Busy),
        };
        let (status, placed) = match answer {
            Ok(placed) => (HelloStatus::Ok, placed),
            Err(status) => (status, 0),
        };
        let reply = HelloReply { status, version_min, version_max, version, placed };
        let sent = network.send(channel, Host::Source, "greeting", reply.encode().to_vec());
        if status != HelloStatus::Ok {
            network.close(channel, Host::Destination);
            return;
        }
        self.greeted(channel, &hello, sent, network);
    }

    /// Adds a channel to this session.
    fn greeted(&mut self, channel: ChannelId, hello: &Hello, sent: bool, network: &mut Network) {
        let broken = std::io::ErrorKind::BrokenPipe.into();
        let Some(session) = &mut self.session else { return };
        match hello.role {
            Role::Data if sent => {
                session.begin_lane(hello.lane, network);
                self.tell(Input::LaneJoined { lane: hello.lane }, network);
            }
            Role::Data => {
                let error = lost(&channel_name(Some(hello.lane)), "the greeting", &broken);
                let lost = session
                    .fetch_lane_lost(hello.lane, network)
                    .or_else(|| session.lane_lost(hello.lane, error, network));
                if let Some(input) = lost {
                    self.tell(input, network);
                }
            }
            Role::Resume if sent => {
                session.acknowledge(network);
                let keeps = session.sabotage == Some(Sabotage::KeepFinal);
                let heard = session.heard_final.take().filter(|_| keeps);
                self.tell(Input::Resumed, network);
                if let Some(message) = heard {
                    self.tell(Input::Control { link: LinkId::CONTROL, message }, network);
                }
            }
            Role::Resume => {
                network.close(channel, Host::Destination);
                self.tell(Input::LinkLost(lost("control", "the greeting", &broken)), network);
            }
            _ => {}
        }
    }

    /// Answers a query of a source in doubt.
    pub(super) fn asked(&mut self, channel: ChannelId, bytes: &[u8], network: &mut Network) {
        let asked = ControlReader::new(bytes, network.protocol, Speaker::Asker)
            .receive("a question about a session");
        let Ok(ControlMessage::Query { session, offer }) = asked else {
            return network.close(channel, Host::Destination);
        };
        if let Some(live) = &mut self.session
            && live.machine.session() == Some(session)
        {
            let link = LinkId(live.links.keys().map(|link| link.0).max().unwrap_or(0) + 1);
            live.links.insert(link, channel);
            let message = ControlMessage::Query { session, offer };
            return self.tell(Input::Control { link, message }, network);
        }
        if let Some(word) = self.recovered_word(session, network) {
            network.note(|| format!("destination: its journal says {word:?}"));
            let answer = ControlMessage::Answer { session, word, token: None };
            network.say(channel, Host::Source, &answer);
        }
        network.close(channel, Host::Destination);
    }

    /// Does for simulated disks what `vmferry_handover::journal::recovered_word` does with files.
    pub(super) fn recovered_word(
        &mut self,
        session: SessionId,
        network: &mut Network,
    ) -> Option<SessionWord> {
        let (mut journal, records) = match self.disk.reopen(session) {
            Ok(Some(found)) => found,
            Ok(None) => return Some(SessionWord::Unknown),
            Err(error) => panic!("the simulated disk never damages a whole line: {error}"),
        };
        match recover_destination(&records) {
            None => Some(SessionWord::Unknown),
            Some((DestinationState::AbortWriting, _)) => {
                let reason = "the destination was restarted".to_owned();
                let written = journal.append(&Record::Aborted { reason });
                if self.disk.takes_the_process_along() {
                    self.crash(network);
                    network.after(Duration::from_secs(3), Event::Restart(Host::Destination));
                }
                written.is_ok().then_some(SessionWord::Aborted)
            }
            Some((state, _)) => Some(state.word()),
        }
    }
}
