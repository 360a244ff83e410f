//! vCPUs of real QEMUs. A guest can move to any destination that has all the features the guest was
//! started with, regardless of the model's name.

use crate::support::versions;
use vmferry::{DestinationVm, PrepareError, SourceVm};
use vmferry_qemu::{CarriedSource, Expected, QemuDestination, QemuSource};
use vmferry_qemu_lab::{Machine, World};

/// The verdict of a destination with `-cpu there` on a guest with `-cpu here`, attached and
/// carried, before anything is sent.
fn offer(machine: &Machine, here: &str, there: &str) -> [Result<(), String>; 2] {
    let world = World::new();
    let source = machine.clone().with(&["-cpu", here]).start(&world, "here");
    let attached = QemuSource::attach(&source.qmp).unwrap().describe();
    let carried = {
        use vmferry::vmm::streamed::StreamedVm;
        CarriedSource::attach(&source.qmp, 0).unwrap().describe()
    };
    let mut number = 0;
    [attached, carried].map(|guest| {
        number += 1;
        let waiting = machine.clone().with(&["-cpu", there]);
        let waiting = waiting.incoming(&world, &format!("there-{number}"));
        let mut there = QemuDestination::attach(&waiting.qmp, Expected::default()).unwrap();
        match there.prepare(&guest) {
            Ok(_) => Ok(()),
            Err(PrepareError::Incompatible(why)) => Err(why),
            Err(error) => panic!("{error}"),
        }
    })
}

#[test]
fn features_decide_and_not_the_name_of_the_cpu_model() {
    for &version in versions() {
        let machine = Machine::new(version, "");
        for (here, there) in [("qemu64", "qemu64-v1"), ("qemu64", "qemu64,+popcnt,+sse4.1")] {
            assert_eq!(offer(&machine, here, there), [Ok(()), Ok(())], "{version:?}: {there}");
        }
        // The same name, with different features.
        for why in offer(&machine, "max", "max,-avx2,-rdrand") {
            let why = why.unwrap_err();
            assert!(why.contains("lack `avx2`, `rdrand` of the source's features"), "{why}");
        }
        for why in offer(&machine, "qemu64", "Nehalem") {
            let why = why.unwrap_err();
            assert!(why.contains("`AuthenticAMD`") && why.contains("`GenuineIntel`"), "{why}");
        }
    }
}

/// Features that KVM offers to guests count, too.
#[test]
fn kvm_features_count_as_cpu_features() {
    for &version in versions() {
        let machine = Machine::on_kvm(version, "");
        // A guest that may run nested guests is not attached, and the QEMU of either vendor knows
        // both names. QEMU 7.2 can't set the capabilities (MSR 0x10a) that some hosts have.
        let host = "host,vmx=off,svm=off,arch-capabilities=off";
        let lacking = format!("{host},-kvm-pv-eoi,-kvm-steal-time");
        assert_eq!(offer(&machine, host, host), [Ok(()), Ok(())], "{version:?}");
        for why in offer(&machine, host, &lacking) {
            let why = why.unwrap_err();
            assert!(why.contains("lack `kvm-pv-eoi`, `kvm-steal-time` of"), "{why}");
        }
    }
}
