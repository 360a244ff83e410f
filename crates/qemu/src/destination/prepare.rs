//! Comparing an announced guest with this QEMU, and preparing the QEMU for it.

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use vmferry::{Landing, PrepareError};

use super::QemuDestination;
use super::memory::{compare, empty, not_ours};
use crate::additions::Additions;
use crate::carried::{self, Arrival, Description, Offer};
use crate::error::QemuError;
use crate::inventory::{self, Disk, Inventory};
use crate::machine::{self, Machine};
use crate::proc_stat::host;
use crate::qmp::Qmp;
use crate::ram::{Block, Carrier};
use crate::settings::Settings;
use crate::vcpu::Vcpu;

/// The source's description of itself.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offered {
    host: String,
    machine: Machine,
    blocks: Vec<Block>,
}

impl QemuDestination {
    /// Prepares this QEMU's memory to receive an attached guest.
    pub(super) fn prepare_memory(&mut self, config: &[u8]) -> Result<Landing, PrepareError> {
        let ram = match &self.ram {
            Ok(ram) => ram,
            Err(error) => {
                let why = vmferry::chain(error);
                let text =
                    format!("it can't be filled from outside, as the source needs it: {why}");
                return Err(PrepareError::Incompatible(text));
            }
        };
        let mut offered: Offered = parse(config)?;
        let additions = Additions::of(config);
        compare_vcpus(&mut self.qmp, &additions, &mut offered.machine)?;
        if let Some(difference) = machine::difference(&offered.machine, &self.description.machine) {
            return Err(PrepareError::Incompatible(difference));
        }
        compare(&offered.blocks, &ram.blocks)?;
        self.unknown_disks = compare_inventories(&mut self.qmp, &mut self.inventory, &additions)?;
        if offered.host == host() {
            let ours = || ram.carried().map(|block| block.file);
            let theirs = offered.blocks.iter().filter(|block| block.carrier == Carrier::Vmferry);
            for block in theirs {
                if ours().any(|file| file == block.file) {
                    let path = PathBuf::from(&block.name);
                    return Err(PrepareError::Vm(QemuError::SameFile { path }.into()));
                }
            }
        }
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
    pub(super) fn prepare_streams(&mut self, config: &[u8]) -> Result<Landing, PrepareError> {
        let mut offered: Description = parse(config)?;
        let additions = Additions::of(config);
        compare_vcpus(&mut self.qmp, &additions, &mut offered.machine)?;
        self.description.check(&offered)?;
        self.unknown_disks = compare_inventories(&mut self.qmp, &mut self.inventory, &additions)?;
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

/// Compares the source's inventory with this QEMU's, and sets here what was set there while the
/// guest ran. Returns the disks whose contents must be compared later.
fn compare_inventories(
    qmp: &mut Qmp,
    ours: &mut Inventory,
    additions: &Additions,
) -> Result<Vec<Disk>, PrepareError> {
    let Some(theirs) = &additions.inventory else { return Ok(Vec::new()) };
    let differences = ours.differences(theirs, additions.allowed);
    if !differences.is_empty() {
        return Err(PrepareError::Incompatible(differences.join("; ")));
    }
    inventory::apply(qmp, theirs, ours)
        .map_err(|error| PrepareError::Vm(QemuError::from(error).into()))?;
    let differ = additions.allowed.disks_differ;
    Ok(if differ { Vec::new() } else { ours.unknown_disks(theirs) })
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
