//! Runs the seeds of the fuzz target of QMP answers.

use vmferry_fuzz_targets::qmp;

use serde_json::{Value, json};
use vmferry_qemu::answers::READERS;

seed_tests!(qmp, places: 100, differs: |_| false);

/// For each reader a greeting and the answers to its commands, and invalid output.
fn seeds() -> Vec<(String, Vec<u8>)> {
    let greeting =
        json!({ "QMP": { "version": { "qemu": { "major": 10, "minor": 0, "micro": 2 } } } });
    let cpus = json!([{ "thread-id": 1, "cpu-index": 0 }]);
    let begun = [greeting.clone(), of(json!({})), of(cpus.clone())];
    let tree = "\
        bus: main-system-bus\r\n\
        \x20 dev: virtio-blk-pci, id \"disk\"\r\n\
        \x20   class SCSI controller, addr 00:03.0, pci id 1af4:1001\r\n\
        \x20 dev: vhost-user-fs-pci, id \"\"\r\n";
    let seen = tree.replace("vhost-user-fs-pci", "virtio-9p-pci");
    let blocks = "Block Name PSize Offset Used Total HVA RO\n ram 4 KiB 0x0 0x20000000 0x20000000 \
                  0x7f54c7fff000 rw\n a b 2 MiB 0x20080000 0x20000 0x200000\n \
                  c 18446744073709551615 GiB 0x0 0xffffffffffffffff 0x1 0xffffffffffffffff rw\n";
    let mtree = " 0000000000100000-000000007fffffff (prio 0, ram): a b @0000000000100000 KVM\n";
    let hva = "Host virtual address for 0x0 (a b) is 0x1000";
    let stop = json!({
        "event": "STOP", "timestamp": { "seconds": u64::MAX, "microseconds": u64::MAX },
    });
    let migration = json!({
        "status": "active", "ram": { "remaining": u64::MAX }, "expected-downtime": u64::MAX,
        "blocked-reasons": ["a device"],
    });
    let drive = json!({
        "device": "disk", "qdev": "/machine/peripheral/disk/virtio-backend",
        "inserted": {
            "file": "/a", "drv": "qcow2", "ro": false, "node-name": "d",
            "image": { "filename": "/a", "format": "qcow2", "virtual-size": 1 << 30 },
            "dirty-bitmaps": [{ "name": "b", "granularity": 65_536, "persistent": false }],
        },
    });
    let answers: [Vec<Value>; READERS as usize] = [
        vec![of(json!(tree)), of(json!("pc-q35-10.0-machine")), of(cpus.clone())],
        vec![
            of(json!(seen)),
            of(json!([{ "name": "disk", "type": "child<virtio-blk-pci>" }])),
            of(json!([])),
            of(json!([{ "name": "io", "type": "child<iothread>" }])),
            of(json!("n: index=0,type=tap,ifname=tap0\r\n")),
            of(json!({ "enabled": true })),
            of(json!([{ "qom-path": "/machine/unattached/device[0]" }])),
            of(json!(false)),
            of(json!(false)),
            of(json!([{ "node-name": "d", "drv": "file", "cache": { "direct": true } }])),
        ],
        vec![of(cpus)],
        vec![of(json!(blocks)), of(json!(mtree)), of(json!(hva)), of(json!("none"))],
        vec![of(json!({ "name": "web" })), of(json!({ "UUID": "x" }))],
        vec![of(json!({ "status": "running" })), of(migration.clone())],
        vec![of(json!({ "enabled": false })), of(json!([{ "size": 1 << 30 }]))],
        vec![of(json!([{ "capability": "events", "state": true }])), of(json!({ "mode": 7 }))],
        vec![
            of(json!(tree)),
            of(json!("q35-machine")),
            of(json!([])),
            of(json!(blocks)),
            of(json!([{ "id": "ram", "share": true }])),
            of(json!("/dev/null")),
        ],
        vec![
            of(json!({ "sockets": 1, "cores": 2, "cpus": 2 })),
            of(json!(blocks)),
            of(json!(tree)),
            of(json!([])),
            of(json!([drive.clone()])),
            of(json!([drive])),
        ],
        vec![stop, of(migration)],
        vec![json!({ "event": "RESUME" }), json!({ "event": "MIGRATION", "data": {} })],
    ];
    let mut seeds = Vec::new();
    for (reader, answers) in answers.into_iter().enumerate() {
        let lines = begun.iter().chain(&answers).map(|line| format!("{line}\n"));
        let seed = [vec![reader as u8], lines.collect::<String>().into_bytes()].concat();
        seeds.push((format!("reader-{reader:02}"), seed));
    }
    let deep = "[".repeat(4000);
    let line = format!("\0{greeting}\n{{\"return\":{deep}");
    seeds.push(("deep".into(), line.into_bytes()));
    // QEMU's names can be of any length, and errors quote them.
    let long = "x".repeat(9000);
    for (name, reader, answers) in [
        ("long-refusal", 0, vec![json!({ "error": { "class": "GenericError", "desc": long } })]),
        ("long-status", 5, vec![of(json!({ "status": long }))]),
        (
            "long-reasons",
            5,
            vec![
                of(json!({ "status": "running" })),
                of(json!({ "status": "none", "blocked-reasons": [long, long] })),
            ],
        ),
        (
            "long-device",
            1,
            vec![of(json!(format!("  dev: vfio-pci, id \"{long}\"\r\n"))), of(json!("type=user"))],
        ),
        (
            "long-block",
            3,
            vec![of(json!(blocks.replace("a b", &long))), of(json!(mtree)), of(json!(hva))],
        ),
    ] {
        let lines = begun.iter().chain(&answers).map(|line| format!("{line}\n"));
        let seed = [vec![reader], lines.collect::<String>().into_bytes()].concat();
        seeds.push((name.into(), seed));
    }
    seeds.push(("no-qmp".into(), b"\0HTTP/1.1 400 Bad Request\n".to_vec()));
    seeds
}

/// A return value of QEMU.
fn of(value: Value) -> Value {
    json!({ "return": value })
}
