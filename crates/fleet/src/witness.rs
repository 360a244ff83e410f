//! The witness of handovers in etcd: one key for each session.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vmferry::witness::{Register, Witness, WitnessId, WitnessRequest};
use vmferry_handover::{SessionId, VmError};

use crate::fleet::{Fleet, FleetError};
use crate::object::Kind;

/// A witness whose registers are keys `PREFIX/sessions/SESSION` of a fleet. A key that is not there
/// is an open register, so a claim is one transaction.
#[derive(Debug)]
pub struct EtcdWitness {
    fleet: Arc<Fleet>,
    id: WitnessId,
}

/// The object of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Session {
    register: Register,
}

impl Kind for Session {
    const NAME: &'static str = "session";
    const VERSION: u32 = 1;
}

impl EtcdWitness {
    /// The witness of a fleet. Its name has the number of the etcd cluster and the fleet's prefix
    /// and incarnation.
    ///
    /// # Panics
    /// Never: a prefix is short enough.
    #[must_use]
    pub fn new(fleet: Arc<Fleet>) -> Self {
        let (cluster, incarnation) = (fleet.cluster(), fleet.incarnation().simple());
        let name = format!("etcd {cluster:016x} {} {incarnation}", fleet.prefix());
        Self { id: WitnessId::new(&name).expect("the name is short and printable"), fleet }
    }

    fn register(
        &self,
        session: SessionId,
        request: Option<WitnessRequest>,
    ) -> Result<Register, FleetError> {
        let key = self.fleet.prefix().key(&format!("sessions/{session}"));
        let object = self.fleet.decide(&key, |found: Option<&Session>| {
            let before = found.map_or(Register::Open, |session| session.register);
            let register = request.map_or(before, |request| before.after(request));
            (register != before).then_some(Session { register })
        })?;
        Ok(object.map_or(Register::Open, |session| session.register))
    }
}

impl Witness for EtcdWitness {
    fn id(&self) -> WitnessId {
        self.id.clone()
    }

    fn ask(
        &self,
        session: SessionId,
        request: Option<WitnessRequest>,
    ) -> Result<Register, VmError> {
        Ok(self.register(session, request)?)
    }
}
