//! The settings of QEMU's own migration: what vmferry needs, and what they were before.
//!
//! Whoever used that migration before may have left anything on (multifd, TLS, post-copy), of which
//! nothing works through a local descriptor: all of it is off meanwhile.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// Capabilities that saving a state without shared memory needs.
const FOR_SAVING: [&str; 3] = ["pause-before-switchover", "x-ignore-shared", "events"];

/// Capabilities that loading it needs.
const FOR_LOADING: [&str; 2] = ["x-ignore-shared", "events"];

/// Capabilities and parameters as they were.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Those that were on.
    on: Vec<String>,
    parameters: Value,
}

impl Default for Settings {
    /// QEMU's own (`migration/options.c`), for when nobody knows what they were.
    fn default() -> Self {
        let parameters = json!({
            "max-bandwidth": 128 << 20, "downtime-limit": 300, "tls-creds": "", "tls-hostname": "",
        });
        Self { on: Vec::new(), parameters }
    }
}

impl Settings {
    /// Reads them.
    ///
    /// # Errors
    /// QMP's.
    pub fn read(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let on = capabilities_on(qmp)?;
        let all = qmp.execute("query-migrate-parameters", json!({}))?;
        let text = |name: &str| all[name].as_str().unwrap_or_default();
        let parameters = json!({
            "max-bandwidth": all["max-bandwidth"],
            "downtime-limit": all["downtime-limit"],
            "tls-creds": text("tls-creds"),
            "tls-hostname": text("tls-hostname"),
        });
        Ok(Self { on, parameters })
    }

    /// Sets them again.
    ///
    /// # Errors
    /// QMP's.
    pub fn restore(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        qmp.execute("migrate-set-parameters", self.parameters.clone())?;
        let wanted: Vec<&str> = self.on.iter().map(String::as_str).collect();
        set_capabilities(qmp, &wanted)
    }

    /// Sets what saving the state needs.
    ///
    /// # Errors
    /// QMP's: a QEMU that has no such capability says so.
    pub fn for_saving(qmp: &mut Qmp) -> Result<(), QmpError> {
        set_capabilities(qmp, &FOR_SAVING)?;
        // Only ROMs and devices travel here, and the guest stands still for the last of them.
        let local = json!({
            "max-bandwidth": 0, "downtime-limit": 2_000_000, "tls-creds": "", "tls-hostname": "",
        });
        qmp.execute("migrate-set-parameters", local)?;
        Ok(())
    }

    /// Sets what loading such a state needs.
    ///
    /// # Errors
    /// QMP's.
    pub fn for_loading(qmp: &mut Qmp) -> Result<(), QmpError> {
        set_capabilities(qmp, &FOR_LOADING)?;
        qmp.execute("migrate-set-parameters", json!({ "tls-creds": "", "tls-hostname": "" }))?;
        Ok(())
    }
}

fn capabilities_on(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    let all = qmp.execute("query-migrate-capabilities", json!({}))?;
    let on = all.as_array().into_iter().flatten().filter(|one| one["state"] == true);
    Ok(on.filter_map(|one| one["capability"].as_str().map(str::to_owned)).collect())
}

/// Turns these capabilities on and all others off.
fn set_capabilities(qmp: &mut Qmp, wanted: &[&str]) -> Result<(), QmpError> {
    let on = capabilities_on(qmp)?;
    let off = on.iter().map(String::as_str).filter(|name| !wanted.contains(name));
    let changes: Vec<Value> = off
        .map(|name| json!({ "capability": name, "state": false }))
        .chain(wanted.iter().map(|name| json!({ "capability": name, "state": true })))
        .collect();
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": changes })).map(|_| ())
}
