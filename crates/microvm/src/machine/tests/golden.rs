//! Golden data: the configuration of a guest, and the state of a guest of threads.

use super::*;

/// Configurations as they are sent in BEGIN, and whether this release writes that form.
const CONFIGS: [(bool, &str); 3] = [
    (true, r#"{"memory_bytes":67108864,"vcpus":2,"command_line":"hot=4,random ticks"}"#),
    (true, r#"{"memory_bytes":67108864,"vcpus":1,"command_line":"","balloon":true}"#),
    (false, r#"{"memory_bytes":67108864,"vcpus":1,"command_line":"","balloon":false}"#),
];

/// A guest of two threads after 0x0102 ticks, and 0x0304 writes of its device.
const PROCESS: [(&str, &[u8]); 2] =
    [("process", b"\x02\0\0\0\x02\x01\0\0\0\0\0\0"), ("heartbeat", b"\x04\x03\0\0\0\0\0\0")];

#[test]
fn config_matches_its_golden_json() {
    for (written, json) in CONFIGS {
        let config: GuestConfig = vmferry::vmm::newer::read(json.as_bytes()).expect(json);
        let text = serde_json::to_string(&config).unwrap();
        assert!(!written || text == json, "{text}");
    }
    for (json, is_read) in [
        (CONFIGS[0].1.replacen('{', r#"{"optional":{"gpu":1},"#, 1), true),
        (CONFIGS[0].1.replacen('{', r#"{"gpu":1,"#, 1), false),
    ] {
        let read: serde_json::Result<GuestConfig> = vmferry::vmm::newer::read(json.as_bytes());
        assert_eq!(read.is_ok(), is_read, "{read:?}");
        assert!(is_read || read.unwrap_err().to_string().contains("unknown field `gpu`"));
    }
}

#[test]
fn process_guest_loads_and_saves_its_golden_state() {
    let mut out = StateWriter::new();
    for (name, payload) in PROCESS {
        out.section(&SectionKind::mandatory(name, 1), 0, payload).unwrap();
    }
    let golden = out.finish();
    let mut machine = Machine::new(config(GuestKind::Process, 2, "idle")).unwrap();
    machine.load(&golden).unwrap();
    for protocol in vmferry::config::PROTOCOL_VERSIONS {
        assert!(machine.save_for(protocol).unwrap() == golden, "another layout for {protocol}");
    }
    // The golden state has all sections that this release knows.
    let known = machine.backend.sections().concat().len() + heartbeat::SECTIONS.len();
    assert_eq!(known, PROCESS.len());
}
