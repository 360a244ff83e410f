//! An operator's word for a source's libvirt that waits while no daemon runs.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use vmferry_handover::{FinishWord, GuestIdentity, SessionId};
use vmferry_libvirt_rpc::{FinishCall, Guest, MigrateFlags, finish_reply};

use super::settle::{ASK_PERIOD, CLOSE_TIMEOUT, Heard, attend};
use crate::keeper::{HeldConnection, Keeper, KeeperProgram, connect};

/// A keeper that is not started.
#[derive(Debug)]
struct RunningKeeper(PathBuf);

impl KeeperProgram for RunningKeeper {
    fn connect(&self) -> io::Result<OwnedFd> {
        connect(&self.0)
    }
}

/// Replies to the Finish of a session in the other daemon's place, on the connection that the
/// keeper at `socket` holds. The word must be in the source's journal, which the caller has locked.
/// Returns whether the keeper had the connection: if not, no libvirt waits on it.
///
/// # Errors
/// The keeper does not answer.
pub fn answer_held(
    socket: &Path,
    session: SessionId,
    guest: &GuestIdentity,
    word: FinishWord,
) -> io::Result<bool> {
    let keeper = match Keeper::start(Arc::new(RunningKeeper(socket.to_owned()))) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(false);
        }
        keeper => keeper?,
    };
    let held = keeper.take()?.into_iter().find(|held| held.session == session);
    let Some(HeldConnection { serial, mut socket, .. }) = held else { return Ok(false) };
    let guest = Guest { name: guest.name.clone(), uuid: guest.uuid };
    let call = FinishCall { serial, guest, cancelled: false, flags: MigrateFlags(0) };
    let result = match word {
        FinishWord::Runs => Ok(()),
        FinishWord::DoesNotRun => Err("an operator has decided that the guest stays here"),
    };
    // A libvirt that has gone takes its guest up by its own journal.
    let _ = socket.write_all(&finish_reply(&call, result));
    let (mut heard, deadline) = (Heard::default(), Instant::now() + CLOSE_TIMEOUT);
    while Instant::now() < deadline && attend(&mut socket, &mut heard, ASK_PERIOD) {}
    keeper.drop_session(session)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use vmferry_libvirt_rpc::{Call, Reply, ReplyWatch};

    use super::*;
    use crate::keeper::serve;

    #[test]
    fn answer_held_reaches_a_libvirt_whose_daemon_is_dead() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keeper");
        let session = SessionId([6; 16]);
        let guest = GuestIdentity { uuid: uuid::Uuid::max(), name: "web".into() };
        let runs = FinishWord::Runs;
        assert!(!answer_held(&path, session, &guest, runs).unwrap(), "no keeper runs");
        let (tell, ready) = channel();
        let of_thread = path.clone();
        std::thread::spawn(move || serve(&of_thread, || tell.send(()).unwrap()));
        ready.recv().unwrap();
        let (mut libvirt, ours) = UnixStream::pair().unwrap();
        libvirt.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let daemon = Keeper::start(Arc::new(RunningKeeper(path.clone()))).unwrap();
        daemon.hold(session, 9, &ours).unwrap();
        drop((daemon, ours));
        assert!(!answer_held(&path, SessionId([1; 16]), &guest, runs).unwrap());

        let reader = std::thread::spawn(move || {
            let identity = Guest { name: "web".into(), uuid: uuid::Uuid::max() };
            let flags = MigrateFlags(0);
            let call = FinishCall { serial: 9, guest: identity, cancelled: false, flags };
            let (mut watch, mut heard) = (ReplyWatch::new(), vmferry_libvirt_rpc::Heard::default());
            watch.expect(&Call::Finish(call)).unwrap();
            let mut bytes = [0; 64];
            while heard.replies.is_empty() {
                let read = io::Read::read(&mut libvirt, &mut bytes).unwrap();
                watch.push(&bytes[..read], &mut heard).unwrap();
            }
            heard.replies
        });
        assert!(answer_held(&path, session, &guest, runs).unwrap());
        let replies = reader.join().unwrap();
        let [Reply::Finish(reply)] = &replies[..] else { panic!("{replies:?}") };
        assert_eq!((reply.serial, &reply.result), (9, &Ok(())));
        assert!(!answer_held(&path, session, &guest, runs).unwrap(), "it was answered");
    }
}
