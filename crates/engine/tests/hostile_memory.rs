//! Limits on the memory that hostile peers can make a host allocate. The attacked host is a
//! separate process, so only its own memory is measured: the peak resident size (`VmHWM`) since the
//! attack began.

#[path = "engine/hostile/by_hand.rs"]
mod by_hand;
#[path = "engine/support/mod.rs"]
mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use by_hand::{Line, Pki, SESSION, accepted, announcement, begin, hello, policy};
use support::{DestinationGuest, Scenario, running_guest};
use vmferry::destination::receive;
use vmferry::source::{SourceOutcome, migrate};
use vmferry_memory::SlotId;
use vmferry_transport::{Address, Dialer, Listener};
use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlMessage, HELLO_BYTES, Hello, HelloReply, HelloStatus,
    MAX_FINAL_BYTES, MAX_FREE_RUNS, PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN, Role, Token,
};

const MIB: u64 = 1 << 20;

/// Limit of what all connections in their greeting may hold: see `destination::reception`.
const GREETINGS: u64 = 11 * MIB;

/// Limit of what may be received over gRPC before its reader takes it: see docs/security.md.
const GRPC_WINDOW: u64 = 8 * MIB;

/// What the first connections of a process leave allocated: stacks, the allocator's arenas, a
/// runtime.
const SLACK: u64 = 9 * MIB;

/// The largest device state.
const STATE: u64 = 64 * MIB;

/// The type number of FINAL.
const FINAL: u8 = 5;

/// Longer than any test takes: the process is killed before.
const PREPARES: Duration = Duration::from_secs(3600);

/// Environment variable with the child's role.
const CHILD: &str = "VMFERRY_TEST_HOSTILE_MEMORY";

/// A host in another process.
struct Victim {
    child: Child,
    address: Address,
    held_before: u64,
    _stdin: ChildStdin,
}

impl Victim {
    /// A destination that listens at an address of this type.
    fn destination(pki: &Pki, at: &str) -> Self {
        let order = format!("destination {} {at}", pki.path("").display());
        Self::start(&order)
    }

    /// The same, with a VMM that takes [`PREPARES`] to prepare for a guest.
    fn slow_destination(pki: &Pki, at: &str) -> Self {
        let order = format!("slow-destination {} {at}", pki.path("").display());
        Self::start(&order)
    }

    /// A source that migrates to this address.
    fn source(to: &Address) -> Self {
        Self::start(&format!("source - {to}"))
    }

    fn start(order: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_process_of_the_test", "--nocapture"])
            .env(CHILD, order)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // With one processor, libtest prints the test's name before it on the same line.
        let address = lines.find_map(|line| {
            line.unwrap().split_once("address ").map(|(_, address)| address.parse().unwrap())
        });
        // Its later output is not needed, and must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        let _stdin = child.stdin.take().unwrap();
        Self { child, address: address.unwrap(), held_before: 0, _stdin }
    }

    /// Starts the measurement of its memory.
    fn is_attacked(&mut self) {
        std::fs::write(format!("/proc/{}/clear_refs", self.child.id()), "5").unwrap();
        self.held_before = self.most_held();
    }

    fn most_held(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    fn has_held_at_most(&self, bytes: u64) {
        let held = self.most_held().saturating_sub(self.held_before);
        println!("{}: {} KiB", self.address, held >> 10);
        assert!(held <= bytes, "{}: {} MiB more were held", self.address, held / MIB);
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process that the tests attack; not a test. It ends with its standard input.
#[test]
fn child_process_of_the_test() {
    let Ok(order) = std::env::var(CHILD) else { return };
    let words: Vec<&str> = order.splitn(3, ' ').collect();
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    let address: Address = words[2].parse().unwrap();
    let mut scenario = Scenario::new();
    if words[0] == "source" {
        println!("address {address}");
        let dialer = Dialer::new(address.clone(), None);
        let vm = running_guest(0);
        let outcome = migrate(vm, &dialer, scenario.source, &scenario.orders, &mut |_| {});
        assert!(matches!(outcome, SourceOutcome::Kept { .. }));
        std::thread::park();
    }
    let pki = Pki::at(words[1].into());
    let tls = !matches!(address, Address::Tcp { .. });
    let listener = Listener::bind(&address, tls.then(|| pki.identity("destination"))).unwrap();
    println!("address {}", listener.local_address());
    scenario.destination.once = false;
    scenario.destination.policy = tls.then(|| policy(&pki.path("policy.toml")) as _);
    let slow = if words[0] == "slow-destination" { PREPARES } else { Duration::ZERO };
    let vm = DestinationGuest { slow, ..DestinationGuest::default() };
    receive(listener, vm, &scenario.destination, &scenario.stop, &mut |_| {});
}

const WAYS: [&str; 4] =
    ["tcp:127.0.0.1:0", "tls:127.0.0.1:0", "grpc:127.0.0.1:0", "grpc-ack:127.0.0.1:0"];

/// The header of a FINAL of 64 MiB.
fn longest_header() -> [u8; CONTROL_HEADER_BYTES] {
    let mut header = [0; CONTROL_HEADER_BYTES];
    header[..4].copy_from_slice(&MAX_FINAL_BYTES.to_le_bytes());
    header[4] = FINAL;
    header
}

fn longest_final() -> Vec<u8> {
    let state = vec![7; STATE as usize - (64 << 10)][..].into();
    let mut message = Vec::new();
    let kind = vmferry_wire::SessionKind::PreCopy;
    ControlMessage::Final {
        lane_sequences: vec![1 << 40],
        digest: 0,
        state,
        paused: false,
        kind,
        storage_sample: Vec::new(),
    }
    .encode(PROTOCOL_VERSION_MAX, &mut message);
    message
}

fn said(message: &ControlMessage) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(PROTOCOL_VERSION_MAX, &mut bytes);
    bytes
}

#[test]
fn header_from_a_host_without_a_rule_allocates_nothing() {
    let pki = Pki::new();
    for way in WAYS {
        let mut victim = Victim::destination(&pki, way);
        let address = victim.address.clone();
        let open = |name: &str, role| {
            let mut line = Line::dial(&address, Some(&pki.identity(name)));
            line.write(&hello(role, 0, Token([0; 16])).encode());
            line
        };
        // The cost of the first connection is excluded.
        drop(open("stranger", Role::Query));
        victim.is_attacked();
        let header = longest_header();
        let mut lines: Vec<Line> = (0..18)
            .map(|index| {
                // On query channels, and on channels that announce a guest.
                let mut line =
                    open("stranger", if index % 2 == 0 { Role::Query } else { Role::Control });
                line.write(&header);
                line
            })
            .collect();
        // Each is refused or waits for others; further data on it is not read.
        for line in &mut lines {
            line.write(&[1; 4096]);
        }
        lines.into_iter().for_each(|mut line| line.read_to_end());
        victim.has_held_at_most(GREETINGS + SLACK);
    }
}

#[test]
fn excess_connections_stay_within_the_memory_limit() {
    let pki = Pki::new();
    for way in WAYS {
        let mut victim = Victim::destination(&pki, way);
        let mut first = Line::dial(&victim.address, Some(&pki.identity("stranger")));
        first.write(&hello(Role::Query, 0, Token([0; 16])).encode());
        drop(first);
        victim.is_attacked();
        // A greeting that is never complete, and whatever fits into the channel's windows after it.
        let lines: Vec<Line> =
            (0..18).map(|_| Line::dial(&victim.address, Some(&pki.identity("stranger")))).collect();
        std::thread::scope(|scope| {
            for mut line in lines {
                scope.spawn(move || {
                    line.write(&hello(Role::Query, 0, Token([0; 16])).encode());
                    let header = longest_header();
                    line.write(&header);
                    // Refused at once, or not read.
                    line.give_up_writing_when_stuck();
                    let piece = vec![0; 64 << 10];
                    while line.try_write(&piece) {}
                    line.read_to_end();
                });
            }
        });
        let windows = if way.starts_with("grpc") { 18 * GRPC_WINDOW } else { 0 };
        victim.has_held_at_most(GREETINGS + windows + SLACK);
    }
}

#[test]
fn source_that_reads_no_answers_fills_no_queue_with_states() {
    let pki = Pki::new();
    for way in WAYS {
        let mut victim = Victim::destination(&pki, way);
        let (mut line, _) = accepted(&victim.address, &pki, "source");
        let last = longest_final();
        victim.is_attacked();
        line.give_up_writing_when_stuck();
        let pings: Vec<u8> =
            (0..10_000).flat_map(|nonce| said(&ControlMessage::Ping { nonce })).collect();
        let _ = (0..10).all(|_| line.try_write(&pings)) && (0..16).all(|_| line.try_write(&last));
        line.read_to_end();
        victim.has_held_at_most(STATE + 32 * MIB);
    }
}

/// The session's thread is in its VMM, so nothing is answered or refused.
#[test]
fn source_that_sends_during_preparation_fills_no_queue() {
    let pki = Pki::new();
    for way in WAYS {
        let mut victim = Victim::slow_destination(&pki, way);
        let mut line = Line::dial(&victim.address, Some(&pki.identity("source")));
        assert_eq!(line.greet(hello(Role::Control, 0, Token([0; 16]))), HelloStatus::Ok);
        line.say(&begin(SESSION));
        victim.is_attacked();
        line.give_up_writing_when_stuck();
        // No message that is valid at any time is larger.
        let runs = (0..MAX_FREE_RUNS as u64).map(|run| (2 * run, 1)).collect();
        let free = said(&ControlMessage::Free { slot: SlotId(0), runs });
        let _ = (0..8000).all(|_| line.try_write(&free));
        victim.has_held_at_most(32 * MIB);
    }
}

#[test]
fn repeated_states_are_held_once() {
    let pki = Pki::new();
    for way in WAYS {
        let mut victim = Victim::destination(&pki, way);
        let last = longest_final();
        // Withdrawn each time, as a source may do: the next one is read while the previous one is
        // freed.
        let (mut line, _) = accepted(&victim.address, &pki, "source");
        victim.is_attacked();
        line.give_up_writing_when_stuck();
        let withdraw = said(&ControlMessage::Withdraw {});
        let _ = (0..6).all(|_| line.try_write(&last) && line.try_write(&withdraw));
        // Then without withdrawing.
        let _ = (0..6).all(|_| line.try_write(&last));
        line.read_to_end();
        victim.has_held_at_most(2 * STATE + 32 * MIB);
    }
}

#[test]
fn destination_that_sends_source_messages_fills_no_source() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = Address::Tcp { host: "127.0.0.1".into(), port };
    let mut victim = Victim::source(&address);
    let (mut socket, _) = listener.accept().unwrap();
    let mut greeting = [0; HELLO_BYTES];
    socket.read_exact(&mut greeting).unwrap();
    Hello::parse(&greeting).unwrap();
    let (version_min, version_max) = (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX);
    let version = PROTOCOL_VERSION_MAX;
    let reply =
        HelloReply { status: HelloStatus::Ok, version_min, version_max, version, placed: 0 };
    let last = longest_final();
    victim.is_attacked();
    socket.write_all(&reply.encode()).unwrap();
    // The source closes the channel at the first of them.
    let _ = (0..4).all(|_| socket.write_all(&last).is_ok());
    let _ = socket.read_to_end(&mut Vec::new());
    victim.has_held_at_most(24 * MIB);
}

#[test]
fn announcement_of_the_test_helpers_is_accepted() {
    // The helpers of this program send what a source sends: a destination accepts it.
    let pki = Pki::new();
    let victim = Victim::destination(&pki, "tls:127.0.0.1:0");
    let (mut line, _) = accepted(&victim.address, &pki, "source");
    line.write(&said(&ControlMessage::Query { session: SESSION, offer: None }));
    assert!(matches!(line.hear(), ControlMessage::Answer { session: SESSION, .. }));
    assert!(!announcement(SESSION).is_empty());
}
