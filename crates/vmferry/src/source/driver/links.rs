//! The channels of the driver of the source.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_wire::{ControlMessage, Token};

use super::{Asked, Driver};
use crate::error::MigrateError;
use crate::link::lost;
use crate::source::connect::{self, ControlChannel};
use crate::source::io::Input;
use crate::source::lane::{Lane, LaneContext};
use crate::vm::SourceVm;

/// How long a finished migration waits for the destination to hear its last message and hang up.
const LAST_WORDS: Duration = Duration::from_secs(1);

impl<V: SourceVm> Driver<'_, V> {
    pub(super) fn use_control(&mut self, channel: ControlChannel) {
        self.link += 1;
        let (link, inputs) = (self.link, self.link_inputs.0.clone());
        let windows = self.windows.clone();
        let cpu = self.cpu.clone();
        let reader = channel.reader;
        let spawned = std::thread::Builder::new().name("control-read".into()).spawn(move || {
            let _cpu = cpu.count_this_thread();
            connect::read_control(reader, link, &windows, &inputs);
        });
        if let Err(source) = spawned {
            let error = MigrateError::Local { action: "start a thread", source };
            let _ = self.inputs.0.send(Input::LinkLost(error));
        }
        self.control = Some((channel.writer, channel.closer));
    }

    pub(super) fn send(&mut self, message: &ControlMessage) -> Option<Input> {
        let (writer, _) = self.control.as_ref()?;
        match writer.send(message) {
            Ok(()) => None,
            // A source that keeps its guest owes the peer no more than the attempt.
            Err(_) if self.machine.handover().is_final() => None,
            Err(error) => {
                let error = lost("control", self.machine.phase_name(), &error);
                Some(Input::LinkLost(error))
            }
        }
    }

    pub(super) fn open_lanes(&mut self, token: &Token) -> Result<(), MigrateError> {
        let context = LaneContext {
            memory: self.memory.clone(),
            log: Arc::clone(&self.log),
            hashes: Arc::clone(&self.hashes),
            limiter: self.limiter.clone(),
            results: self.inputs.0.clone(),
            cpu: self.cpu.clone(),
            lanes: self.config.channels,
            sent_bytes: self.orders.sent_bytes(),
        };
        for (lane, window) in (0..self.config.channels).zip(&self.windows) {
            let timeouts = &self.config.timeouts;
            let (writer, reader, closer) =
                connect::data(&self.dialer, lane, *token, timeouts.silence, timeouts.stall)?;
            let lane = Lane::start(lane, &context, Arc::clone(window), writer)
                .map_err(|source| MigrateError::Local { action: "start a thread", source })?;
            self.lanes.push(lane);
            self.lane_ends.push((reader, closer));
        }
        Ok(())
    }

    pub(super) fn ask(&mut self, delay: Duration) {
        if let Some((_, closer)) = self.control.take() {
            closer.close();
        }
        self.link += 1;
        let (stop, stopped) = crossbeam_channel::bounded(1);
        self.asking = Some(stop);
        let (dialer, answers, link) = (self.dialer.clone(), self.asked.0.clone(), self.link);
        let (session, silence) = (self.config.session, self.config.timeouts.silence);
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

    /// Lets the last message reach the destination: a channel closed while it still speaks would
    /// be reset, and what was sent before lost with it. The guest runs meanwhile.
    pub(super) fn say_goodbye(&mut self) {
        let Some((writer, _)) = &self.control else { return };
        if writer.finish().is_err() {
            return;
        }
        let deadline = Instant::now() + LAST_WORDS;
        while let Ok(from) = self.link_inputs.1.recv_deadline(deadline) {
            if from.link == self.link && matches!(from.input, Input::LinkLost(_) | Input::Failed(_))
            {
                return;
            }
        }
    }
}
