//! The source's control channel: the one that the migration began on, and those on which a source in
//! doubt asks for the destination's word.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use vmferry_transport::{ChannelCloser, ChannelWriter, Dialer};
use vmferry_wire::{ControlMessage, SessionId};

use super::connect::{self, ControlChannel, FromLink};
use super::io::Input;
use super::window::Window;
use crate::config::SourceConfig;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::ControlWriter;
use vmferry_codec::EncodedFrame;

/// How long a finished migration waits for the destination to hear its last message and hang up.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The channel in use, and the threads that read it and that ask for another one.
pub struct ControlLink {
    dialer: Dialer,
    session: SessionId,
    silence: Duration,
    /// The lanes' windows, which acknowledgements free.
    windows: Vec<Arc<Window<EncodedFrame>>>,
    cpu: CpuMeter,
    channel: Option<(ControlWriter<ChannelWriter>, ChannelCloser)>,
    /// The number of the channel in use: what an old one still says is not heard.
    number: u64,
    heard: (Sender<FromLink>, Receiver<FromLink>),
    asking: Option<Sender<()>>,
    asked: (Sender<Asked>, Receiver<Asked>),
}

/// What came of a question.
pub struct Asked {
    link: u64,
    channel: Result<ControlChannel, MigrateError>,
}

impl ControlLink {
    /// No channel yet.
    pub fn new(
        dialer: &Dialer,
        config: &SourceConfig,
        windows: Vec<Arc<Window<EncodedFrame>>>,
        cpu: CpuMeter,
    ) -> Self {
        Self {
            dialer: dialer.clone(),
            session: config.session,
            silence: config.timeouts.silence,
            windows,
            cpu,
            channel: None,
            number: 0,
            heard: crossbeam_channel::unbounded(),
            asking: None,
            asked: crossbeam_channel::unbounded(),
        }
    }

    /// What channels bring; for [`take_heard`](Self::take_heard).
    pub fn heard(&self) -> &Receiver<FromLink> {
        &self.heard.1
    }

    /// What came of questions; for [`take_asked`](Self::take_asked).
    pub fn asked(&self) -> &Receiver<Asked> {
        &self.asked.1
    }

    /// What the channel in use has brought.
    pub fn take_heard(&self, from: FromLink) -> Input {
        if from.link == self.number { from.input } else { Input::Tick }
    }

    /// Goes on with the channel on which was asked, if the last question was answered so.
    pub fn take_asked(&mut self, asked: Asked) -> Input {
        match asked.channel {
            _ if asked.link != self.number => Input::Tick,
            Ok(channel) => self.begin(channel).map_or_else(Input::LinkLost, |()| Input::Tick),
            Err(error) => Input::LinkLost(error),
        }
    }

    /// Listens to a channel, and speaks on it from now on.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn begin(&mut self, channel: ControlChannel) -> Result<(), MigrateError> {
        self.number += 1;
        let (link, inputs) = (self.number, self.heard.0.clone());
        let (windows, cpu) = (self.windows.clone(), self.cpu.clone());
        let reader = channel.reader;
        let spawned = std::thread::Builder::new().name("control-read".into()).spawn(move || {
            let _cpu = cpu.count_this_thread();
            connect::read_control(reader, link, &windows, &inputs);
        });
        self.channel = Some((channel.writer, channel.closer));
        spawned
            .map(|_| ())
            .map_err(|source| MigrateError::Local { action: "start a thread", source })
    }

    /// Sends a message, if there is a channel.
    ///
    /// # Errors
    /// The channel's.
    pub fn send(&self, message: &ControlMessage) -> std::io::Result<()> {
        self.channel.as_ref().map_or(Ok(()), |(writer, _)| writer.send(message))
    }

    /// Gives up the channel, and asks on a new one after a while.
    pub fn ask(&mut self, delay: Duration) {
        self.close();
        self.channel = None;
        self.number += 1;
        let (stop, stopped) = crossbeam_channel::bounded(1);
        self.asking = Some(stop);
        let (dialer, answers, link) = (self.dialer.clone(), self.asked.0.clone(), self.number);
        let (session, silence) = (self.session, self.silence);
        let spawned = std::thread::Builder::new().name("ask".into()).spawn(move || {
            if let Some(channel) = connect::ask(&dialer, session, delay, silence, &stopped) {
                let _ = answers.send(Asked { link, channel });
            }
        });
        if let Err(source) = spawned {
            let channel = Err(MigrateError::Local { action: "start a thread", source });
            let _ = self.asked.0.send(Asked { link, channel });
        }
    }

    /// Stops asking.
    pub fn stop_asking(&mut self) {
        drop(self.asking.take());
    }

    /// Lets the last message reach the destination: a channel closed while it still speaks would
    /// be reset, and what was sent before lost with it. The guest runs meanwhile.
    pub fn say_goodbye(&mut self) {
        let Some((writer, _)) = &self.channel else { return };
        if writer.finish().is_err() {
            return;
        }
        let deadline = Instant::now() + LAST_WORDS;
        while let Ok(from) = self.heard.1.recv_deadline(deadline) {
            if from.link == self.number
                && matches!(from.input, Input::LinkLost(_) | Input::Failed(_))
            {
                return;
            }
        }
    }

    /// Closes the channel in use.
    pub fn close(&self) {
        if let Some((_, closer)) = &self.channel {
            closer.close();
        }
    }
}
