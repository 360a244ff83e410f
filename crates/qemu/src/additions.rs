//! What a guest's description says in addition. Releases that do not know a member ignore it.

use serde_json::Value;
use vmferry::vmm::newer;

use crate::inventory::{self, Allowed, Inventory};
use crate::vcpu::{self, Vcpu};

/// The optional member that says that the disks at the destination may be others.
const DISKS_DIFFER: &str = "disks_differ";

/// The optional members of a guest's description.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Additions {
    /// The source's vCPUs, if QEMU reports them.
    pub vcpu: Option<Vcpu>,
    /// The source's inventory.
    pub inventory: Option<Inventory>,
    /// What may differ.
    pub allowed: Allowed,
}

impl Additions {
    /// Adds them to a description.
    pub fn add_to(&self, description: &mut Value) {
        if let Some(vcpu) = &self.vcpu {
            newer::add_optional(description, vcpu::MEMBER, vcpu);
        }
        if let Some(inventory) = &self.inventory {
            newer::add_optional(description, inventory::MEMBER, inventory);
        }
        if self.allowed.disks_differ {
            newer::add_optional(description, DISKS_DIFFER, &true);
        }
    }

    /// Reads them from a description.
    #[must_use]
    pub fn of(description: &[u8]) -> Self {
        let disks_differ = newer::optional(description, DISKS_DIFFER).unwrap_or(false);
        Self {
            vcpu: newer::optional(description, vcpu::MEMBER),
            inventory: newer::optional(description, inventory::MEMBER),
            allowed: Allowed { disks_differ },
        }
    }
}
