//! Comparing an announced guest with this QEMU, and preparing the QEMU for it.

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use vmferry::{GuestDescription, Landing, PrepareError};

use super::QemuDestination;
use super::memory::{compare, empty, not_ours};
use crate::additions::Additions;
use crate::carried::{self, Arrival, Description, Offer};
use crate::error::QemuError;
use crate::inventory::{self, Allowed, Inventory};
use crate::machine::{self, Machine};
use crate::proc_stat::host;
use crate::qmp::Qmp;
use crate::ram::{Block, Carrier, Ram};
use crate::settings::Settings;
use crate::source::VMM;
use crate::vcpu::Vcpu;

/// The source's description of itself.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offered {
    host: String,
    machine: Machine,
    blocks: Vec<Block>,
}

/// A guest that this QEMU can take.
pub(super) struct Fitting {
    /// The description of a carried guest; `None` for an attached one.
    carried: Option<Description>,
    inventory: Option<Inventory>,
    allowed: Allowed,
}

impl QemuDestination {
    /// Compares a guest with this QEMU, and changes nothing.
    pub(super) fn check(&mut self, guest: &GuestDescription) -> Result<Fitting, PrepareError> {
        if guest.vmm != VMM && guest.vmm != carried::VMM {
            let text = format!("the guest is one of `{}`, and this is a QEMU", guest.vmm);
            return Err(PrepareError::Incompatible(text));
        }
        self.expected.check(&guest.identity)?;
        if self.used {
            let text = "this QEMU has had a guest already: start a new one".to_owned();
            return Err(PrepareError::Incompatible(text));
        }
        let additions = Additions::of(&guest.config);
        let carried = if guest.vmm == carried::VMM {
            let mut offered: Description = parse(&guest.config)?;
            compare_vcpus(&mut self.qmp, &additions, &mut offered.machine)?;
            self.description.check(&offered)?;
            Some(offered)
        } else {
            let ram = fillable(&self.ram)?;
            let mut offered: Offered = parse(&guest.config)?;
            compare_vcpus(&mut self.qmp, &additions, &mut offered.machine)?;
            if let Some(difference) =
                machine::difference(&offered.machine, &self.description.machine)
            {
                return Err(PrepareError::Incompatible(difference));
            }
            compare(&offered.blocks, &ram.blocks)?;
            must_be_other_files(&offered, ram)?;
            None
        };
        let Additions { inventory, allowed, .. } = additions;
        if let Some(theirs) = &inventory {
            let differences = self.inventory.differences(theirs, allowed);
            if !differences.is_empty() {
                return Err(PrepareError::Incompatible(differences.join("; ")));
            }
        }
        Ok(Fitting { carried, inventory, allowed })
    }

    /// Prepares this QEMU to receive a guest that [fits](Self::check).
    pub(super) fn prepare_for(
        &mut self,
        fitting: Fitting,
        config: &[u8],
    ) -> Result<Landing, PrepareError> {
        self.unknown_disks = Vec::new();
        if let Some(theirs) = &fitting.inventory {
            inventory::apply(&mut self.qmp, theirs, &mut self.inventory)
                .map_err(|error| PrepareError::Vm(QemuError::from(error).into()))?;
            if !fitting.allowed.disks_differ {
                self.unknown_disks = self.inventory.unknown_disks(theirs);
            }
        }
        match &fitting.carried {
            Some(offered) => self.prepare_streams(offered, config),
            None => self.prepare_memory(),
        }
    }

    /// Prepares this QEMU's memory to receive an attached guest.
    fn prepare_memory(&mut self) -> Result<Landing, PrepareError> {
        let ram = fillable(&self.ram)?;
        empty(ram, self.files.as_ref()).map_err(not_ours)?;
        // Done here, before the guest is paused.
        Settings::for_loading(&mut self.qmp)
            .map_err(|error| PrepareError::Vm(QemuError::from(error).into()))?;
        let landing = Landing::Memory(ram.memory.clone());
        // Tried for each guest, so that a source that needs it learns before it sends anything.
        self.close_faults();
        self.faults = Some(self.create_faults());
        Ok(landing)
    }

    /// Lets this QEMU receive the streams of a carried guest.
    fn prepare_streams(
        &mut self,
        offered: &Description,
        config: &[u8],
    ) -> Result<Landing, PrepareError> {
        if let Some(files) = &self.files {
            files.nobody_else_is_seen().map_err(not_ours)?;
        }
        self.used = true;
        let place = self.place.as_deref();
        let post_copy = vmferry::vmm::newer::optional(config, carried::POST_COPY).unwrap_or(false);
        let offer = Offer { channels: offered.multifd, post_copy };
        let begun = Arrival::begin(&mut self.qmp, &self.settings, offer, place, &self.looker);
        let (arrival, streams) = begun.map_err(|error| PrepareError::Vm(error.into()))?;
        self.arrival = Some(arrival);
        Ok(Landing::Streams(streams))
    }
}

/// The memory, if it can be filled from outside.
fn fillable(ram: &Result<Ram, QemuError>) -> Result<&Ram, PrepareError> {
    ram.as_ref().map_err(|error| {
        let why = vmferry::chain(error);
        PrepareError::Incompatible(format!(
            "it can't be filled from outside, as the source needs it: {why}"
        ))
    })
}

/// Checks that a source on this host has other memory files.
fn must_be_other_files(offered: &Offered, ram: &Ram) -> Result<(), PrepareError> {
    if offered.host != host() {
        return Ok(());
    }
    let mut theirs = offered.blocks.iter().filter(|block| block.carrier == Carrier::Vmferry);
    match theirs.find(|theirs| ram.carried().any(|ours| ours.file == theirs.file)) {
        Some(block) => {
            let path = PathBuf::from(&block.name);
            Err(PrepareError::Vm(QemuError::SameFile { path }.into()))
        }
        None => Ok(()),
    }
}

/// Checks that a QEMU's vCPUs have the features that the guest uses. Where both sides list their
/// features, these decide, and the CPU model in `offered` is ignored.
fn compare_vcpus(
    qmp: &mut Qmp,
    additions: &Additions,
    offered: &mut Machine,
) -> Result<(), PrepareError> {
    let Some(theirs) = &additions.vcpu else { return Ok(()) };
    let ours = Vcpu::read_common(qmp, theirs)
        .map_err(|error| PrepareError::Vm(QemuError::from(error).into()))?;
    let Some(ours) = ours else { return Ok(()) };
    let model = offered.cpu.take().unwrap_or_default();
    match theirs.misses(&ours, &model) {
        Some(difference) => Err(PrepareError::Incompatible(difference)),
        None => Ok(()),
    }
}

fn parse<T: DeserializeOwned>(config: &[u8]) -> Result<T, PrepareError> {
    vmferry::vmm::newer::read(config)
        .map_err(|error| PrepareError::Incompatible(format!("its description: {error}")))
}
