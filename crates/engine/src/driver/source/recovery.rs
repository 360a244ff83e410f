//! Recovery of a session whose source process has died while the guest lived on.
//!
//! If the VMM is the migrating process itself, its guest dies with it and there is nothing to
//! recover. If the VMM is another process (QEMU), the guest may be left paused, and the recovering
//! process reads the journal. Without COMMIT the guest is resumed. With COMMIT the destination is
//! queried until its answer is known.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use vmferry_handover::{SessionKind, VmError};

use vmferry_transport::Dialer;
use vmferry_wire::GuestIdentity;

use super::conductor::ask_for;
use super::control::ControlLink;
use super::left_pages::LeftPages;
use super::orders::Orders;
use super::redial::Redialed;
use crate::config::SourceConfig;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::lost;
use crate::machine::peer::SourceSide;
use crate::machine::source::Source;
use crate::machine::source::io::{Action, Ending, Input, Report};
use crate::vmm::GuestDescription;
use crate::vmm::left::AbandonedVm;
use crate::witness::witness_id;
use vmferry_handover::SourceGuest;
use vmferry_handover::journal::{
    FileJournal, Journal, JournalError, Record, Side, kind_of_source, recover_source, witness_of,
};

/// The owner of the guest.
#[derive(Debug)]
pub enum Recovered<V> {
    /// This host owns the guest, and it runs here.
    Kept(V),
    /// The destination owns the guest. The VMM has to be torn down.
    Given(V),
    /// The destination had the guest, which has lost the pages that it had not fetched yet. The VMM
    /// has to be torn down.
    Lost(V, MigrateError),
    /// This host owns the guest, but it could not be resumed.
    Stuck(V, VmError),
    /// The destination may lack pages of the guest, and its memory here can't be read. The session
    /// is left open.
    Unread(V, VmError),
}

/// Finishes the session of a source process that has died. Blocks until the guest's owner is known:
/// in doubt, the destination that `dialer` reaches is queried, and `orders` can decide. To a
/// destination that lacks pages they are served, until it has all of them. If the VMM sends them
/// itself, this only waits until the destination has them.
///
/// # Errors
/// Errors of the VMM or the journal: [`JournalError::InUse`] while the process is still alive.
pub fn recover<V: AbandonedVm>(
    mut vm: V,
    dialer: &Dialer,
    config: SourceConfig,
    orders: &Orders,
    watch: &mut dyn FnMut(&Report),
) -> Result<Recovered<V>, (V, JournalError)> {
    let reopened = FileJournal::reopen(&config.journal_directory, config.session, Side::Source);
    let (journal, records) = match reopened {
        Ok(reopened) => reopened,
        Err(error) => return Err((vm, error)),
    };
    // A recovered source depends on its journal alone.
    let guest = GuestDescription {
        identity: GuestIdentity { uuid: uuid::Uuid::nil(), name: String::new() },
        vmm: String::new(),
        config: Vec::new(),
        layout: Vec::new(),
    };
    let inputs = crossbeam_channel::unbounded();
    orders.attach(inputs.0.clone());
    let serves = kind_of_source(&records) == SessionKind::PostCopy
        && recover_source(&records).0.is_committed();
    let memory = match serves.then(|| vm.memory()).transpose() {
        Ok(memory) => memory,
        Err(error) => return Ok(Recovered::Unread(vm, error)),
    };
    // Only the witness that the session began with may decide it.
    let witness = witness_id(config.witness.as_deref());
    let witness = witness.filter(|witness| witness_of(&records) == Some(witness));
    let our_side = SourceSide::recovered(memory.as_ref().is_some_and(Option::is_none), witness);
    let lanes = our_side.fetch_lanes(&config);
    let asked = (config.clone(), inputs.0.clone());
    let left = |memory| LeftPages::new((memory, lanes), dialer, &config, orders, inputs.0);
    let pages = memory.map(left);
    let control = ControlLink::new(dialer, &config, Vec::new(), CpuMeter::default());
    let machine = Source::recovered(config, &guest, our_side, &records, Duration::ZERO);
    let guest = SourceGuest::recovered(vm, machine.handover());
    let started = Instant::now();
    let failure = None;
    let mut recovery = Recovery { machine, control, journal, guest, pages, asked, failure };
    loop {
        while let Some(action) = recovery.machine.next_action() {
            orders.publish(recovery.machine.phase_name(), recovery.machine.handover());
            if let Action::Report(report) = &action {
                watch(report);
            }
            if let Some(input) = recovery.execute(action) {
                recovery.machine.handle(started.elapsed(), input);
            }
        }
        if let Some(ending) = recovery.machine.ending() {
            orders.detach();
            return Ok(recovery.finish(ending));
        }
        let tick = recovery.machine.next_tick().unwrap_or(Duration::from_secs(1));
        let wait = tick.saturating_sub(started.elapsed());
        let Recovery { control, pages, .. } = &mut recovery;
        let joined = pages.as_ref().map_or(&*NEVER, LeftPages::dialed);
        let input = crossbeam_channel::select! {
            recv(control.heard()) -> from => {
                from.map_or(Input::Tick, |from| control.take_heard(from))
            }
            recv(control.dialed()) -> dialed => {
                dialed.map_or(Input::Tick, |dialed| control.take_dialed(dialed))
            }
            recv(inputs.1) -> input => match (input, &pages) {
                (Ok(Input::LaneLost { lane, attempt, .. }), Some(pages))
                    if !pages.is_at(lane, attempt) =>
                {
                    Input::Tick
                }
                (input, _) => input.unwrap_or(Input::Tick),
            },
            recv(joined) -> redialed => match (redialed, pages) {
                (Ok(redialed), Some(pages)) => pages.rejoin(redialed),
                _ => Input::Tick,
            },
            default(wait.min(LOOK)) => Input::Tick,
        };
        recovery.machine.handle(started.elapsed(), input);
        if recovery.has_lost_pages() {
            let ended = Input::VmmEnded("it has ended".into());
            recovery.machine.handle(started.elapsed(), ended);
        }
    }
}

/// The longest wait: nothing notifies this process when the VMM ends.
const LOOK: Duration = Duration::from_secs(1);

static NEVER: LazyLock<Receiver<Redialed>> = LazyLock::new(crossbeam_channel::never);

struct Recovery<V: AbandonedVm> {
    machine: Source,
    control: ControlLink,
    journal: FileJournal,
    guest: SourceGuest<V>,
    /// The guest's pages, if the destination may lack some.
    pages: Option<LeftPages>,
    /// For questions to the witness, and where their answers go.
    asked: (SourceConfig, Sender<Input>),
    failure: Option<VmError>,
}

impl<V: AbandonedVm> Recovery<V> {
    fn execute(&mut self, action: Action) -> Option<Input> {
        match action {
            Action::Ask { delay, offer } => self.control.ask(delay, offer),
            Action::AskWitness(request) => {
                let (config, inputs) = &self.asked;
                ask_for(config, request, inputs);
            }
            Action::Send(message) => {
                if let Err(error) = self.control.send(&message)
                    && !self.machine.handover().is_final()
                {
                    let during = self.machine.phase_name();
                    return Some(Input::LinkLost(lost("control", during, &error)));
                }
            }
            // A session whose guest could not be resumed stays open, so that the next recovery
            // tries again.
            Action::WriteOutcome(Record::Kept { .. }) if self.failure.is_some() => {}
            Action::WriteOutcome(record) => {
                // The decisive promise is already written; this record is for `vmferry status`.
                let _ = self.journal.append(&record);
            }
            Action::Resume => {
                if let Err(error) = self.guest.resume(self.machine.handover()) {
                    self.failure = Some(error);
                }
            }
            Action::ReconnectVmm => {
                let (SourceGuest::Committed(guest), Some(pages)) =
                    (&mut self.guest, &mut self.pages)
                else {
                    return None;
                };
                return pages.reconnect(|| guest.reconnect()).err().map(Input::NotReconnected);
            }
            // A guest that was given away is not touched.
            action => return self.pages.as_mut().and_then(|pages| pages.execute(action)),
        }
        None
    }

    /// Whether the VMM of a carried guest has ended, and has taken the missing pages along.
    fn has_lost_pages(&self) -> bool {
        let sends = self.pages.as_ref().is_some_and(|pages| !pages.are_read_here());
        matches!(&self.guest, SourceGuest::Committed(guest) if sends && guest.has_ended())
    }

    fn finish(mut self, ending: Ending) -> Recovered<V> {
        self.control.stop_dialing();
        self.pages = None;
        self.control.say_goodbye();
        self.control.close();
        match (self.guest, ending, self.failure) {
            (SourceGuest::Running(running), ..) => {
                // The session had no outcome yet: the guest is here.
                let _ = self.journal.append(&Record::Kept { by_operator: false });
                Recovered::Kept(running.into_vm())
            }
            (SourceGuest::Committed(committed), Ending::Lost(error), _) => {
                Recovered::Lost(committed.release(), error)
            }
            (SourceGuest::Committed(committed), ..) => Recovered::Given(committed.release()),
            (SourceGuest::Paused(paused), Ending::Kept(_), failure) => match paused.into_vm() {
                Some(vm) => Recovered::Stuck(vm, failure.unwrap_or_else(no_reason)),
                None => unreachable!("a paused guest has an owner"),
            },
            (SourceGuest::Paused(_) | SourceGuest::Released(_) | SourceGuest::Moving, ..) => {
                unreachable!("a recovery ends with an owner of the guest")
            }
        }
    }
}

fn no_reason() -> VmError {
    "its VMM gives no reason".into()
}

#[cfg(test)]
mod tests {
    use vmferry_handover::Resume;
    use vmferry_memory::GuestMemory;
    use vmferry_transport::Address;
    use vmferry_wire::SessionId;

    use super::*;
    use crate::vmm::streamed::LateStreams;
    use vmferry_handover::journal::{Verdict, sessions};

    #[derive(Debug)]
    struct Guest {
        wakes: bool,
    }

    /// A destination that answers from its journals and is never announced a guest.
    struct NoVm;

    impl crate::DestinationVm for NoVm {
        fn prepare(&mut self, _: &GuestDescription) -> Result<crate::Landing, crate::PrepareError> {
            Err(crate::PrepareError::Vm("there is no VMM".into()))
        }

        fn load(&mut self, _: &[u8]) -> Result<(), VmError> {
            Err("there is no VMM".into())
        }

        fn discard(&mut self) {}

        fn run(&mut self) -> Result<(), VmError> {
            Err("there is no VMM".into())
        }
    }

    impl AbandonedVm for Guest {
        fn memory(&mut self) -> Result<Option<GuestMemory>, VmError> {
            Err("no page of it is missing".into())
        }
    }

    impl vmferry_handover::Reconnect for Guest {
        type Streams = LateStreams;

        fn reconnect(&mut self) -> Result<LateStreams, VmError> {
            Err("it streams nothing".into())
        }
    }

    impl Resume for Guest {
        fn resume(&mut self) -> Result<(), VmError> {
            if self.wakes { Ok(()) } else { Err("it sleeps".into()) }
        }
    }

    /// The destination has returned a committed guest, and its VMM can't resume it: the session is
    /// left open.
    #[test]
    fn recovery_keeps_a_committed_guest_that_can_not_be_resumed() {
        let directory = tempfile::tempdir().unwrap();
        let (here, there) = (directory.path().join("a"), directory.path().join("b"));
        let mut config = SourceConfig::new(here.clone());
        config.session = SessionId([7; 16]);
        let guest = || GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() };
        let begin = |at: &std::path::Path, side| {
            FileJournal::begin(at, config.session, side, guest(), ("peer", &[])).unwrap()
        };
        begin(&here, Side::Source).append(&Record::Commit).unwrap();
        // A destination that was restarted before COMMIT arrived: ABORTED.
        drop(begin(&there, Side::Destination));
        let address = Address::Unix(directory.path().join("in.sock"));
        let listener = vmferry_transport::Listener::bind(&address, None).unwrap();
        let (stop, receiver) = (crate::destination::Stop::default(), there.clone());
        std::thread::scope(|scope| {
            let stop_it = &stop;
            scope.spawn(move || {
                let config = crate::DestinationConfig::new(receiver);
                crate::destination::receive(listener, NoVm, &config, stop_it, &mut |_| {})
            });
            let dialer = Dialer::new(address.clone(), None);
            let recover = |wakes: bool| {
                recover(Guest { wakes }, &dialer, config.clone(), &Orders::new(), &mut |_| {})
                    .unwrap_or_else(|(_, error)| panic!("{error}"))
            };
            let found = || sessions(&here).unwrap().remove(0);
            let stuck = recover(false);
            let left_open = found().is_unfinished_source();
            let kept = recover(true);
            let closed = !found().is_unfinished_source();
            stop.stop();
            assert!(matches!(stuck, Recovered::Stuck(..)), "{stuck:?}");
            assert!(left_open, "it counts as finished, and its guest is paused");
            assert!(matches!(kept, Recovered::Kept(_)) && closed, "{kept:?}");
        });
    }

    /// A paused guest that could not be resumed must have its session left open.
    #[test]
    fn recovery_keeps_a_guest_that_can_not_be_resumed() {
        let directory = tempfile::tempdir().unwrap();
        let mut config = SourceConfig::new(directory.path().to_owned());
        config.session = SessionId([7; 16]);
        let guest = GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() };
        let (at, side) = (directory.path(), Side::Source);
        drop(FileJournal::begin(at, config.session, side, guest, ("b", &[])).unwrap());
        let dialer = Dialer::new(Address::Unix(at.join("nobody")), None);
        let recover = |wakes: bool| {
            recover(Guest { wakes }, &dialer, config.clone(), &Orders::new(), &mut |_| {})
                .unwrap_or_else(|(_, error)| panic!("{error}"))
        };
        let found = || sessions(at).unwrap().remove(0);
        assert!(matches!(recover(false), Recovered::Stuck(..)));
        assert!(found().is_unfinished_source(), "{:?}", found());
        assert!(matches!(recover(true), Recovered::Kept(_)));
        assert!(!found().is_unfinished_source());
        assert_eq!(found().verdict, Verdict::Here);
    }
}
