//! Guests, as their hosts publish them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::object::Kind;

/// A guest of a host: `hosts/NAME/guests/UUID`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Guest {
    /// Its UUID, which it keeps wherever it goes.
    pub uuid: Uuid,
    /// Its name.
    pub name: String,
    /// What runs it.
    pub vmm: GuestVmm,
    /// What it does.
    pub phase: GuestPhase,
    /// Its memory in bytes; `None` if it is not known.
    pub memory_bytes: Option<u64>,
    /// Number of its vCPUs; `None` if it is not known.
    pub vcpus: Option<u64>,
    /// The socket by which its host reaches it.
    pub socket: Option<PathBuf>,
}

/// What runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestVmm {
    /// `vmferry run` or `vmferry receive`.
    Vmferry,
    /// A QEMU process.
    Qemu,
    /// Something that a newer release knows.
    #[serde(other)]
    Other,
}

/// What a guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestPhase {
    /// It runs.
    Running,
    /// It is paused.
    Paused,
    /// It is being sent to another host, and runs here.
    Sending,
    /// It runs here, and lacks pages of another host.
    Fetching,
    /// It runs at another host, which needs pages of this one.
    Serving,
    /// It is not known which host has it.
    InDoubt,
    /// It has crashed.
    Crashed,
    /// Its VMM does not answer.
    Silent,
    /// Something that a newer release knows.
    #[serde(other)]
    Other,
}

impl GuestPhase {
    /// Whether its host says that it has the guest.
    #[must_use]
    pub fn is_here(self) -> bool {
        matches!(self, Self::Running | Self::Paused | Self::Sending | Self::Fetching)
    }
}

impl Guest {
    /// One that only its UUID is known of.
    pub(crate) fn unknown(uuid: Uuid) -> Self {
        let (vmm, phase) = (GuestVmm::Other, GuestPhase::Other);
        let name = String::new();
        Self { uuid, name, vmm, phase, memory_bytes: None, vcpus: None, socket: None }
    }
}

impl Kind for Guest {
    const NAME: &'static str = "guest";
    const VERSION: u32 = 1;
}
