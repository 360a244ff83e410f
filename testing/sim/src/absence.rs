//! A process that is inside a call of its VMM or a write to its disk, and handles no events.

use std::time::Duration;

use crate::host::Host;
use crate::network::{Event, Network};
use crate::plan::{Sabotage, Step};

/// The interval of keepalives meanwhile.
const LIFE_INTERVAL: Duration = Duration::from_secs(1);

/// The steps that will be slow, and the slow step in progress.
#[derive(Debug)]
pub struct Absence<I> {
    host: Host,
    slow: Vec<(Step, Duration)>,
    silent: bool,
    away: Option<Away<I>>,
}

#[derive(Debug)]
struct Away<I> {
    process: u64,
    since: Duration,
    /// The result of the step.
    result: Option<I>,
    /// The events that arrived meanwhile.
    heard: Vec<Event>,
}

/// The end of a slow step.
#[derive(Debug)]
pub struct Return<I> {
    /// The duration of the step.
    pub took: Duration,
    /// Its result.
    pub result: Option<I>,
    /// The events that arrived meanwhile.
    pub heard: Vec<Event>,
}

impl<I> Absence<I> {
    /// No step is slow.
    pub fn new(host: Host, sabotage: Option<Sabotage>) -> Self {
        let silent = sabotage == Some(Sabotage::NoLife);
        Self { host, slow: Vec::new(), silent, away: None }
    }

    /// Makes the next execution of a step take this long.
    pub fn slow_down(&mut self, step: Step, takes: Duration) {
        self.slow.push((step, takes));
    }

    /// Whether the process is in a slow step.
    pub fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// Called after a step was carried out. Returns its result, unless the step is slow and still
    /// in progress.
    pub fn after(
        &mut self,
        step: Option<Step>,
        process: u64,
        result: Option<I>,
        network: &mut Network,
    ) -> Option<I> {
        let at = self.slow.iter().position(|(slow, _)| Some(*slow) == step);
        let Some(at) = at else { return result };
        let (step, takes) = self.slow.swap_remove(at);
        network.note(|| format!("{:?}: {step:?} takes {takes:?}", self.host));
        self.away = Some(Away { process, since: network.now(), result, heard: Vec::new() });
        network.after(takes, Event::StepEnds(self.host, process));
        if !self.silent {
            network.after(LIFE_INTERVAL, Event::SignOfLife(self.host, process));
        }
        None
    }

    /// Keeps an event for later if the process is in a slow step.
    pub fn keep(&mut self, event: Event) -> Option<Event> {
        match &mut self.away {
            Some(away) => {
                away.heard.push(event);
                None
            }
            None => Some(event),
        }
    }

    /// Whether a process that is still in its step must send a keepalive. If so, the question is
    /// scheduled again.
    pub fn says_that_it_lives(&self, process: u64, network: &mut Network) -> bool {
        let lives = self.away.as_ref().is_some_and(|away| away.process == process);
        if lives {
            network.after(LIFE_INTERVAL, Event::SignOfLife(self.host, process));
        }
        lives
    }

    /// Ends the step, unless the process has died meanwhile.
    pub fn end(&mut self, process: u64, now: Duration) -> Option<Return<I>> {
        let away = self.away.take_if(|away| away.process == process)?;
        let took = now.saturating_sub(away.since);
        Some(Return { took, result: away.result, heard: away.heard })
    }

    /// The process dies.
    pub fn forget(&mut self) {
        self.away = None;
    }
}
