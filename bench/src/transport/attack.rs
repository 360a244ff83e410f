//! A migration over TLS while an attacker without a certificate disturbs the destination, compared
//! with an undisturbed one.

use anyhow::Context;
use serde::Serialize;

use super::case::{Case, Link, Place, Way};
use super::run::{Bench, Run};
use super::{DEFAULT_CHANNELS, Plan};
use crate::aims::Ratios;
use crate::results::{least, median, most};

/// A row: with or without an attack, with or without a cap. Values are medians.
#[derive(Debug, Serialize)]
pub struct AttackRow {
    /// The place.
    place: &'static str,
    /// Whether there is a cap.
    link: &'static str,
    /// Whether there is an attack.
    attack: &'static str,
    total_ms: f64,
    total_ms_min: f64,
    total_ms_max: f64,
    source_cpu_s: f64,
    destination_cpu_s: f64,
    /// CPU time of the attacker, which runs on the same machine.
    attacker_cpu_s: f64,
    idle_connections: f64,
    failed_handshakes: f64,
    /// Rejected connections that the destination reported.
    turned_away: f64,
    runs: usize,
}

/// Measures with and without an attack in turn.
///
/// # Errors
/// A migration failed, or the destination accepted the attacker.
pub fn measure(plan: &Plan, bench: &mut Bench, place: Place) -> anyhow::Result<Vec<AttackRow>> {
    let mut rows = Vec::new();
    for (link, times) in plan.attack.iter().copied() {
        let case = Case { place, link, channels: DEFAULT_CHANNELS, way: Way::Tls };
        let (mut quiet, mut attacked) = (Vec::new(), Vec::new());
        for time in 1..=times {
            quiet.push(bench.run(case, plan.cap_of(link), 0)?);
            attacked.push(
                bench
                    .run(case, plan.cap_of(link), plan.idle_connections)
                    .context("under attack")?,
            );
            eprintln!("transport: under attack, {}: {time} of {times} done", link.name());
        }
        rows.push(row(case, "no", &quiet));
        rows.push(row(case, "yes", &attacked));
    }
    Ok(rows)
}

fn row(case: Case, attack: &'static str, runs: &[Run]) -> AttackRow {
    let of = |part: &dyn Fn(&Run) -> f64| median(runs.iter().map(part));
    let times = || runs.iter().map(|run| run.total_s * 1e3);
    let attacker = |run: &Run| run.attack.unwrap_or_default();
    AttackRow {
        place: case.place.name(),
        link: case.link.name(),
        attack,
        total_ms: median(times()),
        total_ms_min: least(times()),
        total_ms_max: most(times()),
        source_cpu_s: of(&|run| run.source_cpu_s),
        destination_cpu_s: of(&|run| run.destination_cpu_s),
        attacker_cpu_s: of(&|run| attacker(run).cpu_s),
        idle_connections: of(&|run| attacker(run).idle_connections as f64),
        failed_handshakes: of(&|run| attacker(run).failed_handshakes as f64),
        turned_away: of(&|run| run.turned_away as f64),
        runs: runs.len(),
    }
}

/// Adds the ratio of the total time with an attack to that without: for each link, and the larger
/// one.
///
/// # Errors
/// No attack was measured.
pub fn add_ratios(rows: &[AttackRow], ratios: &mut Ratios) -> anyhow::Result<()> {
    let mut all = Vec::new();
    for link in [Link::Capped, Link::Uncapped] {
        let total = |attack| {
            let wanted = |row: &&AttackRow| row.link == link.name() && row.attack == attack;
            rows.iter().find(wanted).map(|row| row.total_ms)
        };
        if let (Some(quiet), Some(attacked)) = (total("no"), total("yes")) {
            let name = format!("under_attack_over_quiet_{}", link.name());
            ratios.values.insert(name, attacked / quiet);
            all.push(attacked / quiet);
        }
    }
    let worst = all.into_iter().reduce(f64::max).context("no attack was measured")?;
    ratios.values.insert("under_attack_over_quiet".to_owned(), worst);
    Ok(())
}
