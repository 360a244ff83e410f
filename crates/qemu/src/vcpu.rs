//! The CPU features that a guest sees, which the destination's processor must have too.
//!
//! A model's name says little: `host` is another set of features on each host, and `-cpu` may add
//! features to any model and remove them. QEMU loads a guest's state whatever the features are; the
//! guest crashes later, on an instruction that is missing. So the source sends the features that
//! the guest was started with, by their `-cpu` names, and the destination's vCPUs must have all of
//! them. Additional features do no harm.

mod words;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// Boolean properties of QEMU's vCPUs that are no CPU features: settings of QEMU's behavior, and
/// consequences of the machine type.
const NO_FEATURES: &str = "
    check cpuid-0xb enforce fill-mtrr-mask full-cpuid-auto-level host-cache-info host-phys-bits
    hotpluggable hotplugged hv-enforce-cpuid hv-passthrough kvm-no-smi-migration l3-cache
    legacy-cache legacy-multi-node migratable realized start-powered-off tcg-cpuid
    vmware-cpuid-freq xen-vapic
";

/// Aliases of features.
const SECOND_NAMES: &str = "ffxsr i64 pclmuldq sse3 xd";

/// The number of missing features that a message names.
const MOST_NAMED: usize = 12;

/// The optional member of a guest's description that holds the vCPU.
pub const MEMBER: &str = "vcpu";

/// The first vCPU of a guest; the others are equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vcpu {
    /// Such as `GenuineIntel`. A guest's kernel chooses code paths by it.
    pub vendor: String,
    /// Its features, by QEMU's names.
    pub features: BTreeSet<String>,
}

impl Vcpu {
    /// Reads it from a QEMU; `None` if QEMU does not report it.
    ///
    /// # Errors
    /// QMP errors.
    pub fn read(qmp: &mut Qmp) -> Result<Option<Self>, QmpError> {
        Self::read_features(qmp, |_| true)
    }

    /// The same with only those features that `other` has, which takes fewer commands.
    ///
    /// # Errors
    /// QMP errors.
    pub fn read_common(qmp: &mut Qmp, other: &Self) -> Result<Option<Self>, QmpError> {
        Self::read_features(qmp, |name| other.features.contains(name))
    }

    fn read_features(
        qmp: &mut Qmp,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<Option<Self>, QmpError> {
        let vcpus = qmp.execute("query-cpus-fast", json!({}))?;
        let Some(path) = vcpus[0]["qom-path"].as_str().map(str::to_owned) else { return Ok(None) };
        let listed = match qmp.execute("qom-list", json!({ "path": path })) {
            Ok(listed) => listed,
            Err(QmpError::Refused { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let properties = listed.as_array().into_iter().flatten();
        let mut names: BTreeSet<&str> = properties
            .filter(|property| property["type"] == "bool")
            .filter_map(|property| property["name"].as_str())
            .filter(|name| is_feature(name) && is_wanted(name))
            .collect();
        let get = |qmp: &mut Qmp, name: &str| {
            let value = qmp.execute("qom-get", json!({ "path": path, "property": name }));
            match value {
                Err(QmpError::Refused { .. }) => Ok(Value::Null),
                other => other,
            }
        };
        let in_words = words::read(qmp, &path)?;
        let has = |qmp: &mut Qmp, name: &str| match in_words.get(name) {
            Some(&has) => Ok(has),
            None => get(qmp, name).map(|value| value == true),
        };
        if !has(qmp, "vmx")? {
            // About a hundred sub-features of a feature that is off.
            names.retain(|name| !name.starts_with("vmx-"));
        }
        let mut features = BTreeSet::new();
        for name in names {
            if has(qmp, name)? {
                features.insert(name.to_owned());
            }
        }
        let vendor = get(qmp, "vendor")?.as_str().unwrap_or_default().to_owned();
        Ok(Some(Self { vendor, features }))
    }

    /// Describes what a guest with these vCPUs would miss on `of`, in words. `model` is the
    /// source's CPU model, for the advice about `-cpu`.
    #[must_use]
    pub fn misses(&self, of: &Self, model: &str) -> Option<String> {
        if self.vendor != of.vendor {
            return Some(format!(
                "the source's vCPUs are of `{}` and the destination's of `{}`: start it with \
                 `-cpu {model}` and the same features, on a processor of that vendor",
                self.vendor, of.vendor
            ));
        }
        let missing: Vec<String> = self
            .features
            .difference(&of.features)
            .take(MOST_NAMED + 1)
            .map(|name| format!("`{name}`"))
            .collect();
        if missing.is_empty() {
            return None;
        }
        let more = if missing.len() > MOST_NAMED { " and more" } else { "" };
        Some(format!(
            "the destination's vCPUs lack {}{more} of the source's features: start it with `-cpu \
             {model}` and the same features, on a processor that has them",
            missing[..missing.len().min(MOST_NAMED)].join(", ")
        ))
    }
}

/// Of several spellings (`sse4.1`, `sse4-1`, `sse4_1`), the one with hyphens counts, or the one
/// with a dot.
fn is_feature(name: &str) -> bool {
    let is_in = |list: &str| list.split_whitespace().any(|listed| listed == name);
    !name.contains('_')
        && !matches!(name, "sse4-1" | "sse4-2")
        && !name.starts_with("x-")
        && !is_in(NO_FEATURES)
        && !is_in(SECOND_NAMES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(vendor: &str, features: &[&str]) -> Vcpu {
        let features = features.iter().map(|&name| name.to_owned()).collect();
        Vcpu { vendor: vendor.into(), features }
    }

    #[test]
    fn vcpus_must_have_all_features_and_may_have_more() {
        let source = of("GenuineIntel", &["avx2", "kvmclock", "sse4.1"]);
        assert_eq!(source.misses(&source, "host"), None);
        let richer = of("GenuineIntel", &["avx2", "avx512f", "kvmclock", "sse4.1"]);
        assert_eq!(source.misses(&richer, "host"), None);
        let why = richer.misses(&of("GenuineIntel", &["sse4.1"]), "host").unwrap();
        assert!(why.contains("lack `avx2`, `avx512f`, `kvmclock` of"), "{why}");
        assert!(why.contains("-cpu host"), "{why}");
        let why = source.misses(&of("AuthenticAMD", &["avx2"]), "host").unwrap();
        assert!(why.contains("`GenuineIntel`") && why.contains("`AuthenticAMD`"), "{why}");
        let many: Vec<String> = (0..40).map(|number| format!("f{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let why = of("", &many).misses(&of("", &[]), "max").unwrap();
        assert_eq!(why.matches("`f").count(), MOST_NAMED);
        assert!(why.contains(" and more of"), "{why}");
    }

    #[test]
    fn vcpu_properties_that_are_no_features_are_ignored() {
        for name in ["avx2", "sse4.1", "kvm-pv-eoi", "hv-relaxed", "vmx-ept", "lahf-lm"] {
            assert!(is_feature(name), "{name}");
        }
        for name in ["realized", "x-migrate-smi-count", "sse4_1", "lahf_lm", "enforce", "xd"] {
            assert!(!is_feature(name), "{name}");
        }
    }
}
