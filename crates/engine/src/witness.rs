//! The witness of a session: what an embedder provides so that doubt needs no operator.

use std::fmt::Debug;
use std::sync::Arc;

use crossbeam_channel::Sender;
pub use vmferry_handover::{BadWitnessId, Register, WitnessId, WitnessRequest};
use vmferry_handover::{GuestIdentity, SessionId, VmError};

use crate::error::MigrateError;

/// A store outside both hosts with a [`Register`] for each session.
///
/// Both hosts of a session must have the same witness, or none: a source announces it, and a
/// destination with another one refuses the guest. A request takes effect atomically. It may take
/// effect although an error was returned, also later.
pub trait Witness: Debug + Send + Sync {
    /// The name. A store whose data was lost, or replaced by older data, has another name, and
    /// answers no question that was meant for the old one.
    fn id(&self) -> WitnessId;

    /// Opens the register of a session that begins ([`WitnessRequest::Open`]), and returns it. The
    /// guest's identity is kept with it, so that an operator finds the sessions of a guest. Blocks
    /// for a second or two at most.
    ///
    /// # Errors
    /// There was no answer. The session is refused then.
    fn open(&self, session: SessionId, guest: &GuestIdentity) -> Result<Register, VmError>;

    /// The session's register after `request`, or as it is. A session without a register is
    /// [`Register::Unopened`]. Blocks for a second or two at most. Called from threads of the
    /// engine, also from several at once.
    ///
    /// # Errors
    /// There was no answer, so it is unknown whether the request has taken effect.
    fn ask(&self, session: SessionId, request: Option<WitnessRequest>)
    -> Result<Register, VmError>;
}

pub(crate) fn witness_id(witness: Option<&dyn Witness>) -> Option<WitnessId> {
    witness.map(Witness::id)
}

/// Asks on a thread of its own, and sends the answer as an input.
pub(crate) fn ask_witness<I: Send + 'static>(
    witness: &Arc<dyn Witness>,
    session: SessionId,
    request: Option<WitnessRequest>,
    inputs: &Sender<I>,
    input: fn(Result<Register, VmError>) -> I,
) {
    let (witness, answers) = (Arc::clone(witness), inputs.clone());
    let asks = move || {
        // Without a receiver the session has ended.
        let _ = answers.send(input(witness.ask(session, request)));
    };
    if let Err(error) = std::thread::Builder::new().name("witness".into()).spawn(asks) {
        let _ = inputs.send(input(Err(Box::new(MigrateError::no_thread(error)))));
    }
}
