//! The source's control channel: the first one of the migration, those that are reestablished after
//! a loss, and those on which a source in doubt queries the destination.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use vmferry_transport::{ChannelCloser, ChannelWriter, Dialer};
use vmferry_wire::{ControlMessage, LaneOffer, Role, SessionId, Token};

use super::connect;
use super::connect::{ControlChannel, FromLink};
use crate::config::SourceConfig;
use crate::cpu::CpuMeter;
use crate::data::source::lane::SourceLane;
use crate::driver::greeting::Purpose;
use crate::error::MigrateError;
use crate::link::{ControlSlot, ControlWriter};
use crate::machine::source::io::Input;

/// How long a finished migration waits for the destination to receive the last message and close
/// the channel.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The channel in use, and the threads that read it and that dial another one.
pub struct ControlLink {
    dialer: Dialer,
    session: SessionId,
    versions: RangeInclusive<u16>,
    silence: Duration,
    /// The lanes, whose windows acknowledgements free.
    lanes: Vec<Arc<SourceLane>>,
    cpu: CpuMeter,
    channel: Option<(Arc<ControlWriter<ChannelWriter>>, ChannelCloser)>,
    /// The session's channel, for keepalives.
    slot: Arc<ControlSlot>,
    /// The number of the channel in use: inputs of an old one are ignored.
    number: u64,
    heard: (Sender<FromLink>, Receiver<FromLink>),
    dialing: Option<Sender<()>>,
    dialed: (Sender<Dialed>, Receiver<Dialed>),
}

/// The result of dialing, and its purpose.
pub struct Dialed {
    link: u64,
    what_for: WhatFor,
    channel: Result<ControlChannel, MigrateError>,
}

#[derive(Clone, Copy)]
enum WhatFor {
    /// To resume the session.
    Resume(Purpose),
    /// To query the destination.
    Ask(Option<LaneOffer>),
}

impl ControlLink {
    /// A link without a channel.
    pub fn new(
        dialer: &Dialer,
        config: &SourceConfig,
        lanes: Vec<Arc<SourceLane>>,
        cpu: CpuMeter,
    ) -> Self {
        Self {
            dialer: dialer.clone(),
            session: config.session,
            versions: config.protocol.range().clone(),
            silence: config.timeouts.silence,
            lanes,
            cpu,
            channel: None,
            slot: Arc::default(),
            number: 0,
            heard: crossbeam_channel::bounded(connect::MOST_HEARD),
            dialing: None,
            dialed: crossbeam_channel::unbounded(),
        }
    }

    /// The session's present channel.
    pub fn slot(&self) -> Arc<ControlSlot> {
        Arc::clone(&self.slot)
    }

    /// Inputs of channels; for [`take_heard`](Self::take_heard).
    pub fn heard(&self) -> &Receiver<FromLink> {
        &self.heard.1
    }

    /// Results of dialing; for [`take_dialed`](Self::take_dialed).
    pub fn dialed(&self) -> &Receiver<Dialed> {
        &self.dialed.1
    }

    /// The input, if it is from the channel in use.
    pub fn take_heard(&self, from: FromLink) -> Input {
        if from.link == self.number { from.input } else { Input::Tick }
    }

    /// Continues on the dialed channel, unless another one was dialed meanwhile.
    pub fn take_dialed(&mut self, dialed: Dialed) -> Input {
        if dialed.link != self.number {
            return Input::Tick;
        }
        let begun = dialed.channel.and_then(|channel| match dialed.what_for {
            WhatFor::Resume(_) => self.begin(channel),
            WhatFor::Ask(_) => self.start_reading(channel),
        });
        match (dialed.what_for, begun) {
            (WhatFor::Resume(_), Ok(())) => Input::Resumed,
            (WhatFor::Resume(_), Err(error)) => Input::NotResumed(error),
            (WhatFor::Ask(_), Ok(())) => Input::Tick,
            (WhatFor::Ask(_), Err(error)) => Input::LinkLost(error),
        }
    }

    /// Starts reading a channel, and uses it for sending from now on.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn begin(&mut self, channel: ControlChannel) -> Result<(), MigrateError> {
        self.start_reading(channel)?;
        if let Some((writer, closer)) = &self.channel {
            self.slot.set(Arc::clone(writer), closer.clone());
        }
        Ok(())
    }

    fn start_reading(&mut self, channel: ControlChannel) -> Result<(), MigrateError> {
        self.number += 1;
        let (link, inputs) = (self.number, self.heard.0.clone());
        let (lanes, cpu) = (self.lanes.clone(), self.cpu.clone());
        let reader = channel.reader;
        let spawned = std::thread::Builder::new().name("control-read".into()).spawn(move || {
            let _cpu = cpu.count_this_thread();
            connect::read_control(reader, link, &lanes, &inputs);
        });
        self.channel = Some((Arc::new(channel.writer), channel.closer));
        spawned.map(|_| ()).map_err(MigrateError::no_thread)
    }

    /// Sends a message, if there is a channel.
    ///
    /// # Errors
    /// The channel's error.
    pub fn send(&self, message: &ControlMessage) -> std::io::Result<()> {
        let Some((writer, _)) = &self.channel else { return Ok(()) };
        writer.send(message)
    }

    /// Drops the channel, and queries on a new one after a delay. Offers fetch lanes.
    pub fn ask(&mut self, delay: Duration, offer: Option<LaneOffer>) {
        self.dial(WhatFor::Ask(offer), delay);
    }

    /// Drops the channel, and resumes the session on a new one after a delay.
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
        self.dialing = Some(stop);
        let (dialer, answers, link) = (self.dialer.clone(), self.dialed.0.clone(), self.number);
        let (session, versions, silence) = (self.session, self.versions.clone(), self.silence);
        let spawned = std::thread::Builder::new().name("dial".into()).spawn(move || {
            if connect::wait(delay, &stopped) {
                let channel = match what_for {
                    WhatFor::Resume(purpose) => {
                        connect::control(&dialer, purpose, &versions, silence)
                    }
                    WhatFor::Ask(offer) => {
                        connect::ask(&dialer, (session, offer), &versions, silence)
                    }
                };
                let _ = answers.send(Dialed { link, what_for, channel });
            }
        });
        if let Err(source) = spawned {
            let channel = Err(MigrateError::no_thread(source));
            let _ = self.dialed.0.send(Dialed { link, what_for, channel });
        }
    }

    /// Stops dialing.
    pub fn stop_dialing(&mut self) {
        drop(self.dialing.take());
    }

    /// Lets the last message reach the destination. Closing the channel while the peer is still
    /// sending would reset it, and data sent before would be lost. The guest runs meanwhile.
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
