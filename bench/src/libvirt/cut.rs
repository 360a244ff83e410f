//! Migrations during which the link is cut for 10 s, in one of two ways.

use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::Serialize;
use vmferry_net_lab::Direction;

use super::CAP_KBIT_PER_S;
use super::guest::{Guest, Workload};
use super::lab::Lab;
use super::way::Way;
use crate::interrupt;

/// For how long the link is cut.
const CUT: Duration = Duration::from_secs(10);

/// Time between the starts of two migrations of a batch, which the cut thus hits at different
/// moments.
const APART: Duration = Duration::from_millis(250);

/// How the link is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// All packets are lost, and neither host is notified: a failure behind the next switch.
    Silent,
    /// The source's interface is down: connections can't be made.
    Unplugged,
}

impl Cut {
    /// In the order of measurement.
    pub const ALL: [Self; 2] = [Self::Silent, Self::Unplugged];

    fn name(self) -> &'static str {
        match self {
            Self::Silent => "packets lost",
            Self::Unplugged => "interface down",
        }
    }

    /// Cuts the capped link.
    fn begin(self, lab: &Lab) -> anyhow::Result<()> {
        match self {
            Self::Silent => {
                lab.networks.mend(Direction::Both)?;
                lab.networks.black_hole(Direction::Both)
            }
            Self::Unplugged => lab.networks.set_cable(false),
        }
    }

    fn end(self, lab: &Lab) -> anyhow::Result<()> {
        match self {
            Self::Silent => lab.networks.slow_down(Direction::Both, CAP_KBIT_PER_S),
            Self::Unplugged => lab.networks.set_cable(true),
        }
    }
}

/// When the cut begins, after the last migration of a batch has started: another one in each batch.
const MOMENTS: [Duration; 4] = [
    Duration::from_millis(1500),
    Duration::from_millis(500),
    Duration::from_millis(2500),
    Duration::from_millis(1000),
];

/// The most batches. Those with migrations that are over too soon are followed by others.
const MAX_BATCHES: usize = 8;

/// What became of the migrations of one way.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Outcome {
    pub way: &'static str,
    cut: &'static str,
    /// Migrations that were under way when the link was cut, with the guest running at the
    /// source.
    pub cut_at_source: u32,
    /// Those of them that failed. Their guests run on at the source.
    pub failed: u32,
    /// Other migrations: over before the cut, or with the guest paused when it began.
    pub others: u32,
    /// Those of them that failed.
    pub others_failed: u32,
    /// Guests that run on neither host, or on both. The benchmark fails if there are any.
    pub lost: u32,
}

/// Moves guests in batches until `cuts.0` migrations were cut by each [`Cut`], `cuts.1` at a time.
pub fn measure(lab: &Lab, way: Way, cuts: (u32, usize)) -> anyhow::Result<Vec<Outcome>> {
    let (wanted, together) = cuts;
    let mut guests: Vec<Guest<'_>> = (0..together)
        .map(|number| {
            let name = format!("cut-{}-{number}", way as u8);
            let options = "program=48 hot=8 rest=5000".to_owned();
            Guest::begin(lab, &Workload { name, mib: 128, options }, None)
        })
        .collect();
    guests.iter().for_each(Guest::wait_until_it_works);
    let mut outcomes = Vec::new();
    for cut in Cut::ALL {
        let mut outcome = Outcome { way: way.name(), cut: cut.name(), ..Outcome::default() };
        for moment in MOMENTS.iter().cycle().take(MAX_BATCHES) {
            let left = wanted.saturating_sub(outcome.cut_at_source) as usize;
            if left == 0 {
                break;
            }
            let guests = &mut guests[..left.min(together)];
            move_batch(lab, (way, cut), guests, *moment, &mut outcome)?;
            let Outcome { cut_at_source, failed, .. } = outcome;
            eprintln!(
                "libvirt: cut of 10 s, {}, {}: {failed} of {cut_at_source} failed",
                cut.name(),
                way.name()
            );
        }
        outcomes.push(outcome);
    }
    for guest in guests {
        guest.end();
    }
    Ok(outcomes)
}

fn move_batch(
    lab: &Lab,
    (way, cut): (Way, Cut),
    guests: &mut [Guest<'_>],
    moment: Duration,
    outcome: &mut Outcome,
) -> anyhow::Result<()> {
    ensure!(!interrupt::received(), "interrupted");
    let mut moving: Vec<Child> = Vec::new();
    for guest in guests.iter() {
        moving.push(guest.command(way, false).spawn()?);
        std::thread::sleep(APART);
    }
    std::thread::sleep(moment);
    cut.begin(lab)?;
    let begun = Instant::now();
    let mut was_cut = Vec::new();
    for (guest, child) in guests.iter().zip(&mut moving) {
        let is_over = child.try_wait()?.is_some();
        // Nothing passes, so this does not change until the link is back.
        let state = lab.hosts[guest.host].libvirt.domain_state(guest.name());
        was_cut.push(!is_over && state.as_deref() == Some("running"));
    }
    std::thread::sleep(CUT.saturating_sub(begun.elapsed()));
    cut.end(lab)?;
    for ((guest, child), was_cut) in guests.iter_mut().zip(moving).zip(was_cut) {
        let done = child.wait_with_output()?;
        let failed = u32::from(!done.status.success());
        let (count, failures) = match was_cut {
            true => (&mut outcome.cut_at_source, &mut outcome.failed),
            false => (&mut outcome.others, &mut outcome.others_failed),
        };
        (*count, *failures) = (*count + 1, *failures + failed);
        if failed > 0 {
            // QEMU may go on trying for many minutes after libvirt has given up, and libvirt would
            // refuse the next migration. There may be no job.
            drop(lab.hosts[guest.host].libvirt.virsh(&["domjobabort", guest.name()]));
            let said = String::from_utf8_lossy(&done.stderr).into_owned();
            eprintln!("libvirt: {}: {}: {}", way.name(), guest.name(), said.trim());
            eprintln!("{}", lab.daemons_said());
        }
        let running = |host: usize| {
            lab.hosts[host].libvirt.domain_state(guest.name()).as_deref() == Some("running")
        };
        match [running(0), running(1)] {
            [true, false] => guest.host = 0,
            [false, true] => guest.host = 1,
            _ => outcome.lost += 1,
        }
        ensure!(outcome.lost == 0, "{} does not run on exactly one host", guest.name());
        guest.check().with_context(|| guest.name().to_owned())?;
    }
    Ok(())
}
