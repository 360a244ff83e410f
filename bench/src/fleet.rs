//! `fleet`: what a fleet costs, with etcd 3.4 (a cluster of three members with TLS), two hosts with
//! `vmferry daemon` and its agent, and QEMU 10.0 with the bare-metal guest on KVM.
//!
//! * The downtime of a guest that moves with the fleet's witness and without: the destination
//!   claims the guest in etcd while it is paused. The limit is the disk of etcd, which syncs a
//!   transaction at two members before it answers.
//! * The time from an order to the first page, beside `vmferry send` to the same template.
//! * The transactions of one order, from the start of `vmferry fleet move` to its end, at all
//!   members together. Those that the same hosts make in the same time without an order are
//!   subtracted.
//! * Memory and CPU time of an agent with many guests on its host.
//!
//! All processes share this machine and one disk: three members of etcd sync to it.

mod agent;
mod etcd;
mod host;
mod moves;
mod place;
mod rows;
mod witness;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::Context;
use vmferry_qemu_lab::{Machine, Qemu, Version};

use self::agent::{AgentMemory, When};
use self::moves::move_tested;
use self::place::Place;
use self::rows::{Idle, Measured};
use crate::results::{Results, median};

/// Memory of each guest in MiB.
const GUEST_MIB: u64 = 64;

/// The workload of the guest that moves.
const WORKLOAD: &str = "hot=2,rate=1000";

/// Writes of the yardstick.
const SYNCS: usize = 64;

/// How much is measured.
struct Size {
    /// Migrations with the witness, and as many without.
    witnessed: usize,
    /// Moves by order, and as many without.
    moves: usize,
    /// Guests on the host of the agent that is measured.
    guests: usize,
    /// How long an idle fleet and an idle agent are watched.
    idle: Duration,
}

const USUAL: Size = Size { witnessed: 15, moves: 12, guests: 20, idle: Duration::from_secs(40) };

const QUICK: Size = Size { witnessed: 1, moves: 1, guests: 2, idle: Duration::from_secs(2) };

/// Runs the benchmark. `quick` moves a guest once in each way, with 2 guests on the host.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let size = if quick { QUICK } else { USUAL };
    let machine = machine(WORKLOAD, "tested", 1);
    let place = Place::new(&machine)?;
    let mut agent = vec![AgentMemory::now(&place, When::Joined, 0)?];
    let mut tested = place.start(&machine, "tested");
    place.finds_tested(0, 1)?;
    let idle = Idle { guests: 1, orders: 0, traffic: place.idle(size.idle)? };
    let moved = move_in_turn(&place, size.moves)?;
    // Its first QEMU has ended.
    tested.child.wait()?;
    agent.push(AgentMemory::now(&place, When::Moved, 1)?);
    let witnessed = move_with_witness(&place, size.witnessed)?;

    let (guests, others) = (size.guests, size.guests - 1);
    let _others: Vec<Qemu> = (1..=others).map(|number| start_another(&place, number)).collect();
    place.shows(0, guests)?;
    agent.push(AgentMemory::now(&place, When::Published, guests)?);
    let cpu_s = agent::cpu_s(&place)?;
    let idle_with_guests = Idle { guests, orders: 1, traffic: place.idle(size.idle)? };
    let idle_agent_cpu_s = agent::cpu_s(&place)? - cpu_s;
    move_tested(&place, 0, moves::Way::Order, others)?;
    agent.push(AgentMemory::now(&place, When::MovedAway, others)?);
    eprintln!("fleet: an agent with {guests} guests was measured");

    let (idle, sync_us) = ([idle, idle_with_guests], sync_us(&place)?);
    Measured { witnessed, moved, idle, agent, idle_agent_cpu_s, sync_us }.results()
}

/// Moves the guest by an order and by `vmferry send`, back and forth. Each pass begins with the
/// other way.
fn move_in_turn(
    place: &Place,
    passes: usize,
) -> anyhow::Result<BTreeMap<moves::Way, Vec<moves::Moved>>> {
    let mut moved = BTreeMap::new();
    for pass in 0..passes {
        let mut ways = moves::Way::ALL;
        ways.rotate_left(pass % 2);
        for (from, way) in ways.into_iter().enumerate() {
            let sample = move_tested(place, from, way, 0).with_context(|| way.name())?;
            eprintln!(
                "fleet: {}, pass {} of {passes}: first page after {:.0} ms, {:.0} transactions",
                way.name(),
                pass + 1,
                sample.steps[&moves::Step::FirstPage],
                sample.until_done.transactions,
            );
            moved.entry(way).or_insert_with(Vec::new).push(sample);
        }
    }
    Ok(moved)
}

/// Moves another guest with the witness and without, back and forth. Each pass begins with the
/// other way.
fn move_with_witness(
    place: &Place,
    passes: usize,
) -> anyhow::Result<BTreeMap<witness::Way, Vec<witness::Sample>>> {
    let mut guest = witness::Guest::start(place, machine(WORKLOAD, "witnessed", 2));
    let mut samples = BTreeMap::new();
    for pass in 0..passes {
        let mut ways = witness::Way::ALL;
        ways.rotate_left(pass % 2);
        for way in ways {
            let sample = guest.move_on(way).with_context(|| way.name())?;
            samples.entry(way).or_insert_with(Vec::new).push(sample);
        }
        eprintln!("fleet: witness, pass {} of {passes}", pass + 1);
    }
    Ok(samples)
}

/// Starts one of the guests that stay on the first host. It writes nothing.
fn start_another(place: &Place, number: usize) -> Qemu {
    let name = format!("guest-{number}");
    place.start(&machine("idle", &name, 100 + number), &name)
}

/// A guest. Its UUID ends with `number`.
fn machine(workload: &str, name: &str, number: usize) -> Machine {
    let uuid = format!("6b1f7a4c-0000-4000-8000-{number:012}");
    // Its memory is a file, so it is attached. QEMU uses the last of several names.
    let machine = Machine::on_kvm(Version::V10_0, workload).with(&["-name", name, "-uuid", &uuid]);
    Machine { mib: GUEST_MIB, ..machine }
}

/// The time to append a record to a file on etcd's disk and to sync it, as etcd's log does: the
/// median in microseconds.
fn sync_us(place: &Place) -> anyhow::Result<f64> {
    let mut file = File::create(place.lab.world.path("yardstick"))?;
    let mut once = || -> anyhow::Result<f64> {
        let begun = Instant::now();
        file.write_all(&[1; 512])?;
        file.sync_data()?;
        Ok(begun.elapsed().as_secs_f64() * 1e6)
    };
    let times: Vec<f64> = (0..SYNCS).map(|_| once()).collect::<Result<_, _>>()?;
    Ok(median(times))
}
