//! A process that starts receivers and is stopped.

use uuid::Uuid;
use vmferry_wire::GuestIdentity;

use super::*;

/// A request whose line fills a good part of the socket's queue.
fn request(number: u8) -> ReceiveRequest {
    let guest = GuestIdentity { uuid: Uuid::nil(), name: "x".repeat(60_000) };
    ReceiveRequest { template: "web".into(), guest, session: SessionId([number; 16]) }
}

/// It reads nothing. All who ask hear why, and nobody waits for a lock.
#[test]
fn process_that_reads_nothing_keeps_nobody_waiting_for_a_place() {
    let directory = tempfile::tempdir().unwrap();
    let mut stopped = Command::new("sleep");
    stopped.arg("1000");
    let starter = Arc::new(ReceiverStarter::with(stopped, directory.path()).unwrap());
    let pid = starter.unheard.lock().as_ref().unwrap().child.id();
    starter.listen(&Output::new(true, true)).unwrap();
    let (tell, told) = channel();
    // The socket takes a few of them, and the queue the rest.
    let askers: Vec<_> = (0..2 * MAX_ORDERS as u8)
        .map(|number| {
            let (starter, tell) = (Arc::clone(&starter), tell.clone());
            std::thread::spawn(move || {
                let refused = starter.start(&request(number), &PeerIdentity::default());
                tell.send(refused.unwrap_err()).unwrap();
            })
        })
        .collect();
    let busy = told.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(busy.code, ReasonCode::Busy, "{busy:?}");
    assert!(busy.text.contains("vmferry start-receivers"), "{busy:?}");
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    for asker in askers {
        asker.join().unwrap();
    }
    let ended = told.try_iter().filter(|reason| reason.text.contains("has ended")).count();
    assert!(ended >= MAX_ORDERS, "{ended} of the requests were waiting");
    let late = starter.start(&request(0), &PeerIdentity::default()).unwrap_err();
    assert!(late.text.contains("has ended"), "{late:?}");
}
