//! A cable between two network namespaces is pulled, or drops packets one way or both ways. No
//! connection is reset, so neither side is notified.
//!
//! Needs root. `make test` runs a sample, and VMFERRY_TEST_ALL=1 runs all cases.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use crate::support::trial::{
    COMMIT, CONNECTED, DOUBT, FIRST_ROUND, PAUSED, Phase, Place, READY, RUNNING, SECOND_ROUND,
    Trial, side_by_side,
};
use crate::support::{all, inside};
use vmferry_net_lab::{DESTINATION_ADDRESS, Direction, Namespaces, enter};

/// How long the link is down in the cases in which both sides wait for it: longer than the 10 s
/// after which a silent connection is given up.
const AWAY: Duration = Duration::from_secs(14);

/// What happens to the cable.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Pulled and plugged in again.
    Pulled,
    /// Drops packets in this direction and is repaired.
    BlackHole(Direction),
    /// Drops packets in this direction until the source has given the link up or is in doubt.
    BlackHoleUntilGivenUp(Direction),
}

impl Fault {
    fn name(self) -> &'static str {
        use Direction::{Both, ToDestination, ToSource};
        match self {
            Self::Pulled => "cable: out for 14 s",
            Self::BlackHole(Both) => "black hole, both ways: for 14 s",
            Self::BlackHole(ToDestination) => "black hole to the destination: for 14 s",
            Self::BlackHole(ToSource) => "black hole to the source: for 14 s",
            Self::BlackHoleUntilGivenUp(Both) => {
                "black hole, both ways: for longer than it is tried"
            }
            Self::BlackHoleUntilGivenUp(ToDestination) => {
                "black hole to the destination: for longer than it is tried"
            }
            Self::BlackHoleUntilGivenUp(ToSource) => {
                "black hole to the source: for longer than it is tried"
            }
        }
    }

    fn strike(self, cable: &Namespaces) {
        match self {
            Self::Pulled => cable.set_cable(false).unwrap(),
            Self::BlackHole(way) | Self::BlackHoleUntilGivenUp(way) => {
                cable.black_hole(way).unwrap()
            }
        }
    }

    fn mend(self, cable: &Namespaces) {
        match self {
            Self::Pulled => cable.set_cable(true).unwrap(),
            Self::BlackHole(way) | Self::BlackHoleUntilGivenUp(way) => cable.mend(way).unwrap(),
        }
    }

    fn way(self) -> Direction {
        match self {
            Self::Pulled => Direction::Both,
            Self::BlackHole(way) | Self::BlackHoleUntilGivenUp(way) => way,
        }
    }

    /// The phases in which the fault makes a difference. Packets to the source are delayed at the
    /// destination's end of the cable before they are dropped there. Packets to the destination
    /// have passed the cable at that point, so they must be dropped earlier.
    fn phases(self) -> &'static [Phase] {
        match (self, self.way()) {
            (Self::BlackHoleUntilGivenUp(_), Direction::ToDestination) => &[FIRST_ROUND, PAUSED],
            (Self::BlackHoleUntilGivenUp(_), _) => &[FIRST_ROUND, PAUSED, READY],
            (_, Direction::ToDestination) => {
                &[CONNECTED, FIRST_ROUND, SECOND_ROUND, PAUSED, COMMIT, DOUBT]
            }
            _ => &[CONNECTED, FIRST_ROUND, SECOND_ROUND, PAUSED, READY, DOUBT, RUNNING],
        }
    }

    /// COMMIT is dropped on its way if the link goes down when READY reaches the source.
    fn begin(self, phase: Phase) -> Phase {
        if phase.is(&COMMIT) { READY } else { phase }
    }
}

#[test]
fn silent_link_leaves_exactly_one_guest() {
    use Direction::{Both, ToDestination, ToSource};
    if let Err(error) = Namespaces::make() {
        panic!("this test needs what is missing: {error:#}");
    }
    let mut trials = vec![
        (Fault::BlackHoleUntilGivenUp(Both), FIRST_ROUND),
        (Fault::BlackHole(ToDestination), COMMIT),
        (Fault::BlackHole(ToSource), RUNNING),
        (Fault::Pulled, PAUSED),
    ];
    if all() {
        trials.clear();
        let faults = [
            Fault::BlackHole(ToSource),
            Fault::BlackHole(Both),
            Fault::Pulled,
            Fault::BlackHoleUntilGivenUp(ToSource),
            Fault::BlackHoleUntilGivenUp(Both),
            Fault::BlackHoleUntilGivenUp(ToDestination),
            Fault::BlackHole(ToDestination),
        ];
        for fault in faults {
            trials.extend(fault.phases().iter().map(|phase| (fault, *phase)));
        }
    }
    side_by_side(8, trials, |(fault, phase)| strike(*fault, *phase));
}

fn strike(fault: Fault, phase: Phase) {
    let cable = Namespaces::make().unwrap();
    let place = Place {
        source: inside(&cable.source_path()).to_vec(),
        destination: inside(&cable.destination_path()).to_vec(),
    };
    // This thread's proxy and its threads are on the destination's side.
    enter(File::open(cable.destination_path()).unwrap().as_fd()).unwrap();
    let tried = match fault {
        Fault::BlackHoleUntilGivenUp(_) => "1s",
        _ => "60s",
    };
    let host = DESTINATION_ADDRESS.to_string();
    let mut trial =
        Trial::begin_at(fault.name(), fault.begin(phase), tried, &place, ["127.0.0.1", &host]);
    trial.phase = trial.phase.called(phase.name);
    fault.strike(&cable);
    trial.release();
    if let Fault::BlackHoleUntilGivenUp(_) = fault {
        let sent = trial.send.finish_by_ref();
        assert_eq!(sent.code, Some(12), "{}: {sent:?}", trial.about());
        trial.a.check_guest("web");
        fault.mend(&cable);
        return trial.stays();
    }
    if phase.is(&DOUBT) {
        trial.proxy.heal();
    }
    let committed = phase.is(&COMMIT) || phase.is(&DOUBT) || phase.is(&RUNNING);
    if committed && !phase.is(&DOUBT) {
        trial.send.event("in-doubt");
    }
    // The pause is the fault itself and does not wait for an event.
    std::thread::sleep(AWAY);
    if committed {
        assert_eq!(trial.a.status("web")["migration"]["in_doubt"], true, "{}", trial.about());
    }
    fault.mend(&cable);
    // A destination that has loaded the state can't resume the session, and the guest stays.
    if phase.is(&READY) { trial.stays() } else { trial.arrives() }
}
