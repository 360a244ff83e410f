//! One state of the model of libvirt's Finish.

use std::collections::BTreeSet;

use vmferry_handover::{
    DestinationAction, DestinationFinish, DomainSeen, FinishAnswer, FinishOwner, FinishWord,
    SourceAction, SourceFinish,
};

/// Both hosts and the network between their daemons.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    /// The guest at the source, which its libvirt has paused.
    pub source_guest: SourceGuest,
    /// Whether the connection that the source's libvirt called Finish on is open.
    pub source_connection: bool,
    /// Whether the keeper holds a duplicate of that connection.
    pub keeper: bool,
    /// Whether the daemon at the source has the Finish in memory.
    pub has_call: bool,
    /// The daemon at the source.
    pub source: Daemon<SourceFinish, SourceAction>,
    /// Every message ever sent between the daemons. A message may arrive at any time, repeatedly,
    /// or never.
    pub network: BTreeSet<Message>,
    /// The daemon at the destination.
    pub destination: Daemon<DestinationFinish, DestinationAction>,
    /// Whether a keeper at the destination holds its daemon's connection to libvirt, too.
    pub keeps_destination: bool,
    /// Whether the connection of the Prepare to the destination's libvirt is open.
    pub libvirt_connection: bool,
    /// Whether the destination's libvirt runs.
    pub libvirt_runs: bool,
    /// Whether the destination's libvirt destroys the guest when that connection closes.
    pub auto_destroy: bool,
    /// The Finish at the destination's libvirt.
    pub call: LibvirtCall,
    /// The guest at the destination.
    pub domain: Domain,
    /// Whether a death has lost the reply to a Finish that was passed on.
    pub reply_lost: bool,
    /// Whether the destination's host is lost permanently.
    pub lost: bool,
    /// Whether faults have ended.
    pub faults_ended: bool,
}

/// The guest at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceGuest {
    /// It is paused, and libvirt waits for the reply to Finish (`PERFORM3_DONE`).
    Waits,
    /// It is paused, and libvirt is about to kill or to resume it, also after a restart
    /// (`CONFIRM3`, `CONFIRM3_CANCELLED`).
    Confirms(FinishWord),
    /// It is paused, and libvirt has forgotten why: it was restarted while it waited.
    LeftPaused,
    /// It runs.
    Runs,
    /// It was killed.
    Killed,
}

/// The guest at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Domain {
    /// Its QEMU waits for the Finish, and its CPUs have never run.
    Waits,
    /// It runs.
    Runs,
    /// It ran, and runs on a third host now.
    MovedOn,
    /// It ran, or an operator has promised it, and it has ended.
    Ended,
    /// It is gone, and its CPUs have never run.
    NeverRan,
}

/// A Finish at the destination's libvirt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LibvirtCall {
    /// There is none.
    None,
    /// It is written to the connection.
    Written,
    /// libvirt works on it.
    Begun,
    /// The reply is written to the connection.
    Replied(FinishWord),
}

/// A daemon and its journal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Daemon<State, Action> {
    /// What the journal says.
    pub disk: State,
    /// The process; `None` while it is dead.
    pub process: Option<Process<State, Action>>,
}

/// A daemon's process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Process<State, Action> {
    /// The state in memory.
    pub state: State,
    /// The state whose record is being written, and the action after it.
    pub writing: Option<(State, Action)>,
    /// The action to be done.
    pub todo: Option<Action>,
}

/// A message between the daemons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Message {
    /// Source: the Finish.
    Finish,
    /// Source: asks for the word.
    Ask,
    /// Destination: libvirt's reply, or the refusal.
    Reply(FinishWord),
    /// The answer of the destination, or of another host in its place.
    Answer(FinishAnswer),
}

impl Domain {
    /// What libvirt says about it.
    #[must_use]
    pub fn seen(self) -> DomainSeen {
        match self {
            Self::Runs => DomainSeen::Runs,
            Self::Waits => DomainSeen::Waits,
            Self::MovedOn | Self::Ended | Self::NeverRan => DomainSeen::Gone,
        }
    }
}

impl<State: Copy, Action> Daemon<State, Action> {
    fn new(state: State) -> Self {
        Self { disk: state, process: Some(Process { state, writing: None, todo: None }) }
    }

    /// The process, if it has nothing to do.
    #[must_use]
    pub fn idle(&self) -> Option<&Process<State, Action>> {
        self.process.as_ref().filter(|process| process.writing.is_none() && process.todo.is_none())
    }
}

impl World {
    /// The initial state: memory is copied, and the source's libvirt has called Finish.
    #[must_use]
    pub fn start(keeps_destination: bool) -> Self {
        Self {
            source_guest: SourceGuest::Waits,
            source_connection: true,
            keeper: false,
            has_call: true,
            source: Daemon::new(SourceFinish::NotSent),
            network: BTreeSet::new(),
            destination: Daemon::new(DestinationFinish::NotPassed),
            keeps_destination,
            libvirt_connection: true,
            libvirt_runs: true,
            auto_destroy: true,
            call: LibvirtCall::None,
            domain: Domain::Waits,
            reply_lost: false,
            lost: false,
            faults_ended: false,
        }
    }

    /// Whether the guest has run at the destination.
    #[must_use]
    pub fn has_run_there(&self) -> bool {
        matches!(self.domain, Domain::Runs | Domain::MovedOn | Domain::Ended)
    }

    /// Whether two hosts run the guest.
    #[must_use]
    pub fn runs_twice(&self) -> bool {
        self.source_guest == SourceGuest::Runs
            && matches!(self.domain, Domain::Runs | Domain::MovedOn)
    }

    /// Whether the journals, read by an operator, name the right host.
    #[must_use]
    pub fn journals_are_right(&self) -> bool {
        let seen = match (self.libvirt_runs, self.domain) {
            (false, _) => DomainSeen::NoAnswer,
            (true, domain) => domain.seen(),
        };
        let is_right = |owner| match owner {
            FinishOwner::Source => !self.has_run_there(),
            FinishOwner::Destination => self.source_guest != SourceGuest::Runs,
            FinishOwner::Undecided => true,
        };
        is_right(self.source.disk.owner()) && is_right(self.destination.disk.owner(seen))
    }

    /// Whether the guest is paused at the destination although the source has it.
    #[must_use]
    pub fn has_copy_left(&self) -> bool {
        self.source_guest == SourceGuest::Runs && self.domain == Domain::Waits && !self.lost
    }

    /// Whether exactly one host has the guest. A guest that ended after it ran has ended there.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        match self.source_guest {
            SourceGuest::Runs => !self.has_run_there(),
            SourceGuest::Killed => self.has_run_there(),
            _ => false,
        }
    }

    /// Whether an operator must decide, in one of the cases that the rules name.
    #[must_use]
    pub fn waits_for_operator(&self) -> bool {
        let asks = self.source.disk == SourceFinish::Sent;
        let source_restarted = self.source_guest == SourceGuest::LeftPaused && !asks;
        // Without the reply, a guest that is there and runs is the only certain sign.
        let reply_lost = asks
            && self.reply_lost
            && self.destination.disk == DestinationFinish::Passed
            && self.call == LibvirtCall::None
            && self.domain != Domain::Runs;
        // An operator has decided and not yet resumed the guest.
        let promised = self.destination.disk == DestinationFinish::Answered(FinishWord::Runs)
            && self.domain == Domain::Waits;
        source_restarted || reply_lost || promised || (asks && self.lost)
    }

    /// Who has the guest, in words.
    #[must_use]
    pub fn who_has_the_guest(&self) -> String {
        let source = match self.source_guest {
            SourceGuest::Waits => "the source's libvirt waits with a paused guest",
            SourceGuest::Confirms(FinishWord::Runs) => "the source is about to kill the guest",
            SourceGuest::Confirms(FinishWord::DoesNotRun) => "the source is about to resume it",
            SourceGuest::LeftPaused => "the source's libvirt was restarted and left it paused",
            SourceGuest::Runs => "the source runs the guest",
            SourceGuest::Killed => "the source has killed the guest",
        };
        let destination = match self.domain {
            Domain::Waits => "it is paused at the destination",
            Domain::Runs => "the destination runs it",
            Domain::MovedOn => "a third host runs it",
            Domain::Ended => "it ran at the destination and has ended",
            Domain::NeverRan => "the destination does not have it",
        };
        format!("{source}, {destination}")
    }
}
