//! The source's channels: connecting them, and the thread that reads the control channel.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use vmferry_transport::{Channel, ChannelCloser, ChannelReader, ChannelWriter, Dialer};
use vmferry_wire::{ControlMessage, LaneOffer, Role, SessionId};

use crate::config::Timeouts;
use crate::data::source::lane::SourceLane;
use crate::driver::greeting::{Purpose, greet};
use crate::error::MigrateError;
use crate::link::{ControlReader, ControlWriter, DataChannel, Speaker};
use crate::machine::source::io::Input;

/// A greeted control channel.
pub struct ControlChannel {
    /// The sending half.
    pub writer: ControlWriter<ChannelWriter>,
    /// Closes it from any thread.
    pub closer: ChannelCloser,
    /// The receiving half.
    pub reader: ControlReader<ChannelReader>,
    /// The names in the peer's certificate.
    pub peer_names: Vec<String>,
    /// The kind of link, such as `tls 127.0.0.1:7001`.
    pub transport: String,
    /// The negotiated protocol version.
    pub version: u16,
}

/// Dials and greets a control or query channel, or reestablishes a control channel.
///
/// # Errors
/// The transport's error, or the destination's refusal.
pub fn control(
    dialer: &Dialer,
    purpose: Purpose,
    versions: &RangeInclusive<u16>,
    silence: Duration,
) -> Result<ControlChannel, MigrateError> {
    let (channel, peer_names, transport) = dial(dialer)?;
    let closer = channel.closer();
    let (mut reader, mut writer) = channel.split();
    bound(&mut reader, &mut writer, silence)?;
    let version = greet(&mut reader, &mut writer, purpose, versions, &transport)?.version;
    // From here on the machine checks for silence, so reads have no timeout.
    reader.set_timeout(None)?;
    Ok(ControlChannel {
        writer: ControlWriter::new(writer, version),
        closer,
        reader: ControlReader::new(reader, version, Speaker::Destination),
        peer_names,
        transport,
        version,
    })
}

/// A lane's channel, and where the lane continues on it.
pub struct JoinedLane {
    /// The channel.
    pub channel: DataChannel,
    /// The destination has placed all frames of the lane up to this one.
    pub placed: u64,
}

/// Dials and greets one data channel.
///
/// # Errors
/// As [`control`].
pub fn data(
    dialer: &Dialer,
    purpose: Purpose,
    versions: &RangeInclusive<u16>,
    timeouts: &Timeouts,
) -> Result<JoinedLane, MigrateError> {
    let (channel, _, transport) = dial(dialer)?;
    let closer = channel.closer();
    let (mut reader, mut writer) = channel.split();
    bound(&mut reader, &mut writer, timeouts.silence)?;
    let placed = greet(&mut reader, &mut writer, purpose, versions, &transport)?.placed;
    writer.set_timeout(Some(timeouts.stall))?;
    Ok(JoinedLane { channel: DataChannel { reader, writer, closer }, placed })
}

fn dial(dialer: &Dialer) -> Result<(Channel, Vec<String>, String), MigrateError> {
    let channel = dialer.connect()?;
    let peer = channel.peer();
    let names = peer.names.clone();
    let transport = dialer.address.to_string();
    Ok((channel, names, transport))
}

fn bound(
    reader: &mut ChannelReader,
    writer: &mut ChannelWriter,
    silence: Duration,
) -> Result<(), MigrateError> {
    reader.set_timeout(Some(silence))?;
    writer.set_timeout(Some(silence))?;
    Ok(())
}

/// An input and the number of the control channel that it came from: inputs of an old channel are
/// ignored.
pub struct FromLink {
    /// The number of the channel.
    pub link: u64,
    /// The input.
    pub input: Input,
}

/// Interval of acknowledgements that are forwarded to the conductor while frames are outstanding.
/// The conductor only needs to see progress, and waking it for each acknowledgement costs as much
/// as freeing the frames.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(20);

/// Messages that the conductor has not processed yet, of which the longest has some 20 KB. When the
/// queue is full the channel's reader waits, and eventually the destination. While the conductor is
/// busy for seconds only keepalives and progress arrive; half of the queue is reserved for messages
/// that must not be dropped.
pub const MOST_HEARD: usize = 256;

/// Reads the control channel until it ends. Acknowledgements free the lanes' windows at once. The
/// conductor receives those that leave no frame outstanding on their lane, and some of the others.
pub fn read_control(
    mut reader: ControlReader<ChannelReader>,
    link: u64,
    lanes: &[Arc<SourceLane>],
    inputs: &Sender<FromLink>,
) {
    let mut told = Instant::now();
    loop {
        let (input, last) = match reader.receive("waiting for the destination") {
            Ok(message) => {
                if !reader.ignored().is_empty() {
                    let fields = reader.ignored().to_vec();
                    let input = Input::UnknownFields { message: message.name(), fields };
                    let _ = inputs.send(FromLink { link, input });
                }
                if let ControlMessage::Placed { lane, sequence } = message
                    && let Some(lane) = lanes.get(usize::from(lane))
                {
                    let none_is_out = lane.acknowledge(sequence);
                    let crowded = inputs.len() >= MOST_HEARD / 2;
                    if !none_is_out && (crowded || told.elapsed() < PROGRESS_INTERVAL) {
                        continue;
                    }
                    told = Instant::now();
                }
                (Input::Control(message), false)
            }
            Err(error @ MigrateError::Protocol { .. }) => (Input::Failed(error), true),
            Err(error) => (Input::LinkLost(error), true),
        };
        if inputs.send(FromLink { link, input }).is_err() || last {
            return;
        }
    }
}

/// Waits, unless `stop` ends first. Returns whether the time has passed.
pub fn wait(delay: Duration, stop: &Receiver<()>) -> bool {
    stop.recv_timeout(delay) == Err(crossbeam_channel::RecvTimeoutError::Timeout)
}

/// Sends a query on a new channel.
///
/// # Errors
/// The transport's error, or the destination's refusal.
pub fn ask(
    dialer: &Dialer,
    (session, offer): (SessionId, Option<LaneOffer>),
    versions: &RangeInclusive<u16>,
    silence: Duration,
) -> Result<ControlChannel, MigrateError> {
    let channel = control(dialer, Purpose::control(Role::Query), versions, silence)?;
    channel
        .writer
        .send(&ControlMessage::Query { session, offer })
        .map_err(|error| crate::link::lost("query", "asking for the session's word", &error))?;
    Ok(channel)
}
