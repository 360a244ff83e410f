//! The device state is in no core dump on its way from one VMM to the other: a source and a
//! destination crash while they hold it, and their dumps are searched.

#[path = "../../memory/tests/dumps/mod.rs"]
mod dumps;
#[path = "engine/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use dumps::{PAGES, PATTERN, are_kept_out, fill, hold, order, patterns};
use support::{DestinationGuest, Scenario, running_guest};
use vmferry::destination::receive;
use vmferry::source::migrate;
use vmferry_doubles::{DestinationDouble, SourceDouble};
use vmferry_memory::GuestBytes;
use vmferry_transport::{Address, Dialer, Listener};

/// Bytes of the state for each pattern. Together they exceed the buffer of a socket.
const STRIDE: usize = 64 << 10;

/// Timeout for the state's arrival.
const PATIENCE: Duration = Duration::from_secs(60);

/// The child prints this when it listens.
const LISTENING: &str = "listening";

#[test]
fn source_that_sends_device_state_has_it_in_no_core_dump() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("relay.sock");
    are_kept_out(&format!("source {}", path.display()), &patterns(PAGES), |child| {
        let scenario = Scenario::new();
        let Address::Unix(behind) = scenario.listen_at.clone() else { unreachable!() };
        let destination = Listener::bind(&scenario.listen_at, None).unwrap();
        // These threads end with the child.
        std::thread::spawn(move || {
            let vm = DestinationGuest::default();
            receive(destination, vm, &scenario.destination, &scenario.stop, &mut |_| ())
        });
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let (seen, state) = channel();
        std::thread::spawn(move || relay(&listener, &behind, &seen));
        child.go_on();
        state.recv_timeout(PATIENCE).expect("the state arrives");
        // The child's threads keep waiting for the relay, which has stopped reading.
        child.go_on();
    });
}

#[test]
fn destination_that_loads_device_state_has_it_in_no_core_dump() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("in.sock");
    are_kept_out(&format!("destination {}", path.display()), &patterns(PAGES), |child| {
        child.says(LISTENING);
        let dialer = Dialer::new(Address::Unix(path.clone()), None);
        // This thread ends with the child.
        std::thread::spawn(move || {
            let Scenario { source, orders, directory: _directory, .. } = Scenario::new();
            let vm = running_guest(8);
            let guest = vm.guest.clone();
            migrate(SourceDouble::with_state(vm, state), &dialer, source, &orders, &mut |_| ());
            guest.pause();
        });
    });
}

/// The process that the tests above crash; not a test.
#[test]
fn child_process_of_the_test() {
    let Some((kind, undone)) = order() else { return };
    let (side, path) = kind.split_once(' ').unwrap();
    let (scenario, at) = (Scenario::new(), Address::Unix(PathBuf::from(path)));
    if side == "source" {
        let go_on = || std::io::stdin().read_exact(&mut [0]).unwrap();
        go_on();
        std::thread::spawn(move || {
            go_on();
            hold(undone);
        });
        let vm = SourceDouble::with_state(running_guest(8), state);
        let dialer = Dialer::new(at, None);
        migrate(vm, &dialer, scenario.source, &scenario.orders, &mut |_| ());
    } else {
        let listener = Listener::bind(&at, None).unwrap();
        println!("{LISTENING}");
        // It crashes while it loads the state.
        let vm = DestinationDouble::before_load(DestinationGuest::default(), move |_, state| {
            assert_eq!(state.len(), PAGES as usize * STRIDE);
            hold(undone)
        });
        receive(listener, vm, &scenario.destination, &scenario.stop, &mut |_| ());
    }
    unreachable!("the migration has ended");
}

/// Forwards what the source sends except its state. Reports when the state arrives, and stops
/// there.
fn relay(listener: &UnixListener, behind: &PathBuf, seen: &Sender<()>) {
    let first = &patterns(1)[0];
    std::thread::scope(|scope| {
        // This thread ends with the test.
        loop {
            let (near, _) = listener.accept().unwrap();
            let far = UnixStream::connect(behind).unwrap();
            let (mut from, mut to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            scope.spawn(move || std::io::copy(&mut from, &mut to));
            let (mut from, mut to) = (near, far);
            scope.spawn(move || {
                let mut bytes = Vec::new();
                loop {
                    // A pattern may be split over two reads.
                    let before = bytes.len().saturating_sub(PATTERN);
                    bytes.drain(..before);
                    let (kept, mut piece) = (bytes.len(), [0; 4096]);
                    let Ok(read @ 1..) = from.read(&mut piece) else { return };
                    bytes.extend_from_slice(&piece[..read]);
                    if bytes.windows(PATTERN).any(|window| window == first) {
                        seen.send(()).unwrap();
                        // The child's sockets must stay as they are until it has crashed.
                        std::thread::park();
                    }
                    if to.write_all(&bytes[kept..]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

/// A recognizable state.
fn state() -> GuestBytes {
    let mut state = GuestBytes::new();
    for page in 0..PAGES {
        let at = state.len();
        state.extend_to(at + STRIDE);
        fill(page, &mut state[at..]);
    }
    state
}
