//! The settings of QEMU's own migration that vmferry changes, as they were before.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// Capabilities that vmferry sets.
const CAPABILITIES: [&str; 3] = ["pause-before-switchover", "x-ignore-shared", "events"];

/// Capabilities and parameters as they were.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    capabilities: Vec<Value>,
    parameters: Value,
}

impl Settings {
    /// Reads them.
    ///
    /// # Errors
    /// QMP's.
    pub fn read(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let all = qmp.execute("query-migrate-capabilities", json!({}))?;
        let capabilities = all.as_array().cloned().unwrap_or_default();
        let capabilities = capabilities
            .into_iter()
            .filter(|capability| CAPABILITIES.iter().any(|name| capability["capability"] == *name))
            .collect();
        let all = qmp.execute("query-migrate-parameters", json!({}))?;
        let parameters = json!({
            "max-bandwidth": all["max-bandwidth"],
            "downtime-limit": all["downtime-limit"],
        });
        Ok(Self { capabilities, parameters })
    }

    /// Sets them again.
    ///
    /// # Errors
    /// QMP's.
    pub fn restore(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        qmp.execute("migrate-set-parameters", self.parameters.clone())?;
        let capabilities = json!({ "capabilities": self.capabilities });
        qmp.execute("migrate-set-capabilities", capabilities)?;
        Ok(())
    }

    /// Sets what a device state needs that leaves shared memory out.
    ///
    /// # Errors
    /// QMP's: a QEMU that has no such capability says so.
    pub fn for_saving(qmp: &mut Qmp) -> Result<(), QmpError> {
        let on = |name: &str| json!({ "capability": name, "state": true });
        let all = CAPABILITIES.map(on);
        let capabilities = json!({ "capabilities": all });
        qmp.execute("migrate-set-capabilities", capabilities)?;
        // Only ROMs and devices travel here, and the guest stands still for the last of them.
        let fast = json!({ "max-bandwidth": 0, "downtime-limit": 2_000_000 });
        qmp.execute("migrate-set-parameters", fast)?;
        Ok(())
    }

    /// Sets what loading such a state needs.
    ///
    /// # Errors
    /// QMP's.
    pub fn for_loading(qmp: &mut Qmp) -> Result<(), QmpError> {
        let on = |name: &str| json!({ "capability": name, "state": true });
        let both = ["x-ignore-shared", "events"].map(on);
        let capabilities = json!({ "capabilities": both });
        qmp.execute("migrate-set-capabilities", capabilities)?;
        Ok(())
    }
}
