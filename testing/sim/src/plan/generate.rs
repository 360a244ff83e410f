//! The faults that a random schedule draws, and those that are enumerated.

use std::time::Duration;

use fastrand::Rng;

use super::fault::{Fault, Ways, Where, WriteFault};
use super::step::Step;
use super::{MESSAGES, SECOND, VM_CALLS, WRITES};
use crate::host::Host;
use crate::hostile::forgeries;

/// Every fault that can happen once, at one message.
pub(super) fn boundary_kinds(message: u64) -> Vec<Vec<Fault>> {
    let long = 100 * SECOND;
    let silence = |ways, lasts, lost| vec![Fault::Silence { message, ways, lasts, lost }];
    let cut = |place, all| vec![Fault::Cut { message, place, all, away: Duration::ZERO }];
    let away = |all, away| vec![Fault::Cut { message, place: Where::Within, all, away }];
    let crash = |host, back_after| vec![Fault::Crash { host, message, back_after }];
    vec![
        cut(Where::Before, true),
        cut(Where::Within, true),
        cut(Where::After, true),
        cut(Where::Before, false),
        cut(Where::After, false),
        away(true, 3 * SECOND),
        away(false, 3 * SECOND),
        away(true, 25 * SECOND),
        [cut(Where::After, true), vec![again(message, 2), again(message, 9)]].concat(),
        silence(Ways::Both, long, true),
        silence(Ways::Both, 5 * SECOND, false),
        silence(Ways::To(Host::Source), long, true),
        silence(Ways::To(Host::Destination), long, true),
        silence(Ways::To(Host::Source), 40 * SECOND, false),
        silence(Ways::To(Host::Destination), 40 * SECOND, false),
        vec![Fault::Repeat { message }],
        vec![Fault::Delay { message, by: 7 * SECOND }],
        vec![Fault::Delay { message, by: 70 * SECOND }],
        vec![Fault::Damage { message, bit: 3 + 17 * message as u32 }],
        crash(Host::Source, 2 * SECOND),
        crash(Host::Source, long),
        crash(Host::Destination, 2 * SECOND),
        crash(Host::Destination, long),
        vec![Fault::Cancel { host: Host::Source, message }],
        vec![Fault::Cancel { host: Host::Destination, message }],
        vec![
            Fault::Cut { message, place: Where::After, all: true, away: Duration::ZERO },
            Fault::Stranger { message, lasts: 20 * SECOND },
        ],
        vec![
            Fault::Crash { host: Host::Source, message, back_after: 5 * SECOND },
            Fault::Crash { host: Host::Destination, message: message + 1, back_after: SECOND },
        ],
    ]
}

/// A cut of one channel, `later` messages after the first.
fn again(message: u64, later: u64) -> Fault {
    let message = message + later;
    Fault::Cut { message, place: Where::Before, all: false, away: Duration::ZERO }
}

/// Every write, failing in every way, alone and with a crash.
pub(super) fn write_faults() -> Vec<Vec<Fault>> {
    let mut all = Vec::new();
    // COMMIT fails and may be on disk, the guest runs on, ABORT is lost, and a restarted source
    // reads the journal while the destination still waits.
    for message in 0..MESSAGES {
        let lasts = SECOND * 4;
        all.push(vec![
            Fault::Write { host: Host::Source, number: 1, how: WriteFault::OnDisk, crash: false },
            Fault::Silence { message, ways: Ways::Both, lasts, lost: true },
            Fault::Crash { host: Host::Source, message, back_after: 5 * SECOND },
        ]);
    }
    for host in [Host::Source, Host::Destination] {
        for number in 0..WRITES {
            for how in [WriteFault::Lost, WriteFault::Torn, WriteFault::OnDisk] {
                for crash in [false, true] {
                    all.push(vec![Fault::Write { host, number, how, crash }]);
                }
            }
        }
    }
    all
}

/// A cut at one of the messages, after which no channel can be opened for at most `longest`.
pub(super) fn random_cut(rng: &mut Rng, messages: u64, longest: Duration) -> Fault {
    let place = [Where::Before, Where::Within, Where::After][rng.usize(..3)];
    let away = longest.mul_f64([0.0, 0.01, 0.1, 1.0][rng.usize(..4)] * rng.f64());
    Fault::Cut { message: rng.u64(..messages), place, all: rng.u32(..3) > 0, away }
}

/// Any fault, at one of the messages if it is bound to one.
pub(super) fn random_fault(rng: &mut Rng, messages: u64) -> Fault {
    let message = rng.u64(..messages);
    let host = if rng.bool() { Host::Source } else { Host::Destination };
    let lasts = SECOND * rng.u32(..130);
    match rng.u32(..19) {
        0..3 => random_cut(rng, messages, SECOND * 40),
        3..5 => {
            let ways = if rng.bool() { Ways::Both } else { Ways::To(host) };
            Fault::Silence { message, ways, lasts, lost: rng.bool() }
        }
        5 => Fault::Repeat { message },
        6 => Fault::Delay { message, by: lasts / [1, 1000][rng.usize(..2)] },
        7 => Fault::Damage { message, bit: rng.u32(..40_000) },
        8..11 => Fault::Crash { host, message, back_after: lasts },
        11 => Fault::Cancel { host, message },
        12 => Fault::Stranger { message, lasts },
        13..15 => {
            let how = [WriteFault::Lost, WriteFault::Torn, WriteFault::OnDisk][rng.usize(..3)];
            Fault::Write { host, number: rng.u64(..WRITES), how, crash: rng.bool() }
        }
        15 => {
            let numbers = forgeries(host);
            Fault::Forge { message, to: host, number: numbers[rng.usize(..numbers.len())] }
        }
        16 => Fault::Vm { call: VM_CALLS[rng.usize(..VM_CALLS.len())] },
        _ => {
            let step = Step::ALL[rng.usize(..Step::ALL.len())];
            Fault::Slow { step, takes: SECOND * rng.u32(1..25) }
        }
    }
}
