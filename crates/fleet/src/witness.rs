//! The witness of handovers in etcd: one key for each session.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vmferry::witness::{Register, Witness, WitnessId, WitnessRequest};
use vmferry_handover::{GuestIdentity, SessionId, VmError};

use crate::etcd::Value;
use crate::fleet::{Fleet, FleetError};
use crate::host::HostName;
use crate::object::{Kind, Object};

/// Where sessions are, below the fleet's prefix.
const DIRECTORY: &str = "sessions/";

/// A witness whose registers are keys `PREFIX/sessions/SESSION` of a fleet.
#[derive(Debug)]
pub struct EtcdWitness {
    fleet: Arc<Fleet>,
    id: WitnessId,
    /// The host whose processes ask.
    host: HostName,
}

/// The object of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Session {
    pub(crate) register: Register,
    /// The guest.
    pub(crate) guest: Uuid,
    /// The host that opened the session.
    pub(crate) destination: HostName,
}

impl Kind for Session {
    const NAME: &'static str = "session";
    const VERSION: u32 = 1;
}

impl EtcdWitness {
    /// The witness of a fleet, for the processes of a host. Its name has the number of the etcd
    /// cluster and the fleet's prefix and incarnation.
    ///
    /// # Panics
    /// Never: a prefix is short enough.
    #[must_use]
    pub fn new(fleet: Arc<Fleet>, host: HostName) -> Self {
        let (cluster, incarnation) = (fleet.cluster(), fleet.incarnation().simple());
        let name = format!("etcd {cluster:016x} {} {incarnation}", fleet.prefix());
        let id = WitnessId::new(&name).expect("the name is short and printable");
        Self { fleet, id, host }
    }
}

impl Fleet {
    /// All sessions, with the revision of each one's last change.
    pub(crate) fn sessions(&self) -> Result<Vec<(String, Session, i64)>, FleetError> {
        let found = self.etcd().list(&self.prefix().key(DIRECTORY))?;
        let session = |(key, value): (String, Value)| {
            let session = Object::<Session>::decode(&key, &value.bytes)?.value;
            Ok((key, session, value.revision))
        };
        found.into_iter().map(session).collect()
    }

    /// The register of the session at `key` after a request. One that was never opened stays so.
    pub(crate) fn ask(
        &self,
        key: &str,
        request: Option<WitnessRequest>,
    ) -> Result<Register, FleetError> {
        let object = self.update(key, |found: Option<&Session>| {
            let (found, request) = (found?, request?);
            let register = found.register.after(request);
            (register != found.register).then(|| Session { register, ..found.clone() })
        })?;
        let register = object.map_or(Register::Unopened, |session| session.register);
        if register.is_final() {
            self.forget(key);
        }
        Ok(register)
    }

    fn session_key(&self, session: SessionId) -> String {
        self.prefix().key(&format!("{DIRECTORY}{session}"))
    }
}

impl Witness for EtcdWitness {
    fn id(&self) -> WitnessId {
        self.id.clone()
    }

    fn open(&self, session: SessionId, guest: &GuestIdentity) -> Result<Register, VmError> {
        let register = Register::Unopened.after(WitnessRequest::Open);
        let (guest, destination) = (guest.uuid, self.host.clone());
        let opened = Session { register, guest, destination };
        let object =
            self.fleet.update(&self.fleet.session_key(session), |found: Option<&Session>| {
                found.is_none().then(|| opened.clone())
            })?;
        Ok(object.map_or(Register::Unopened, |session| session.register))
    }

    fn ask(
        &self,
        session: SessionId,
        request: Option<WitnessRequest>,
    ) -> Result<Register, VmError> {
        Ok(self.fleet.ask(&self.fleet.session_key(session), request)?)
    }
}
