//! `vmferry fleet init`.

use std::sync::Arc;

use serde_json::json;
use vmferry_fleet::Fleet;

use super::config::FleetTable;
use crate::exit::Failure;
use crate::output::Output;

/// Makes the fleet, or gives it a new incarnation.
pub fn run(table: &FleetTable, restored: bool, output: &Output) -> Result<(), Failure> {
    let prefix = table.prefix()?;
    let etcd = Arc::new(table.connect()?);
    let made = if restored {
        Fleet::renew(&etcd, &prefix)?;
        false
    } else {
        Fleet::make(&etcd, &prefix)?
    };
    let fleet = Fleet::join(etcd, prefix)?;
    let (prefix, incarnation) = (fleet.prefix().to_string(), fleet.incarnation());
    let cluster = format!("{:016x}", fleet.cluster());
    let done = json!({
        "prefix": prefix, "cluster": cluster, "incarnation": incarnation, "made": made,
        "renewed": restored,
    });
    output.result(&done, || {
        let fleet = format!("the fleet {prefix} in etcd cluster {cluster}");
        match (made, restored) {
            (true, _) => format!("made {fleet}, incarnation {incarnation}"),
            (false, true) => format!("gave {fleet} a new incarnation, {incarnation}"),
            (false, false) => format!("{fleet} is there already, incarnation {incarnation}"),
        }
    });
    Ok(())
}
