//! The same guest moved by `vmferry fleet move` and by `vmferry send`, in turn, to receivers that
//! the daemons start by the same template.
//!
//! The moment of the first page is the time in the event `round-started` of the first round. In
//! both ways the process that sends the guest is a `vmferry send`, and it prints this event when
//! both hosts have agreed, directly before the first page is read and sent. The agent keeps that
//! output in a file. All clocks are this machine's.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::etcd::Traffic;
use super::host::Host;
use super::place::Place;

/// How often the file with the output of the process that sends is looked for.
const LOOK_PERIOD: Duration = Duration::from_millis(2);

/// The time between two turns of an agent.
const AGENT_PERIOD: Duration = Duration::from_millis(500);

/// How the guest is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    Order,
    Send,
}

impl Way {
    pub const ALL: [Self; 2] = [Self::Order, Self::Send];

    pub fn name(self) -> &'static str {
        match self {
            Self::Order => "fleet move",
            Self::Send => "send --template",
        }
    }
}

/// A step on the way to the first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The order is in etcd.
    Ordered,
    /// The destination's agent has admitted the guest.
    Admitted,
    /// The source's agent has started the process that sends the guest.
    Started,
    /// The destination's daemon has started the receiver, and prepares its QEMU.
    Receiving,
    /// The process that sends the guest begins with the first page.
    FirstPage,
}

impl Step {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ordered => "order written",
            Self::Admitted => "admitted by the destination's agent",
            Self::Started => "send started by the source's agent",
            Self::Receiving => "receiver started by the daemon",
            Self::FirstPage => "first page",
        }
    }
}

/// One move.
pub struct Moved {
    /// Milliseconds from the start of the command to each step.
    pub steps: BTreeMap<Step, f64>,
    /// The same to the end of the command.
    pub total_ms: f64,
    /// CPU time of the command, the daemons, the agents, and the process that sends the guest.
    pub cpu_s: f64,
    /// What etcd served from the order to the end of the command.
    pub until_done: Traffic,
    /// The same until the fleet shows the guest at its destination.
    pub until_shown: Traffic,
}

/// Moves the guest `tested` from a host to the other one. `others` is the number of guests that
/// stay at the source.
pub fn move_tested(place: &Place, from: usize, way: Way, others: usize) -> anyhow::Result<Moved> {
    let socket = place.finds_tested(from, others + 1)?;
    // The agents have just taken a turn, and look at their journals and guests once per period. An
    // operator orders at any time in it.
    std::thread::sleep(AGENT_PERIOD.mul_f64(fastrand::f64()));
    let (cpu_s, before) = (place.cpu_s()?, place.served()?);
    let begun = SystemTime::now();
    let (mut steps, output) = match way {
        Way::Order => order(place, from, begun)?,
        // Nothing is ordered and admitted.
        Way::Send => (BTreeMap::new(), send(place, from, &socket)?),
    };
    let total_ms = begun.elapsed().context("the clock was set back")?.as_secs_f64() * 1e3;
    let done = place.served()?;
    let cpu_s = place.cpu_s()? - cpu_s;
    // `send` prints it when the daemon has answered.
    let receiving = moment(&output, begun, |line| line["event"] == "started")?;
    steps.insert(Step::Receiving, receiving);
    let is_first = |line: &Value| line["event"] == "round-started" && line["round"] == 1;
    steps.insert(Step::FirstPage, moment(&output, begun, is_first)?);
    place.finds_tested(1 - from, 1)?;
    place.shows(from, others)?;
    let shown = place.served()?;
    let (until_done, until_shown) = (done.since(&before), shown.since(&before));
    Ok(Moved { steps, total_ms, cpu_s, until_done, until_shown })
}

/// What a process has printed.
type Lines = Vec<Value>;

/// Moves it by an order. Returns the steps that agents take, and the output of the process that has
/// sent the guest.
fn order(
    place: &Place,
    from: usize,
    begun: SystemTime,
) -> anyhow::Result<(BTreeMap<Step, f64>, Lines)> {
    let [source, destination] = [from, 1 - from].map(|host| &place.hosts[host]);
    let mut command = place.order(&["move", "tested"]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut sender = None;
    while child.try_wait()?.is_none() {
        // The agent removes it after the migration: it is opened before, and read afterwards.
        sender = sender.or_else(|| output_of_sender(source));
        // A wait for either the file or the end of the command must poll.
        std::thread::sleep(LOOK_PERIOD);
    }
    let said = lines(&succeeded(child.wait_with_output()?)?.stdout)?;
    let admitted = destination.event(|event| event["event"] == "move-answered")?;
    let ordered = |line: &Value| line["event"] == "move" && line["phase"] == "ordered";
    let mut sender = sender.context("the process that sent the guest was not seen")?;
    let steps = BTreeMap::from([
        (Step::Ordered, moment(&said, begun, ordered)?),
        (Step::Admitted, moment(&[admitted], begun, |_| true)?),
        // The agent makes the file for the process that it starts.
        (Step::Started, ms_between(begun, sender.metadata()?.created()?)),
    ]);
    let mut text = Vec::new();
    sender.read_to_end(&mut text)?;
    Ok((steps, lines(&text)?))
}

/// The output of the process that sends a guest by order of the agent, once it has begun.
fn output_of_sender(host: &Host) -> Option<File> {
    let mut entries = std::fs::read_dir(host.moves()).ok()?.flatten();
    File::open(entries.next()?.path()).ok()
}

/// Moves it by the command that the agent would start, and returns its output.
fn send(place: &Place, from: usize, socket: &Path) -> anyhow::Result<Lines> {
    let [source, destination] = [from, 1 - from].map(|host| &place.hosts[host]);
    let mut command = source.command();
    command.args(["send", "--qemu"]).arg(socket).arg("--tls").arg(&source.tls);
    command.args(["--to", &format!("tls:{}", destination.address), "--template", "default"]);
    command.arg("--witness").arg(source.witness());
    lines(&succeeded(command.stdin(Stdio::null()).output()?)?.stdout)
}

/// The output of a command that has succeeded.
pub fn succeeded(output: Output) -> anyhow::Result<Output> {
    let said = || String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "vmferry has failed: {}", said());
    Ok(output)
}

/// The objects that a process has printed.
pub fn lines(text: &[u8]) -> anyhow::Result<Lines> {
    let text = std::str::from_utf8(text)?;
    Ok(text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// Milliseconds until the first such event.
fn moment(
    lines: &[Value],
    begun: SystemTime,
    wanted: impl Fn(&Value) -> bool,
) -> anyhow::Result<f64> {
    let event = lines.iter().find(|line| wanted(line)).context("an event was not printed")?;
    let time = event["time"].as_str().context("an event has no time")?;
    Ok(ms_between(begun, humantime::parse_rfc3339(time)?))
}

/// Events have whole milliseconds, so one may seem to be older than the order.
fn ms_between(begun: SystemTime, then: SystemTime) -> f64 {
    then.duration_since(begun).unwrap_or_default().as_secs_f64() * 1e3
}
