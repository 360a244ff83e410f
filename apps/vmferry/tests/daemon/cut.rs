//! The cable is cut while a guest moves: for 1, 5 and 10 s, in each phase.

use std::time::Duration;

use vmferry_libvirt_lab::LibvirtVersion;

use crate::phases::{Moving, Phase};
use crate::support::{Hosts, must_succeed};

/// How a cable is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// Connections are closed, and new ones are refused.
    Closed,
    /// Bytes are held, as on a cable that was pulled out.
    Silent,
}

/// Cuts the cable in a phase. The migration succeeds.
fn cut(phase: Phase, version: LibvirtVersion, cut: Cut, seconds: u64) {
    let mut moving = Moving::until(phase, Hosts::start(version));
    let cable = moving.hosts.b.cable.clone();
    match cut {
        Cut::Closed => cable.cut(),
        Cut::Silent => cable.freeze(),
    }
    if phase == Phase::Finish {
        // The answer is lost on the way.
        moving.let_go();
    }
    std::thread::sleep(Duration::from_secs(seconds));
    if phase.is_before_switchover() {
        let state = moving.hosts.a.libvirt.domain_state("web");
        assert_eq!(state.as_deref(), Some("running"), "{phase:?}");
    }
    cable.mend();
    let ended = moving.end();
    must_succeed(&ended.hosts, &ended.virsh);
    ended.has_moved();
}

#[test]
fn cut_of_10_s_while_memory_is_copied_fails_nothing() {
    cut(Phase::Memory, LibvirtVersion::V11_3, Cut::Silent, 10);
}

/// Tests of one cut each.
macro_rules! cuts {
    ($($name:ident: $phase:ident, $version:ident, $cut:ident, $seconds:literal;)+) => {$(
        #[test]
        #[cfg_attr(
            not(feature = "long-tests"),
            ignore = "a part of the full matrix: make test-all"
        )]
        fn $name() {
            cut(Phase::$phase, LibvirtVersion::$version, Cut::$cut, $seconds);
        }
    )+};
}

cuts! {
    cut_of_1_s_in_prepare: Prepare, V11_3, Closed, 1;
    cut_of_5_s_in_prepare: Prepare, V11_3, Silent, 5;
    cut_of_10_s_in_prepare: Prepare, V9_0, Silent, 10;
    cut_of_1_s_while_disks_are_copied: Disks, V9_0, Closed, 1;
    cut_of_5_s_while_disks_are_copied: Disks, V9_0, Silent, 5;
    cut_of_10_s_while_disks_are_copied: Disks, V11_3, Silent, 10;
    cut_of_1_s_while_memory_is_copied: Memory, V11_3, Closed, 1;
    cut_of_5_s_while_memory_is_copied: Memory, V9_0, Silent, 5;
    cut_of_10_s_while_memory_is_copied_by_9_0: Memory, V9_0, Closed, 10;
    cut_of_1_s_in_finish: Finish, V9_0, Closed, 1;
    cut_of_5_s_in_finish: Finish, V11_3, Silent, 5;
    cut_of_10_s_in_finish: Finish, V9_0, Silent, 10;
    cut_of_1_s_in_post_copy: PostCopy, V9_0, Closed, 1;
    cut_of_5_s_in_post_copy: PostCopy, V11_3, Closed, 5;
    cut_of_10_s_in_post_copy: PostCopy, V11_3, Silent, 10;
    cut_of_10_s_in_post_copy_of_9_0: PostCopy, V9_0, Silent, 10;
}
