//! What an operator must do before a word about a guest of libvirt.

use vmferry_handover::OperatorWord;
use vmferry_handover::journal::Side;

use crate::commands::daemon::domains::DomainLook;
use crate::commands::finishes::{Finish, says};

/// What this host knows, what the operator must do first, and what is at risk.
pub fn remind(finish: &Finish, word: OperatorWord, look: &DomainLook) -> String {
    let (name, peer) = (&finish.guest.name, &finish.peer);
    let known = format!(
        "session {} of {name} with {peer}: this host {}\n",
        finish.session,
        says(finish, Some(look))
    );
    let first = match (finish.state.side(), word) {
        (Side::Source, OperatorWord::SourceResumes) => format!(
            "FIRST look at {peer} with `vmferry status --sessions`: it must say `never ran the \
             guest`. Otherwise power it off or fence it. If the guest runs there, or has run \
             there, it must not be resumed here: two guests write to its disks and destroy them."
        ),
        (Side::Source, OperatorWord::DestinationOwns) => format!(
            "FIRST look at {peer} with `vmferry status --sessions`: it must say `has the guest`. \
             The paused guest on this host is removed: if it does not run there, its memory is \
             lost."
        ),
        (Side::Destination, OperatorWord::DestinationOwns) => format!(
            "FIRST make sure that {name} does not run on {peer}: if it does, two guests write to \
             its disks and destroy them. {peer} removes its paused guest when it hears this word."
        ),
        (Side::Destination, OperatorWord::SourceResumes) => format!(
            "FIRST make sure that {name} has never run here: QEMU's log in /var/log/libvirt/qemu \
             tells when it was started and ended. {peer} resumes its guest when it hears this \
             word: if the guest has run here, what it did since is lost, and its disks may be \
             destroyed."
        ),
    };
    known + &first
}
