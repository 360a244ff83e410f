//! Giving a destination what was set at the source while its guest ran.

use serde_json::{Value, json};

use super::Inventory;
use super::comparison::same_device;
use crate::qmp::{Qmp, QmpError};

/// Limits that `block_set_io_throttle` insists on.
const ALWAYS: [&str; 6] = ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"];

/// Ejects what was ejected at the source, and limits the disks as they are limited there.
///
/// # Errors
/// QMP errors.
pub fn apply(qmp: &mut Qmp, theirs: &Inventory, ours: &mut Inventory) -> Result<(), QmpError> {
    for disk in &mut ours.disks {
        let Some(there) = same_device(&disk.device, &disk.name, &theirs.disks) else { continue };
        if there.medium.is_none() && disk.medium.is_some() && disk.removable {
            qmp.execute("eject", json!({ "id": disk.path, "force": true }))?;
            disk.medium = None;
        }
        if there.limits != disk.limits && disk.medium.is_some() {
            let mut limits = json!({ "id": disk.path });
            for name in ALWAYS {
                limits[name] = json!(0);
            }
            for (name, limit) in &there.limits {
                limits[name] = Value::from(*limit);
            }
            qmp.execute("block_set_io_throttle", limits)?;
            disk.limits = there.limits.clone();
        }
    }
    Ok(())
}
