//! The end of a carried guest's post-copy, without an engine and without a destination.

use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmferry::vmm::streamed::{LateStreams, StreamEvent, StreamedVm};
use vmferry_qemu::{CarriedSource, Qmp};
use vmferry_qemu_lab::{Backend, Machine, Version, World};

/// How long any step may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A QEMU that sends nothing for so long has sent its last page.
const SILENCE: Duration = Duration::from_secs(1);

/// By whom QEMU is told to start its post-copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Vmferry,
    /// As QEMU's documentation says.
    Operator,
}

/// Reads a stream to its end, and counts its bytes.
fn drain(mut stream: UnixStream, count: &Arc<AtomicU64>) {
    let count = Arc::clone(count);
    std::thread::spawn(move || {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(read @ 1..) = stream.read(&mut bytes) {
            count.fetch_add(read as u64, Ordering::Relaxed);
            // A slow link: otherwise QEMU comes to the end of its pre-copy at once.
            std::thread::sleep(Duration::from_millis(2));
        }
    });
}

fn ask(operator: &mut Qmp, command: &str) -> Value {
    operator.execute(command, json!({})).unwrap()
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        // Only clients that listen to vmferry's monitor are notified.
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Ends the streams of a guest's post-copy after the last page was sent. Returns the states of the
/// migration and of the guest.
fn states_after_the_end(start: Start) -> (Value, Value) {
    let world = World::new();
    let operator = world.path("operator.qmp");
    let monitor = format!("unix:{},server=on,wait=off", operator.display());
    let machine = Machine::on_kvm(Version::V10_0, "hot=8,rate=40000").with(&["-qmp", &monitor]);
    let machine = Machine { backend: Backend::Private, ..machine };
    let here = machine.start_booted(&world, "here");
    let mut operator = Qmp::connect(&operator).unwrap();
    let mut source = CarriedSource::attach(&here.qmp, 0).unwrap();
    source.allow_post_copy().unwrap();
    let (tell, events) = channel();
    let tell = move |event| {
        // An error means that the test has seen enough.
        let _ = tell.send(event);
    };
    let mut streams = source.begin(Duration::from_millis(1), Box::new(tell)).unwrap();
    let main = streams.remove(0).socket;
    let count = Arc::default();
    drain(main.try_clone().unwrap(), &count);
    while !matches!(events.recv_timeout(PATIENCE).unwrap(), StreamEvent::Pass { .. }) {}
    match start {
        Start::Vmferry => drop(source.begin_post_copy().unwrap()),
        Start::Operator => drop(ask(&mut operator, "migrate-start-postcopy")),
    }
    while !matches!(events.recv_timeout(PATIENCE).unwrap(), StreamEvent::Stopped { .. }) {}
    match start {
        Start::Vmferry => source.finish().unwrap(),
        Start::Operator => {
            let order = json!({ "state": "pre-switchover" });
            drop(operator.execute("migrate-continue", order).unwrap());
        }
    }
    let LateStreams { requests, urgent, .. } = source.late_streams().unwrap();
    let urgent = urgent.expect("QEMU has connected its further channel");
    drain(urgent.try_clone().unwrap(), &count);
    wait_for("QEMU does not send its pages", || {
        ask(&mut operator, "query-migrate")["ram"]["remaining"] == 0
    });
    let (mut before, mut since) = (0, Instant::now());
    wait_for("QEMU goes on sending", || {
        let now = count.load(Ordering::Relaxed);
        if std::mem::replace(&mut before, now) != now {
            since = Instant::now();
        }
        since.elapsed() >= SILENCE
    });
    for stream in [&main, &requests, &urgent] {
        // The same socket is shut down once.
        let _ = stream.shutdown(Shutdown::Both);
    }
    let mut migration = Value::Null;
    wait_for("QEMU does not notice it", || {
        migration = ask(&mut operator, "query-migrate")["status"].take();
        migration == "failed" || migration == "postcopy-paused"
    });
    // QEMU decides about its guest after it has given its migration up.
    wait_for("QEMU does not end its migration", || {
        let status = ask(&mut operator, "query-status")["status"].take();
        status != "finish-migrate" || migration != "failed"
    });
    (migration, ask(&mut operator, "query-status"))
}

/// Once the last page was sent, the destination has been running the guest for a while.
#[test]
fn guest_stays_paused_if_its_post_copy_fails_at_the_end() {
    let (migration, status) = states_after_the_end(Start::Vmferry);
    assert_eq!(migration, "failed", "QEMU 10.0 does not pause its post-copy any more");
    assert_eq!((&status["running"], &status["status"]), (&false.into(), &"paused".into()));
}

/// The control: QEMU itself continues the guest, which the destination runs.
#[test]
fn qemu_continues_such_a_guest_by_itself() {
    let (migration, status) = states_after_the_end(Start::Operator);
    assert_eq!((migration, &status["running"]), ("failed".into(), &true.into()));
}
