//! Migrations during which the cable is unplugged for 10 s.

use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::Serialize;

use super::guest::{Guest, Workload};
use super::lab::Lab;
use super::way::Way;
use crate::interrupt;

/// For how long the cable is unplugged.
const CUT: Duration = Duration::from_secs(10);

/// Time between the starts of two migrations of a batch, which the cut thus hits at different
/// moments.
const APART: Duration = Duration::from_millis(250);

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
    /// Migrations that were under way while the cable was unplugged, with the guest running at the
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

/// Moves guests in batches until at least `wanted` migrations were cut.
pub fn measure(lab: &Lab, way: Way, wanted: u32, together: usize) -> anyhow::Result<Outcome> {
    let mut guests: Vec<Guest<'_>> = (0..together)
        .map(|number| {
            let name = format!("cut-{}-{number}", way as u8);
            let options = "program=48 hot=8 rest=5000".to_owned();
            Guest::begin(lab, &Workload { name, mib: 128, options }, None)
        })
        .collect();
    guests.iter().for_each(Guest::wait_until_it_works);
    let mut outcome = Outcome { way: way.name(), ..Outcome::default() };
    for moment in MOMENTS.iter().cycle().take(MAX_BATCHES) {
        let left = wanted.saturating_sub(outcome.cut_at_source) as usize;
        if left == 0 {
            break;
        }
        let these = left.min(together);
        move_batch(lab, way, &mut guests[..these], *moment, &mut outcome)?;
        eprintln!(
            "libvirt: cut of 10 s, {}: {} of {} failed",
            way.name(),
            outcome.failed,
            outcome.cut_at_source
        );
    }
    for guest in guests {
        guest.end();
    }
    Ok(outcome)
}

fn move_batch(
    lab: &Lab,
    way: Way,
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
    lab.networks.set_cable(false)?;
    let begun = Instant::now();
    let mut was_cut = Vec::new();
    for (guest, child) in guests.iter().zip(&mut moving) {
        let is_over = child.try_wait()?.is_some();
        // Nothing passes, so this does not change until the cable is plugged in.
        let state = lab.hosts[guest.host].libvirt.domain_state(guest.name());
        was_cut.push(!is_over && state.as_deref() == Some("running"));
    }
    std::thread::sleep(CUT.saturating_sub(begun.elapsed()));
    lab.networks.set_cable(true)?;
    for ((guest, child), was_cut) in guests.iter_mut().zip(moving).zip(was_cut) {
        let done = child.wait_with_output()?;
        let failed = u32::from(!done.status.success());
        let (count, failures) = match was_cut {
            true => (&mut outcome.cut_at_source, &mut outcome.failed),
            false => (&mut outcome.others, &mut outcome.others_failed),
        };
        (*count, *failures) = (*count + 1, *failures + failed);
        if failed > 0 {
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
