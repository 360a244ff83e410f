//! The tables and targets.

use std::collections::BTreeMap;

use serde::Serialize;

use super::agent::{AgentMemory, When};
use super::etcd::Traffic;
use super::moves::{self, Moved, Step};
use super::witness::{self, Sample};
use crate::aims::{Ratios, Target};
use crate::results::{Results, Row, least, median, most, row};

/// What the tables are about.
const HEADING: &str = "two hosts and an etcd 3.4 of three members on one machine; QEMU 10.0 with \
    bare-metal guests of 64 MiB on KVM; TLS everywhere";

/// All that was measured.
pub struct Measured {
    pub witnessed: BTreeMap<witness::Way, Vec<Sample>>,
    pub moved: BTreeMap<moves::Way, Vec<Moved>>,
    /// What etcd serves without orders: with one guest before any order, and with all guests and
    /// an order that is over.
    pub idle: [Idle; 2],
    pub agent: Vec<AgentMemory>,
    /// CPU time of an agent in the second of these times.
    pub idle_agent_cpu_s: f64,
    /// A write of etcd's disk.
    pub sync_us: f64,
}

/// What etcd serves without orders.
pub struct Idle {
    pub guests: usize,
    /// Objects of orders that are over.
    pub orders: usize,
    pub traffic: Traffic,
}

/// A migration with the witness or without.
#[derive(Serialize)]
struct WitnessRow {
    way: &'static str,
    downtime_ms: f64,
    downtime_ms_min: f64,
    downtime_ms_max: f64,
    commit_ms: f64,
    commit_ms_min: f64,
    commit_ms_max: f64,
    total_ms: f64,
    total_ms_min: f64,
    total_ms_max: f64,
    cpu_s: f64,
    runs: usize,
}

/// A move by order or by `vmferry send`.
#[derive(Serialize)]
struct MoveRow {
    way: &'static str,
    first_page_ms: f64,
    first_page_ms_min: f64,
    first_page_ms_max: f64,
    total_ms: f64,
    total_ms_min: f64,
    total_ms_max: f64,
    cpu_s: f64,
    runs: usize,
}

/// A step on the way to the first page, from the start of the command.
#[derive(Serialize)]
struct StepRow {
    way: &'static str,
    step: &'static str,
    after_ms: f64,
    after_ms_min: f64,
    after_ms_max: f64,
}

/// What etcd serves for one order, without what idle hosts ask.
#[derive(Serialize)]
struct OrderTraffic {
    until: &'static str,
    transactions: f64,
    transactions_min: f64,
    transactions_max: f64,
    /// Those of idle hosts in the same time, which were subtracted.
    idle_transactions: f64,
    reads: f64,
    seconds: f64,
}

/// What etcd serves without orders.
#[derive(Serialize)]
struct IdleTraffic {
    guests: usize,
    ended_orders: usize,
    reads_per_s: f64,
    transactions_per_s: f64,
    requests_per_s: f64,
    received_bytes_per_s: f64,
    sent_bytes_per_s: f64,
    seconds: f64,
}

impl Measured {
    /// Converts it to results.
    pub fn results(&self) -> anyhow::Result<Results> {
        let witnessed =
            self.witnessed.iter().map(|(way, samples)| row(&witness_row(*way, samples)));
        let yardsticks = BTreeMap::from([("etcd_disk_sync_us".to_owned(), self.sync_us)]);
        let ratios = self.ratios();
        let rows = witnessed.collect::<anyhow::Result<Vec<Row>>>()?;
        let mut results = Results::new("fleet", rows, yardsticks, ratios.values);
        results.heading = Some(HEADING);
        let moved = self.moved.iter().map(|(way, moved)| row(&move_row(*way, moved)));
        let order = [
            self.order_traffic("done", |moved| &moved.until_done),
            self.order_traffic("shown at the destination", |moved| &moved.until_shown),
        ];
        let idle = self.idle.iter().map(|idle| row(&idle_traffic(idle)));
        for (name, rows) in [
            ("moves", moved.collect::<anyhow::Result<Vec<Row>>>()?),
            ("steps_to_the_first_page", self.steps()?),
            ("etcd_for_one_order", order.iter().map(row).collect::<anyhow::Result<_>>()?),
            ("etcd_without_orders", idle.collect::<anyhow::Result<_>>()?),
            ("agent", self.agent.iter().map(row).collect::<anyhow::Result<_>>()?),
            ("aims", ratios.aims.iter().map(row).collect::<anyhow::Result<_>>()?),
        ] {
            results.more.insert(name, rows);
        }
        Ok(results)
    }

    fn steps(&self) -> anyhow::Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (way, moved) in &self.moved {
            let mut steps: BTreeMap<Step, Vec<f64>> = BTreeMap::new();
            for (step, ms) in moved.iter().flat_map(|moved| &moved.steps) {
                steps.entry(*step).or_default().push(*ms);
            }
            for (step, times) in steps {
                let times = || times.iter().copied();
                rows.push(row(&StepRow {
                    way: way.name(),
                    step: step.name(),
                    after_ms: median(times()),
                    after_ms_min: least(times()),
                    after_ms_max: most(times()),
                })?);
            }
        }
        Ok(rows)
    }

    fn order_traffic(
        &self,
        until: &'static str,
        part: impl Fn(&Moved) -> &Traffic,
    ) -> OrderTraffic {
        let all = || self.moved[&moves::Way::Order].iter().map(&part);
        let idle = &self.idle[0].traffic;
        let without_idle = |of: fn(&Traffic) -> f64| -> Vec<f64> {
            let per_second = of(idle) / idle.seconds;
            all().map(|traffic| of(traffic) - per_second * traffic.seconds).collect()
        };
        let transactions = without_idle(|traffic| traffic.transactions);
        let seconds = median(all().map(|traffic| traffic.seconds));
        OrderTraffic {
            until,
            transactions: median(transactions.iter().copied()),
            transactions_min: least(transactions.iter().copied()),
            transactions_max: most(transactions.iter().copied()),
            idle_transactions: idle.transactions / idle.seconds * seconds,
            reads: median(without_idle(|traffic| traffic.reads)),
            seconds,
        }
    }

    fn ratios(&self) -> Ratios {
        let downtime = |way| median(self.witnessed[&way].iter().map(|sample| sample.downtime_ms));
        let first_page =
            |way| median(self.moved[&way].iter().map(|moved| moved.steps[&Step::FirstPage]));
        let order = self.order_traffic("done", |moved| &moved.until_done);
        let [idle, idle_with_guests] = &self.idle;
        let mut ratios = Ratios::default();
        ratios.aim(
            "witness_downtime_ms",
            downtime(witness::Way::Witness) - downtime(witness::Way::NoWitness),
            Target::AtMost(10.0),
            "what the witness adds to the downtime",
        );
        ratios.aim(
            "etcd_transactions_per_migration",
            order.transactions,
            Target::AtMost(12.0),
            "from the order to done, without those of idle hosts",
        );
        ratios.aim(
            "move_overhead_ms",
            first_page(moves::Way::Order) - first_page(moves::Way::Send),
            Target::AtMost(300.0),
            "first page of an order, later than that of send",
        );
        let with_guests = self.agent.iter().filter(|agent| agent.when >= When::Published);
        ratios.aim(
            "agent_rss_mib",
            most(with_guests.map(|agent| agent.rss_mib)),
            Target::AtMost(32.0),
            "memory of an agent with all guests on its host",
        );
        let commit = |way| median(self.witnessed[&way].iter().map(|sample| sample.commit_ms));
        let more = [
            ("witness_commit_ms", commit(witness::Way::Witness) - commit(witness::Way::NoWitness)),
            ("idle_reads_per_s", idle.traffic.reads / idle.traffic.seconds),
            (
                "idle_agent_cpu_s_per_hour",
                self.idle_agent_cpu_s / idle_with_guests.traffic.seconds * 3600.0,
            ),
        ];
        ratios.values.extend(more.map(|(name, value)| (name.to_owned(), value)));
        ratios
    }
}

fn witness_row(way: witness::Way, samples: &[Sample]) -> WitnessRow {
    let all = |part: fn(&Sample) -> f64| samples.iter().map(part);
    WitnessRow {
        way: way.name(),
        downtime_ms: median(all(|sample| sample.downtime_ms)),
        downtime_ms_min: least(all(|sample| sample.downtime_ms)),
        downtime_ms_max: most(all(|sample| sample.downtime_ms)),
        commit_ms: median(all(|sample| sample.commit_ms)),
        commit_ms_min: least(all(|sample| sample.commit_ms)),
        commit_ms_max: most(all(|sample| sample.commit_ms)),
        total_ms: median(all(|sample| sample.total_ms)),
        total_ms_min: least(all(|sample| sample.total_ms)),
        total_ms_max: most(all(|sample| sample.total_ms)),
        cpu_s: median(all(|sample| sample.cpu_s)),
        runs: samples.len(),
    }
}

fn move_row(way: moves::Way, moved: &[Moved]) -> MoveRow {
    let all = |part: fn(&Moved) -> f64| moved.iter().map(part);
    let first_page = |moved: &Moved| moved.steps[&Step::FirstPage];
    MoveRow {
        way: way.name(),
        first_page_ms: median(all(first_page)),
        first_page_ms_min: least(all(first_page)),
        first_page_ms_max: most(all(first_page)),
        total_ms: median(all(|moved| moved.total_ms)),
        total_ms_min: least(all(|moved| moved.total_ms)),
        total_ms_max: most(all(|moved| moved.total_ms)),
        cpu_s: median(all(|moved| moved.cpu_s)),
        runs: moved.len(),
    }
}

fn idle_traffic(idle: &Idle) -> IdleTraffic {
    let Idle { guests, orders, traffic } = idle;
    let seconds = traffic.seconds;
    IdleTraffic {
        guests: *guests,
        ended_orders: *orders,
        reads_per_s: traffic.reads / seconds,
        transactions_per_s: traffic.transactions / seconds,
        requests_per_s: traffic.requests / seconds,
        received_bytes_per_s: traffic.received_bytes / seconds,
        sent_bytes_per_s: traffic.sent_bytes / seconds,
        seconds,
    }
}
