//! QEMUs that end at the destination before their guests have all their pages. The source keeps
//! what a crashed guest lacked until its operator decides.

use rustix::process::{Pid, Signal, kill_process};
use vmferry_qemu::wait_for_end;
use vmferry_qemu_lab::Version;

use super::carried::private;
use super::{Move, emulated, on_kvm};
use crate::support::stops::guardian_of;
use crate::support::{in_parallel, run_ok};

impl Move {
    /// The source says that the guest has crashed, and keeps its memory until it is given up.
    fn pages_are_kept_and_given_up(&mut self) {
        self.send.event("guest-crashed");
        let status = run_ok(&self.scene.a, &["status", "tested"]);
        assert_eq!(status["migration"]["crashed"], true, "{status}");
        assert!(self.scene.here.child.try_wait().unwrap().is_none(), "its QEMU is kept");
        self.scene.a.run(&["resolve", "tested", "--give-up", "--yes"]).exited(0);
        self.send.finish_by_ref().failed(13, "was given up while it lacked pages");
        self.scene.here.child.wait().unwrap();
    }
}

#[test]
fn pages_of_a_crashed_guest_are_kept_until_it_is_given_up() {
    let mut machines = vec![on_kvm(Version::V10_0), private(on_kvm(Version::V10_0))];
    machines.push(emulated(Version::V7_2));
    in_parallel(machines, |machine| {
        let mut moving = Move::until_it_fetches(machine, &["--sandbox", "require"]);
        moving.send.event("serving");
        moving.there.child.kill().unwrap();
        let ended = moving.receiving.event("guest-ended");
        assert_eq!(ended["in_order"], false, "{ended}");
        moving.receiving.finish_by_ref().failed(13, "has crashed here while it lacked pages");
        moving.pages_are_kept_and_given_up();
    });
}

/// QEMU was told to end, so nobody needs what the guest lacked.
#[test]
fn pages_of_a_guest_that_was_ended_are_freed() {
    let machines = vec![on_kvm(Version::V10_0), private(on_kvm(Version::V10_0))];
    in_parallel(machines, |machine| {
        let mut moving = Move::until_it_fetches(machine, &[]);
        moving.send.event("serving");
        kill_process(Pid::from_child(&moving.there.child), Signal::TERM).unwrap();
        let ended = moving.receiving.event("guest-ended");
        assert_eq!(ended["in_order"], true, "{ended}");
        moving.receiving.finish_by_ref().exited(0);
        moving.send.finish_by_ref().exited(0);
        assert!(moving.scene.here.child.wait().unwrap().success(), "it was quit");
    });
}

/// All processes of vmferry have died, and the guest too. The next sender hears of it.
#[test]
fn next_sender_keeps_the_pages_of_a_crashed_guest() {
    let mut moving = Move::until_it_fetches(on_kvm(Version::V10_0), &[]);
    moving.send.event("serving");
    let guardian = guardian_of(moving.send.child.id());
    moving.send.kill();
    kill_process(Pid::from_raw(guardian as i32).unwrap(), Signal::KILL).unwrap();
    let _ = wait_for_end(guardian);
    moving.receiving.kill();
    moving.there.child.kill().unwrap();
    moving.there.child.wait().unwrap();
    // A damaged journal of another guest keeps nobody from arriving.
    let journals = moving.scene.b.runtime.join("journal");
    let other = format!("{}.destination.journal", uuid::Uuid::from_u128(9));
    std::fs::write(journals.join(other), "no journal\n").unwrap();
    let tls = moving.scene.world.tls();
    let (mut next, _) = moving.scene.b.receive(&["--listen", &moving.address, "--tls", &tls]);
    moving.send = super::send(&moving.scene, &moving.address);
    moving.pages_are_kept_and_given_up();
    next.kill();
}

/// The receiver has died before it could note the crash. The next one does, whatever it receives.
#[test]
fn crash_without_a_receiver_is_noted_by_the_next_one() {
    let mut moving = Move::until_it_fetches(on_kvm(Version::V10_0), &[]);
    moving.send.event("serving");
    moving.receiving.kill();
    moving.there.child.kill().unwrap();
    moving.there.child.wait().unwrap();
    let tls = moving.scene.world.tls();
    let (mut next, _) = moving.scene.b.receive(&["--listen", &moving.address, "--tls", &tls]);
    moving.pages_are_kept_and_given_up();
    let sessions = run_ok(&moving.scene.b, &["status", "--sessions"]);
    assert_eq!(sessions["sessions"][0]["verdict"], "here", "{sessions}");
    next.kill();
}
