//! The settings of QEMU's own migration: those that vmferry needs, and the ones before.
//!
//! An earlier user of that migration may have left anything on (multifd, TLS, post-copy), none of
//! which works through a local socket. All of it is off while vmferry migrates.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// Capabilities that saving a state without shared memory needs.
const FOR_SAVING: [&str; 3] = ["pause-before-switchover", "x-ignore-shared", "events"];

/// Capabilities that loading it needs. Without `late-block-activate`, QEMU before 10.0 takes the
/// locks of the guest's disks as soon as it has loaded: a source that has lost the link then could
/// not resume its guest.
const FOR_LOADING: [&str; 3] = ["x-ignore-shared", "events", "late-block-activate"];

/// Capabilities that post-copy needs, on both sides.
const POST_COPY: [&str; 2] = ["postcopy-ram", "postcopy-preempt"];

/// Parameters that vmferry may change, including those of newer QEMUs.
const PARAMETERS: [&str; 12] = [
    "max-bandwidth",
    "max-postcopy-bandwidth",
    "downtime-limit",
    "tls-creds",
    "tls-hostname",
    "multifd-channels",
    "multifd-compression",
    "cpu-throttle-initial",
    "cpu-throttle-increment",
    "max-cpu-throttle",
    "avail-switchover-bandwidth",
    "mode",
];

/// The throttling step in percent of a vCPU's time: the same as for any guest.
const THROTTLE_STEP: u8 = 20;

/// The longest downtime limit that QEMU accepts, in milliseconds (`migration/options.c`).
const LONGEST_DOWNTIME_MS: u64 = 2_000_000;

/// Saved capabilities and parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The capabilities that were on.
    on: Vec<String>,
    parameters: Value,
}

/// How QEMU must stream a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streaming {
    /// Channels in addition to the main stream.
    pub channels: u8,
    /// The downtime limit.
    pub downtime: Duration,
    /// The most percent of the vCPUs' time that may be taken while the guest writes too fast.
    pub throttle: u8,
    /// Whether QEMU may use its post-copy.
    pub post_copy: bool,
}

impl Default for Settings {
    /// QEMU's defaults (`migration/options.c`), if the earlier settings are unknown.
    fn default() -> Self {
        let parameters = json!({
            "max-bandwidth": 128 << 20, "downtime-limit": 300, "tls-creds": "", "tls-hostname": "",
        });
        Self { on: Vec::new(), parameters }
    }
}

impl Settings {
    /// Reads them from QEMU.
    ///
    /// # Errors
    /// QMP errors.
    pub fn read(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let on = capabilities_on(qmp)?;
        let all = qmp.execute("query-migrate-parameters", json!({}))?;
        let known = PARAMETERS.iter().filter_map(|&name| {
            let is_text = name.starts_with("tls-");
            let value = match &all[name] {
                // QEMU does not list a name that was never set.
                Value::Null if is_text => json!(""),
                Value::Null => return None,
                value => value.clone(),
            };
            Some((name.to_owned(), value))
        });
        Ok(Self { on, parameters: Value::Object(known.collect()) })
    }

    /// Restores them.
    ///
    /// # Errors
    /// QMP errors.
    pub fn restore(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        qmp.execute("migrate-set-parameters", self.parameters.clone())?;
        let wanted: Vec<&str> = self.on.iter().map(String::as_str).collect();
        set_capabilities(qmp, &wanted)
    }

    /// Sets what saving the state needs.
    ///
    /// # Errors
    /// QMP errors, also if QEMU lacks a capability.
    pub fn for_saving(qmp: &mut Qmp) -> Result<(), QmpError> {
        set_capabilities(qmp, &FOR_SAVING)?;
        // Only ROMs and devices are sent here, and the guest is paused for the last of them.
        let local = json!({
            "max-bandwidth": 0, "downtime-limit": LONGEST_DOWNTIME_MS,
            "tls-creds": "", "tls-hostname": "",
        });
        qmp.execute("migrate-set-parameters", local)?;
        Ok(())
    }

    /// Sets what loading such a state needs.
    ///
    /// # Errors
    /// QMP errors.
    pub fn for_loading(qmp: &mut Qmp) -> Result<(), QmpError> {
        set_capabilities(qmp, &FOR_LOADING)?;
        qmp.execute("migrate-set-parameters", json!({ "tls-creds": "", "tls-hostname": "" }))?;
        Ok(())
    }

    /// Sets what the QEMU needs from which a guest is carried; `self` was read from the same QEMU.
    ///
    /// # Errors
    /// QMP errors.
    pub fn for_streaming(&self, qmp: &mut Qmp, streaming: &Streaming) -> Result<(), QmpError> {
        let mut wanted = vec!["pause-before-switchover", "events"];
        let mut parameters = self.for_channels(streaming.channels, &mut wanted);
        // The reader of the streams limits the bandwidth.
        parameters["max-bandwidth"] = json!(0);
        if streaming.post_copy {
            wanted.extend(POST_COPY);
            parameters["max-postcopy-bandwidth"] = json!(0);
        }
        parameters["downtime-limit"] = json!(downtime_ms(streaming.downtime));
        if streaming.throttle > 0 {
            let most = streaming.throttle.min(99);
            wanted.push("auto-converge");
            parameters["cpu-throttle-initial"] = json!(THROTTLE_STEP.min(most));
            parameters["cpu-throttle-increment"] = json!(THROTTLE_STEP);
            parameters["max-cpu-throttle"] = json!(most);
        }
        set_capabilities(qmp, &wanted)?;
        qmp.execute("migrate-set-parameters", parameters)?;
        Ok(())
    }

    /// Sets what a QEMU needs to receive a carried guest; `self` was read from the same QEMU.
    ///
    /// # Errors
    /// QMP errors.
    pub fn for_taking_streams(
        &self,
        qmp: &mut Qmp,
        channels: u8,
        post_copy: bool,
    ) -> Result<(), QmpError> {
        let mut wanted = vec!["events", "late-block-activate"];
        if post_copy {
            wanted.extend(POST_COPY);
        }
        let parameters = self.for_channels(channels, &mut wanted);
        set_capabilities(qmp, &wanted)?;
        qmp.execute("migrate-set-parameters", parameters)?;
        Ok(())
    }

    /// The parameters and capabilities that both sides of a stream need.
    fn for_channels(&self, channels: u8, wanted: &mut Vec<&'static str>) -> Value {
        let mut parameters = json!({ "tls-creds": "", "tls-hostname": "" });
        // Only the parameters that this QEMU has.
        for (name, value) in [("avail-switchover-bandwidth", json!(0)), ("mode", json!("normal"))] {
            if self.parameters.get(name).is_some() {
                parameters[name] = value;
            }
        }
        if channels > 0 {
            wanted.push("multifd");
            parameters["multifd-channels"] = json!(channels);
            parameters["multifd-compression"] = json!("none");
        }
        parameters
    }
}

/// Sets the downtime limit of a carried guest.
///
/// # Errors
/// QMP errors.
pub fn set_downtime(qmp: &mut Qmp, downtime: Duration) -> Result<(), QmpError> {
    let parameters = json!({ "downtime-limit": downtime_ms(downtime) });
    qmp.execute("migrate-set-parameters", parameters).map(|_| ())
}

fn downtime_ms(downtime: Duration) -> u64 {
    u64::try_from(downtime.as_millis()).unwrap_or(u64::MAX).min(LONGEST_DOWNTIME_MS)
}

/// Whether QEMU was told that it may use its post-copy.
///
/// # Errors
/// QMP errors.
pub fn may_use_post_copy(qmp: &mut Qmp) -> Result<bool, QmpError> {
    Ok(capabilities_on(qmp)?.iter().any(|name| name == POST_COPY[0]))
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
