//! The source's channels: making them, and the thread that reads the control channel.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use vmferry_transport::{Channel, ChannelCloser, ChannelReader, ChannelWriter, Dialer};
use vmferry_wire::{ControlMessage, Role, SessionId};

use super::io::Input;
use super::window::Window;
use crate::config::Timeouts;
use crate::error::MigrateError;
use crate::greeting::{Purpose, greet};
use crate::link::{ControlReader, ControlWriter, Speaker};
use vmferry_codec::EncodedFrame;

/// A greeted control channel.
pub struct ControlChannel {
    /// What is sent on it.
    pub writer: ControlWriter<ChannelWriter>,
    /// Closes it from any thread.
    pub closer: ChannelCloser,
    /// What is read from it.
    pub reader: ControlReader<ChannelReader>,
    /// The names in the peer's certificate.
    pub peer_names: Vec<String>,
    /// Such as `tls 127.0.0.1:7001`.
    pub transport: String,
    /// The version of the protocol that was agreed on.
    pub version: u16,
}

/// Dials and greets a control or query channel, or a control channel anew.
///
/// # Errors
/// The transport's, or the destination's refusal.
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
    // From here on the machine watches the silence; a reader may wait for ever.
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

/// A greeted data channel.
pub struct DataChannel {
    /// What is sent on it.
    pub writer: ChannelWriter,
    /// Kept open until the end: a data channel closed early would look like a lost link.
    pub reader: ChannelReader,
    /// Closes it from any thread.
    pub closer: ChannelCloser,
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
) -> Result<DataChannel, MigrateError> {
    let (channel, _, transport) = dial(dialer)?;
    let closer = channel.closer();
    let (mut reader, mut writer) = channel.split();
    bound(&mut reader, &mut writer, timeouts.silence)?;
    let placed = greet(&mut reader, &mut writer, purpose, versions, &transport)?.placed;
    writer.set_timeout(Some(timeouts.stall))?;
    Ok(DataChannel { writer, reader, closer, placed })
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

/// An input and the number of the control channel that it came from: what an old channel still
/// says is not heard.
pub struct FromLink {
    /// The channel's number.
    pub link: u64,
    /// What it brought.
    pub input: Input,
}

/// Between two acknowledgements of which the conductor hears while frames are out. It only wants to know that there is
/// progress, and to wake it for each costs as much as to free the frames.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(20);

/// Messages that the conductor has not taken yet, of which the longest has some 20 KB. The reader
/// of the channel waits then, and at last the destination. While the conductor is busy for seconds
/// nothing comes but signs of life and progress, of which half is left for what must be told.
pub const MOST_HEARD: usize = 256;

/// Reads the control channel until it ends. Acknowledgements free the lanes' windows at once. The conductor hears of
/// those that leave nothing out on their lane, and of some of the others.
pub fn read_control(
    mut reader: ControlReader<ChannelReader>,
    link: u64,
    windows: &[Arc<Window<EncodedFrame>>],
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
                    && let Some(window) = windows.get(usize::from(lane))
                {
                    let none_is_out = window.placed(sequence);
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

/// Waits, unless `stop` ends before; whether it has not.
pub fn wait(delay: Duration, stop: &Receiver<()>) -> bool {
    stop.recv_timeout(delay) == Err(crossbeam_channel::RecvTimeoutError::Timeout)
}

/// Asks on a new channel.
///
/// # Errors
/// The transport's, or the destination's refusal.
pub fn ask(
    dialer: &Dialer,
    session: SessionId,
    versions: &RangeInclusive<u16>,
    silence: Duration,
) -> Result<ControlChannel, MigrateError> {
    let channel = control(dialer, Purpose::control(Role::Query), versions, silence)?;
    channel
        .writer
        .send(&ControlMessage::Query { session })
        .map_err(|error| crate::link::lost("query", "asking for the session's word", &error))?;
    Ok(channel)
}
