//! The systemd units of `vmferry receive` and `vmferry daemon`, checked by systemd itself. Nothing
//! is installed or started by systemd.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::{Host, World, text};

/// A unit, and its accepted exposure in tenths.
#[derive(Clone, Copy)]
struct Unit {
    name: &'static str,
    /// The receiver's comes from the network, users and `/dev/kvm`; the daemon's from root with
    /// three capabilities, the network and libvirt's socket, and because its helper must see the
    /// same files as libvirt.
    max_exposure: &'static str,
    capabilities: &'static str,
}

const UNITS: [Unit; 2] = [
    Unit { name: "vmferry-receive", max_exposure: "20", capabilities: "CapabilityBoundingSet=\n" },
    Unit {
        name: "vmferry-daemon",
        max_exposure: "26",
        capabilities: "CapabilityBoundingSet=CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER\n",
    },
];

impl Unit {
    fn text(self) -> String {
        let path = format!("../../dist/systemd/{}.service", self.name);
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
    }

    /// The unit as it is installed, except for the path of the command.
    fn installed(self, directory: &Path, text: &str) -> PathBuf {
        let path = directory.join(format!("{}.service", self.name));
        let vmferry = env!("CARGO_BIN_EXE_vmferry");
        std::fs::write(&path, text.replace("/usr/local/bin/vmferry", vmferry)).unwrap();
        path
    }

    /// The words of a setting, of all its lines.
    fn setting(self, name: &str) -> Vec<String> {
        let text = self.text();
        let lines = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        lines.flat_map(str::split_whitespace).map(str::to_owned).collect()
    }
}

/// Runs `systemd-analyze`.
fn analyze(arguments: &[&str], unit: &Path) -> Output {
    let output = Command::new("systemd-analyze").args(arguments).arg(unit).output();
    output.unwrap_or_else(|error| panic!("this test needs systemd-analyze: {error}"))
}

#[test]
fn units_are_valid_for_systemd() {
    let directory = tempfile::tempdir().unwrap();
    for unit in UNITS {
        let text = unit.text();
        let good = analyze(&["verify"], &unit.installed(directory.path(), &text));
        let said = String::from_utf8_lossy(&good.stderr);
        // systemd also checks the system's own units that this one names.
        let about_ours: Vec<_> = said.lines().filter(|line| line.contains("vmferry")).collect();
        assert!(about_ours.is_empty(), "{said}");
        // A mistake would be reported.
        let wrong = text.replace("NoNewPrivileges=yes", "NoNewPrivilege=yes");
        let wrong = analyze(&["verify"], &unit.installed(directory.path(), &wrong));
        assert!(String::from_utf8_lossy(&wrong.stderr).contains("NoNewPrivilege"), "{wrong:?}");
    }
}

#[test]
fn units_have_little_exposure() {
    let directory = tempfile::tempdir().unwrap();
    for unit in UNITS {
        let text = unit.text();
        let threshold = format!("--threshold={}", unit.max_exposure);
        let arguments = ["security", "--offline=true", &threshold];
        let good = analyze(&arguments, &unit.installed(directory.path(), &text));
        let said = String::from_utf8_lossy(&good.stdout);
        assert!(good.status.success(), "{said}{}", String::from_utf8_lossy(&good.stderr));
        // Without the restrictions the exposure is higher.
        let open = text.replace(unit.capabilities, "").replace("ProtectSystem=strict\n", "");
        let open = analyze(&arguments, &unit.installed(directory.path(), &open));
        assert!(!open.status.success());
    }
}

/// This version accepts the receiver's command line. It fails because there are no certificates, in
/// a directory that has none on any host.
#[test]
fn receivers_unit_has_a_valid_command_line() {
    const TLS: &str = "/etc/vmferry/tls";
    let line = UNITS[0].setting("ExecStart");
    assert!(line.iter().any(|word| word == TLS), "{line:?}");
    let directory = tempfile::tempdir().unwrap();
    let none = directory.path().join("none").display().to_string();
    let words = line.iter().skip(1);
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry"))
        .args(words.map(|word| if word == TLS { &none } else { word }))
        .env("VMFERRY_RUNTIME_DIR", directory.path().join("runtime"))
        .env_remove("VMFERRY_STATE_DIR")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
}

/// The command that shows a process the file system of the unit: read-only, apart from directories
/// that systemd makes with the modes that the unit says. It needs root.
fn file_system(unit: Unit) -> String {
    let mut script = "set -e\nmount -t tmpfs run /run\nmount -t tmpfs lib /var/lib\n".to_owned();
    for (setting, parent) in [("RuntimeDirectory", "/run"), ("StateDirectory", "/var/lib")] {
        let mode = &unit.setting(&format!("{setting}Mode"))[0];
        for name in unit.setting(setting) {
            let path = format!("{parent}/{name}");
            script += &format!("mkdir -m {mode} {path}\nmount --bind {path} {path}\n");
        }
        script += &format!("mount -o remount,bind,ro {parent}\n");
    }
    script
}

/// With the unit's capabilities and its writable directories, the daemon starts and makes all that
/// it makes at its start, in its default places.
#[test]
fn daemons_unit_gives_it_what_it_writes() {
    let unit = UNITS[1];
    let world = World::new();
    let config = world.path("daemon.toml");
    let written = format!(
        "listen = \"127.0.0.1:0\"\ntls = {:?}\nqemu_user = \"root\"\n\
         [[peer]]\nname = \"b\"\naddress = \"127.0.0.1:1\"\n",
        world.tls()
    );
    std::fs::write(&config, written).unwrap();
    let capabilities: Vec<_> = unit
        .setting("CapabilityBoundingSet")
        .iter()
        .map(|name| format!("+{}", name.trim_start_matches("CAP_").to_lowercase()))
        .collect();
    let bounding = format!("--bounding-set=-all,{}", capabilities.join(","));
    let start = |script: &str| {
        let prefix = ["unshare", "--mount", "sh", "-c"].map(str::to_owned);
        let run = format!("{script}exec setpriv {bounding} --no-new-privs \"$0\" \"$@\"\n");
        let prefix = [&prefix[..], &[run]].concat();
        let words = unit.setting("ExecStart");
        // The place's own wrapper gives `--json`.
        assert_eq!(words[1..], ["--json", "daemon"]);
        let mut command = Host { runtime: world.path("unused") }
            .command_under(&prefix, &["daemon", "--config", text(&config)]);
        command.env_remove("VMFERRY_RUNTIME_DIR");
        Host::spawn(command)
    };
    let mut daemon = start(&file_system(unit));
    let listening = daemon.event("listening");
    let root = format!("/proc/{}/root", daemon.child.id());
    for (path, mode) in [
        ("/run/vmferry", 0o700),
        ("/run/vmferry/keeper", 0o755),
        ("/run/vmferry-peers", 0o755),
        ("/run/vmferry-peers/b/libvirt", 0o600),
        ("/run/vmferry-peers/.daemon", 0o600),
        ("/var/lib/vmferry/journal", 0o700),
    ] {
        let found = std::fs::symlink_metadata(format!("{root}{path}"));
        let found = std::os::unix::fs::MetadataExt::mode(&found.unwrap()) & 0o777;
        assert_eq!(found, mode, "{path}: {found:o}");
    }
    assert_eq!(listening["sandbox"]["no_capabilities"], true, "{listening}");
    // Without one of the directories it does not start.
    let without = file_system(unit).replace("mount --bind /run/vmferry /run/vmferry\n", "");
    start(&without).finish().failed(1, "Read-only file system");
}
