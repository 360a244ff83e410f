//! The descriptions that sources and destinations exchange, as frozen bytes.

use serde_json::json;
use vmferry_memory::SlotId;

use super::*;
use crate::carried::StreamedBlock;
use crate::ram;

fn machine() -> Machine {
    let devices = vec!["virtio-blk-pci at 00:03.0".into()];
    Machine { kind: "pc-q35-10.0".into(), vcpus: 2, cpu: None, devices }
}

/// A source's description of an attached guest: frozen, for both versions of the protocol.
const ATTACHED: &str = concat!(
    r#"{"host":"boot","machine":{"kind":"pc-q35-10.0","vcpus":2,"#,
    r#""devices":["virtio-blk-pci at 00:03.0"]},"blocks":[{"name":"pc.ram","#,
    r#""bytes":134217728,"carrier":"vmferry","file":[27,9]},{"name":"pc.bios","#,
    r#""bytes":262144,"carrier":"qemu","file":[0,0]}]}"#,
);
/// The same for a carried guest.
const CARRIED: &str = concat!(
    r#"{"host":"boot","machine":{"kind":"pc-q35-10.0","vcpus":2,"#,
    r#""devices":["virtio-blk-pci at 00:03.0"]},"blocks":[{"name":"pc.ram","#,
    r#""bytes":134217728,"most":134217728}],"files":[[27,9]],"multifd":2}"#,
);

fn refusal<T: std::fmt::Debug + DeserializeOwned>(json: &str) -> String {
    parse::<T>(json.as_bytes()).unwrap_err().to_string()
}

#[test]
fn golden_description_of_an_attached_guest() {
    let block =
        |name: &str, bytes, carrier, file| Block { name: name.into(), bytes, carrier, file };
    let blocks = [
        block("pc.ram", 128 << 20, Carrier::Vmferry, (27, 9)),
        block("pc.bios", 256 << 10, Carrier::Qemu, (0, 0)),
    ];
    let written = ram::describe(&machine(), &blocks, "boot", &Additions::default());
    let written: serde_json::Value = serde_json::from_slice(&written).unwrap();
    assert_eq!(written, serde_json::from_str::<serde_json::Value>(ATTACHED).unwrap());
    let read: Offered = parse(ATTACHED.as_bytes()).unwrap();
    assert_eq!(
        (read.host.as_str(), read.machine, &read.blocks[..]),
        ("boot", machine(), &blocks[..])
    );
}

#[test]
fn golden_description_with_vcpus_is_read_by_older_releases() {
    let features = ["avx2".to_owned()].into();
    let vcpu = Some(Vcpu { vendor: "GenuineIntel".into(), features });
    let additions = Additions { vcpu, ..Additions::default() };
    let written = ram::describe(&machine(), &[], "boot", &additions);
    let text = String::from_utf8(written.clone()).unwrap();
    let member = r#""optional":{"vcpu":{"vendor":"GenuineIntel","features":["avx2"]}}"#;
    assert!(text.contains(member), "{text}");
    assert_eq!(parse::<Offered>(&written).unwrap().machine, machine());
    assert_eq!(Additions::of(&written), additions);
}

#[test]
fn golden_description_of_a_carried_guest() {
    let block = StreamedBlock { name: "pc.ram".into(), bytes: 128 << 20, most: 128 << 20 };
    let description = Description {
        host: "boot".into(),
        machine: machine(),
        blocks: vec![block],
        files: vec![(27, 9)],
        multifd: 2,
    };
    assert_eq!(json!(description), serde_json::from_str::<serde_json::Value>(CARRIED).unwrap());
    assert_eq!(parse::<Description>(CARRIED.as_bytes()).unwrap(), description);
    assert_eq!(description.layout()[0].slot, SlotId(0));
}

#[test]
fn unknown_fields_are_refused_by_name_unless_optional() {
    for (json, is_read) in [
        (ATTACHED.replacen('{', r#"{"optional":{"firmware":"x"},"#, 1), true),
        (ATTACHED.replacen('{', r#"{"firmware":"x","#, 1), false),
        (ATTACHED.replacen(r#""vcpus":2"#, r#""vcpus":2,"firmware":"x""#, 1), false),
    ] {
        let read = parse::<Offered>(json.as_bytes());
        assert_eq!(read.is_ok(), is_read, "{read:?}");
        if !is_read {
            assert!(refusal::<Offered>(&json).contains("unknown field `firmware`"));
        }
    }
    let newer = CARRIED.replacen('{', r#"{"dirty_limit":1,"#, 1);
    assert!(refusal::<Description>(&newer).contains("unknown field `dirty_limit`"));
    let optional = CARRIED.replacen('{', r#"{"optional":{"dirty_limit":1},"#, 1);
    assert!(parse::<Description>(optional.as_bytes()).is_ok());
}
