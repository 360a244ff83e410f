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
        let what = match (made, restored) {
            (true, _) => "made",
            (false, true) => "gave a new incarnation to",
            (false, false) => "found, and changed nothing of,",
        };
        format!("{what} the fleet {prefix} in etcd cluster {cluster} (incarnation {incarnation})")
    });
    Ok(())
}
