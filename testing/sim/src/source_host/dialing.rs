//! The source's attempts to reach the destination: to query it, to resume its session, to reconnect
//! a lane.

use std::time::Duration;

use vmferry::MigrateError;
use vmferry::link::lost;
use vmferry::machine::source::io::Input;
use vmferry_wire::{
    ControlMessage, HELLO_REPLY_BYTES, HelloReply, HelloStatus, Reason, ReasonCode, Role,
    SessionWord, Token,
};

use super::{Process, SourceHost};
use crate::dial::Dial;
use crate::host::Host;
use crate::network::{ChannelId, Event, Network};

/// Timeout for the answer of a dialed host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// An attempt that waits for its time or for its answer.
pub(super) struct Dialing {
    dial: Dial,
    pub(super) channel: Option<ChannelId>,
}

impl Process {
    /// Dials after a delay, and gives up the previous attempt for the same channel.
    pub(super) fn dial(
        &mut self,
        role: Role,
        lane: u8,
        (token, attempt): (Token, u64),
        delay: Duration,
        network: &mut Network,
    ) {
        self.dials += 1;
        let dial = Dial { role, lane, token, attempt, number: self.dials };
        let (replaced, others) =
            self.dialing.drain(..).partition(|known| dial.replaces(&known.dial));
        self.dialing = others;
        for channel in replaced.into_iter().filter_map(|replaced: Dialing| replaced.channel) {
            network.close(channel, Host::Source);
        }
        self.dialing.push(Dialing { dial, channel: None });
        network.after(delay, Event::Dial { process: self.number, dial });
    }

    fn take_dialing(&mut self, wanted: impl Fn(&Dialing) -> bool) -> Option<Dialing> {
        let at = self.dialing.iter().position(wanted)?;
        Some(self.dialing.swap_remove(at))
    }

    /// The channel that is being dialed has ended.
    pub(super) fn dialed_in_vain(&mut self, channel: ChannelId) -> Option<Input> {
        let dialing = self.take_dialing(|known| known.channel == Some(channel))?;
        let end = std::io::ErrorKind::UnexpectedEof.into();
        Some(self.not_dialed(&dialing.dial, lost("dialed", "the greeting", &end)))
    }

    /// Whether the answer to a greeting is awaited on a channel.
    pub(super) fn is_dialing(&self, channel: ChannelId) -> bool {
        self.dialing.iter().any(|known| known.channel == Some(channel))
    }

    /// The answer has come.
    pub(super) fn dialed(
        &mut self,
        channel: ChannelId,
        bytes: &[u8],
        network: &mut Network,
    ) -> Vec<Input> {
        let Some(Dialing { dial, .. }) = self.take_dialing(|known| known.channel == Some(channel))
        else {
            return Vec::new();
        };
        let placed = match greeted(bytes) {
            Ok(placed) => placed,
            Err(error) => {
                network.close(channel, Host::Source);
                return vec![self.not_dialed(&dial, error)];
            }
        };
        match dial.role {
            Role::Data if dial.lane >= self.channels => {
                self.join_fetch_lane((dial.lane, dial.attempt), channel, network)
            }
            Role::Data => vec![self.rejoin(dial.lane, dial.attempt, channel, placed, network)],
            Role::Resume => {
                self.control = Some(channel);
                vec![Input::Resumed]
            }
            _ => {
                self.control = Some(channel);
                let (session, offer) = (self.session, self.offer);
                let message = ControlMessage::Query { session, offer };
                let broken = std::io::ErrorKind::BrokenPipe.into();
                if network.say(channel, Host::Destination, &message) {
                    return Vec::new();
                }
                vec![Input::LinkLost(lost("query", "asking", &broken))]
            }
        }
    }
}

impl SourceHost {
    /// Dials the destination.
    pub fn dial(
        &mut self,
        number: u64,
        dial: Dial,
        destination_listens: bool,
        network: &mut Network,
    ) {
        let session = self.config.session;
        let silence = self.config.timeouts.silence;
        let Some(process) = self.process.as_mut().filter(|_| number == self.number) else { return };
        let Some(dialing) = process.dialing.iter_mut().find(|known| known.dial == dial) else {
            return;
        };
        let (wait, error) = if network.is_stranger() {
            let wait = Duration::from_millis(2);
            if dial.role == Role::Query {
                process.dialing.retain(|known| known.dial != dial);
                let word = SessionWord::Unknown;
                let message = ControlMessage::Answer { session, word, token: None };
                let input = Input::Control(self.sabotaged(message));
                return network.after(wait, Event::Source(number, input));
            }
            (wait, refused(HelloStatus::BadToken))
        } else if network.is_away() {
            let refused = std::io::ErrorKind::ConnectionRefused.into();
            (Duration::from_millis(1), lost("dialed", "the connection", &refused))
        } else if !network.reaches() || !destination_listens {
            let wait = if network.reaches() { Duration::from_millis(1) } else { CONNECT_TIMEOUT };
            (wait, MigrateError::TimedOut { what: "a connection", after: CONNECT_TIMEOUT })
        } else {
            let channel = network.open();
            dialing.channel = Some(channel);
            network.send(channel, Host::Destination, "greeting", dial.hello());
            (silence, MigrateError::TimedOut { what: "the answer to a greeting", after: silence })
        };
        network.after(wait, Event::DialFailed { process: number, dial, error });
    }

    /// Nothing has come of it, unless something has.
    pub fn dial_failed(
        &mut self,
        number: u64,
        dial: Dial,
        error: MigrateError,
        network: &mut Network,
    ) {
        let Some(process) = self.process.as_mut().filter(|_| number == self.number) else { return };
        let Some(dialing) = process.take_dialing(|known| known.dial == dial) else { return };
        if let Some(channel) = dialing.channel {
            network.close(channel, Host::Source);
        }
        let failed = process.not_dialed(&dial, error);
        self.tell(failed, network);
    }
}

/// The greeting of a channel that was not dialed before.
pub(super) fn hello(role: Role, lane: u8, token: Token) -> Vec<u8> {
    Dial { role, lane, token, attempt: 0, number: 0 }.hello()
}

/// Parses the destination's answer to a greeting, and returns the lane's last placed frame.
pub(super) fn greeted(bytes: &[u8]) -> Result<u64, MigrateError> {
    let end = std::io::ErrorKind::UnexpectedEof.into();
    let bytes: &[u8; HELLO_REPLY_BYTES] =
        bytes.try_into().map_err(|_| lost("dialed", "the greeting", &end))?;
    let reply = HelloReply::parse(bytes).map_err(|error| MigrateError::Protocol {
        channel: "greeting".into(),
        offset: 0,
        reason: error.to_string(),
    })?;
    match reply.status {
        HelloStatus::Ok => Ok(reply.placed),
        status => Err(refused(status)),
    }
}

fn refused(status: HelloStatus) -> MigrateError {
    let reason = Reason::new(ReasonCode::Unauthorized, &format!("it answers {status:?}"));
    MigrateError::Refused { peer: "destination", reason }
}
