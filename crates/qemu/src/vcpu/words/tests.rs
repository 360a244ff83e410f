use std::collections::BTreeSet;

use serde_json::json;
use vmferry_qemu_lab::{Machine, Qemu, Version, World};

use super::*;

/// The names whose number has this bit. Two features that are confused differ in one of the bits.
fn some<'a>(names: &[&'a str], bit: u32) -> BTreeSet<&'a str> {
    let numbered = (1_u32..).zip(names);
    numbered.filter(|(number, _)| number >> bit & 1 == 1).map(|(_, &name)| name).collect()
}

/// A QEMU's monitor and the path of its first vCPU.
fn vcpu(qemu: &Qemu) -> (Qmp, Value) {
    let mut qmp = Qmp::connect(&qemu.qmp).unwrap();
    let path = qmp.execute("query-cpus-fast", json!({})).unwrap()[0]["qom-path"].take();
    (qmp, path)
}

/// Starts QEMUs with some of the features each, and compares what their words tell. Whether the
/// accelerator has a feature does not matter.
fn words_tell_the_features(machine: &Machine, is_tested: impl Fn(&str) -> bool) {
    let world = World::new();
    let any = machine.start(&world, "any");
    let (mut qmp, path) = vcpu(&any);
    let listed = qmp.execute("qom-list", json!({ "path": path })).unwrap();
    let listed: BTreeSet<&str> =
        listed.as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
    let in_table: BTreeSet<&str> = WORDS
        .iter()
        .flat_map(|(_, names)| names.split_whitespace())
        .map(|name| name.split_once(':').unwrap().1)
        .collect();
    let tested: BTreeSet<&str> = in_table.into_iter().filter(|name| is_tested(name)).collect();
    let names: Vec<&str> = tested.intersection(&listed).copied().collect();
    let is_newest = machine.version == Version::V10_0;
    assert!(!is_newest || names.len() == tested.len(), "QEMU has other names: {names:?}");
    for bit in 0..names.len().ilog2() + 1 {
        let wanted = some(&names, bit);
        let cpu: String = wanted.iter().map(|name| format!(",{name}=on")).collect();
        let machine = machine.clone().with(&["-cpu", &format!("base{cpu}")]);
        let qemu = machine.start(&world, &format!("some-{bit}"));
        let (mut qmp, path) = vcpu(&qemu);
        let mut told = BTreeSet::new();
        // Features that the accelerator lacks are in the other property.
        for property in ["feature-words", "filtered-features"] {
            let words = json!({ "path": path, "property": property });
            let reported = named(&qmp.execute("qom-get", words).unwrap());
            told.extend(reported.into_iter().filter(|(_, has)| *has).map(|(name, _)| name));
        }
        told.retain(|name| names.contains(name));
        assert_eq!(told, wanted, "{:?}", machine.version);
    }
}

#[test]
fn words_tell_each_feature_of_emulated_vcpus() {
    for version in Version::ALL {
        let machine = Machine::new(version, "");
        words_tell_the_features(&machine, |name| !name.starts_with("kvm"));
    }
}

#[test]
fn words_tell_each_feature_that_kvm_offers() {
    for version in Version::ALL {
        let machine = Machine::on_kvm(version, "");
        words_tell_the_features(&machine, |name| name.starts_with("kvm"));
    }
}
