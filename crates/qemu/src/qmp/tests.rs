//! The client's view of QEMUs that do not answer, or send too much.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

use super::*;

/// How long the tests wait for answers that do not come.
const PATIENCE: Duration = Duration::from_millis(300);

/// How long a fake QEMU keeps sending: far beyond every deadline, so that a missed deadline ends in
/// a closed connection and not in a test that hangs.
const TALKS_FOR: Duration = Duration::from_secs(60);

/// A greeting, and the answers to the two commands of a connection's beginning.
const GREETING: &str = concat!(
    r#"{"QMP":{"version":{"qemu":{"major":10,"minor":0,"micro":2}}}}"#,
    "\n",
    r#"{"return":{},"id":1}"#,
    "\n",
    r#"{"return":[],"id":2}"#,
);

/// A fake QEMU that greets its client, answers two commands, and then repeats `said` until the
/// client is gone.
fn endless(said: &'static str) -> (UnixStream, JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let talking = std::thread::spawn(move || {
        writeln!(theirs, "{GREETING}").unwrap();
        let since = Instant::now();
        while since.elapsed() < TALKS_FOR && theirs.write_all(said.as_bytes()).is_ok() {}
    });
    (ours, talking)
}

#[test]
fn full_listen_queue_is_retried() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    // The same backlog as QEMU's.
    rustix::net::listen(&listener, 1).unwrap();
    // Clients that have given up keep their places, as nothing accepts them.
    let pids: Vec<Option<u32>> = (0..5)
        .map(|number| {
            let Err(error) = Qmp::connect_within(&path, Duration::from_millis(20)) else {
                panic!("no client was answered")
            };
            assert!(error.is_timeout(), "attempt {number}: {error}");
            assert!(crate::QemuError::from(error).is_timeout());
            let Err(error) = Qmp::connect_within(&path, Duration::from_millis(20)) else {
                panic!("no client was answered")
            };
            let QmpError::TimedOut { pid, .. } = error else { panic!("{error}") };
            pid
        })
        .collect();
    assert_eq!(pids[0], Some(std::process::id()), "it had a place");
    assert_eq!(pids[1..], [None; 4], "the queue was full");
    let Err(error) = Qmp::connect_within(&path, Duration::from_millis(20)) else { panic!() };
    assert!(error.to_string().contains("`kill -CONT`"), "{error}");
}

/// Waiting for an answer, or for an event, takes no longer because other events come.
#[test]
fn deadlines_hold_under_endless_events() {
    let (stream, talking) = endless("{\"event\":\"BALLOON_CHANGE\",\"data\":{\"actual\":1}}\n");
    let mut qmp = Qmp::over_within(stream, Path::new("fake"), PATIENCE).unwrap();
    let error = qmp.execute("query-status", json!({})).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    let error = qmp.wait_for("stop", PATIENCE, |event| event["event"] == "STOP").unwrap_err();
    assert!(error.is_timeout(), "{error}");
    drop(qmp);
    talking.join().unwrap();
}

/// A QEMU that is told to quit may end before its answer is sent. One that refuses does not.
#[test]
fn quit_is_answered_by_the_end_of_the_connection() {
    for (answer, quits) in [
        ("", true),
        ("{\"return\":{},\"id\":3}\n", true),
        ("{\"error\":{\"desc\":\"no\"},\"id\":3}\n", false),
    ] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let talking = std::thread::spawn(move || {
            writeln!(theirs, "{GREETING}").unwrap();
            let commands = BufReader::new(theirs.try_clone().unwrap()).lines();
            let quit = commands.map(Result::unwrap).find(|line| line.contains(r#""quit""#));
            assert!(quit.is_some(), "it is told to quit");
            theirs.write_all(answer.as_bytes()).unwrap();
        });
        let mut qmp = Qmp::over_within(ours, Path::new("fake"), TALKS_FOR).unwrap();
        let told = qmp.quit();
        assert_eq!(told.is_ok(), quits, "{told:?}");
        talking.join().unwrap();
        let again = qmp.quit();
        assert!(again.is_err(), "a QEMU that has ended can't be told: {again:?}");
    }
}

/// QEMU ends with its guest, and reports it only by an event. A client may notice the end by a read
/// or a write that fails, before it has read that event.
#[test]
fn guest_that_has_powered_off_is_named_when_qemu_closes_the_connection() {
    let event = "{\"event\":\"SHUTDOWN\",\"data\":{\"guest\":true}}\n";
    for (said, powered_off) in [(event, true), ("", false)] {
        for end in [End::Before, End::Within, End::After] {
            let (stream, mut theirs) = UnixStream::pair().unwrap();
            writeln!(theirs, "{GREETING}").unwrap();
            let mut qmp = Qmp::over_within(stream, Path::new("fake"), PATIENCE).unwrap();
            let mut commands = BufReader::new(theirs.try_clone().unwrap()).lines();
            // Those of the connection's beginning.
            assert_eq!(commands.by_ref().take(2).flatten().count(), 2);
            let close = move || {
                match end {
                    End::Before => {}
                    // An unread rest makes the kernel report a reset.
                    End::Within => theirs.read_exact(&mut [0]).unwrap(),
                    End::After => drop(commands.next().unwrap().unwrap()),
                }
                theirs.write_all(said.as_bytes()).unwrap();
            };
            let closing = std::thread::spawn(close);
            let closing = if end == End::Before {
                closing.join().unwrap();
                None
            } else {
                Some(closing)
            };
            for _ in 0..2 {
                let error = qmp.execute("query-status", json!({})).unwrap_err();
                let cause = std::error::Error::source(&error).unwrap();
                assert_eq!(cause.is::<PoweredOff>(), powered_off, "{end:?}: {error:?}");
            }
            if let Some(closing) = closing {
                closing.join().unwrap();
            }
        }
    }
}

/// When a fake QEMU closes the connection, relative to its client's command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Before,
    Within,
    After,
}

/// An event may be kept as long as the connection exists.
#[test]
fn events_of_any_length_stay_within_their_memory_limit() {
    let pad = "x".repeat(20 << 10);
    let said: &'static str = format!("{{\"event\":\"LONG\",\"data\":\"{pad}\"}}\n").leak();
    let (stream, talking) = endless(said);
    let mut qmp = Qmp::over_within(stream, Path::new("fake"), PATIENCE).unwrap();
    let mut most = 0;
    for _ in 0..20 {
        let kept: usize = qmp.look_at_events().unwrap().map(|event| event.to_string().len()).sum();
        most = most.max(kept);
        let waited = qmp.wait_for("stop", PATIENCE / 20, |event| event["event"] == "STOP");
        assert!(waited.unwrap_err().is_timeout());
    }
    assert!(most > 1 << 19 && most <= 1 << 20, "{most} bytes");
    drop(qmp);
    talking.join().unwrap();
}
