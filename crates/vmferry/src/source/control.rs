//! The source's control channel: the one that the migration began on, those that are made again after it was
//! lost, and those on which a source in doubt asks for the destination's word.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use vmferry_transport::{ChannelCloser, ChannelWriter, Dialer};
use vmferry_wire::{ControlMessage, Role, SessionId, Token};

use super::connect::{self, ControlChannel, FromLink};
use super::io::Input;
use super::window::Window;
use crate::config::SourceConfig;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::greeting::Purpose;
use crate::link::{ControlSlot, ControlWriter};
use vmferry_codec::EncodedFrame;

/// How long a finished migration waits for the destination to hear its last message and hang up.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The channel in use, and the threads that read it and that ask for another one.
pub struct ControlLink {
    dialer: Dialer,
    session: SessionId,
    versions: RangeInclusive<u16>,
    silence: Duration,
    /// The lanes' windows, which acknowledgements free.
    windows: Vec<Arc<Window<EncodedFrame>>>,
    cpu: CpuMeter,
    channel: Option<(Arc<ControlWriter<ChannelWriter>>, ChannelCloser)>,
    /// The channel of the session, for signs of life.
    slot: Arc<ControlSlot>,
    /// The number of the channel in use: what an old one still says is not heard.
    number: u64,
    heard: (Sender<FromLink>, Receiver<FromLink>),
    dialling: Option<Sender<()>>,
    dialled: (Sender<Dialled>, Receiver<Dialled>),
}

/// A channel that was to be dialled, and what for.
pub struct Dialled {
    link: u64,
    what_for: WhatFor,
    channel: Result<ControlChannel, MigrateError>,
}

#[derive(Clone, Copy)]
enum WhatFor {
    /// To go on with the session.
    Resume(Purpose),
    /// To ask for the destination's word.
    Ask,
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
            versions: config.protocol.clone(),
            silence: config.timeouts.silence,
            windows,
            cpu,
            channel: None,
            slot: Arc::default(),
            number: 0,
            heard: crossbeam_channel::bounded(connect::MOST_HEARD),
            dialling: None,
            dialled: crossbeam_channel::unbounded(),
        }
    }

    /// The channel of the session at the moment.
    pub fn slot(&self) -> Arc<ControlSlot> {
        Arc::clone(&self.slot)
    }

    /// What channels bring; for [`take_heard`](Self::take_heard).
    pub fn heard(&self) -> &Receiver<FromLink> {
        &self.heard.1
    }

    /// What came of dialling; for [`take_dialled`](Self::take_dialled).
    pub fn dialled(&self) -> &Receiver<Dialled> {
        &self.dialled.1
    }

    /// What the channel in use has brought.
    pub fn take_heard(&self, from: FromLink) -> Input {
        if from.link == self.number { from.input } else { Input::Tick }
    }

    /// Goes on with the channel that was dialled, if no other was meanwhile.
    pub fn take_dialled(&mut self, dialled: Dialled) -> Input {
        if dialled.link != self.number {
            return Input::Tick;
        }
        let begun = dialled.channel.and_then(|channel| match dialled.what_for {
            WhatFor::Resume(_) => self.begin(channel),
            WhatFor::Ask => self.listen(channel),
        });
        match (dialled.what_for, begun) {
            (WhatFor::Resume(_), Ok(())) => Input::Resumed,
            (WhatFor::Resume(_), Err(error)) => Input::NotResumed(error),
            (WhatFor::Ask, Ok(())) => Input::Tick,
            (WhatFor::Ask, Err(error)) => Input::LinkLost(error),
        }
    }

    /// Listens to a channel, and speaks on it from now on.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn begin(&mut self, channel: ControlChannel) -> Result<(), MigrateError> {
        self.listen(channel)?;
        if let Some((writer, closer)) = &self.channel {
            self.slot.set(Arc::clone(writer), closer.clone());
        }
        Ok(())
    }

    fn listen(&mut self, channel: ControlChannel) -> Result<(), MigrateError> {
        self.number += 1;
        let (link, inputs) = (self.number, self.heard.0.clone());
        let (windows, cpu) = (self.windows.clone(), self.cpu.clone());
        let reader = channel.reader;
        let spawned = std::thread::Builder::new().name("control-read".into()).spawn(move || {
            let _cpu = cpu.count_this_thread();
            connect::read_control(reader, link, &windows, &inputs);
        });
        self.channel = Some((Arc::new(channel.writer), channel.closer));
        spawned
            .map(|_| ())
            .map_err(|source| MigrateError::Local { action: "start a thread", source })
    }

    /// Sends a message, if there is a channel.
    ///
    /// # Errors
    /// The channel's.
    pub fn send(&self, message: &ControlMessage) -> std::io::Result<()> {
        let Some((writer, _)) = &self.channel else { return Ok(()) };
        writer.send(message)
    }

    /// Gives up the channel, and asks on a new one after a while.
    pub fn ask(&mut self, delay: Duration) {
        self.dial(WhatFor::Ask, delay);
    }

    /// Gives up the channel, and goes on with the session on a new one after a while.
    pub fn resume(&mut self, token: Token, attempt: u64, delay: Duration) {
        let purpose = Purpose { role: Role::Resume, lane: 0, token, attempt };
        self.dial(WhatFor::Resume(purpose), delay);
    }

    fn dial(&mut self, what_for: WhatFor, delay: Duration) {
        self.close();
        self.slot.clear();
        self.channel = None;
        self.number += 1;
        let (stop, stopped) = crossbeam_channel::bounded(1);
        self.dialling = Some(stop);
        let (dialer, answers, link) = (self.dialer.clone(), self.dialled.0.clone(), self.number);
        let (session, versions, silence) = (self.session, self.versions.clone(), self.silence);
        let spawned = std::thread::Builder::new().name("dial".into()).spawn(move || {
            if connect::wait(delay, &stopped) {
                let channel = match what_for {
                    WhatFor::Resume(purpose) => {
                        connect::control(&dialer, purpose, &versions, silence)
                    }
                    WhatFor::Ask => connect::ask(&dialer, session, &versions, silence),
                };
                let _ = answers.send(Dialled { link, what_for, channel });
            }
        });
        if let Err(source) = spawned {
            let channel = Err(MigrateError::Local { action: "start a thread", source });
            let _ = self.dialled.0.send(Dialled { link, what_for, channel });
        }
    }

    /// Stops dialling.
    pub fn stop_dialling(&mut self) {
        drop(self.dialling.take());
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
