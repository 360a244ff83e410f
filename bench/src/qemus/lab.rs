//! The environment of the QEMU benchmarks: a directory, certificates, and the `vmferry` command.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};
use vmferry_net_lab::{DESTINATION_ADDRESS, SOURCE_ADDRESS};
use vmferry_qemu_lab::World;

/// The directory for sockets and certificates, and the command.
pub struct Lab {
    pub world: World,
    /// Contains `ca.pem`, `host.pem` and `host.key`, and copies with the names that QEMU expects.
    pub tls: PathBuf,
    pub vmferry: PathBuf,
}

impl Lab {
    pub fn new() -> anyhow::Result<Self> {
        let program = std::env::current_exe()?;
        let vmferry =
            program.parent().context("this program's directory is unknown")?.join("vmferry");
        ensure!(
            vmferry.exists(),
            "the `vmferry` command is not next to this program; build it with `make bench`"
        );
        let world = World::new();
        let lab = Self { tls: world.path("tls"), world, vmferry };
        let (pki, tls) = (lab.world.path("pki"), lab.tls.clone());
        let run = |arguments: &[&str]| -> anyhow::Result<()> {
            let done = lab.command().arg("pki").args(arguments).output()?;
            ensure!(
                done.status.success(),
                "vmferry pki failed: {}",
                String::from_utf8_lossy(&done.stderr)
            );
            Ok(())
        };
        let (pki, out) = (pki.display().to_string(), tls.display().to_string());
        run(&["init", "--dir", &pki])?;
        let mut issue = vec!["issue", "bench", "--dir", &pki, "--out", &out];
        let addresses = [Ipv4Addr::LOCALHOST, SOURCE_ADDRESS, DESTINATION_ADDRESS];
        let addresses = addresses.map(|address| address.to_string());
        for address in &addresses {
            issue.extend(["--address", address]);
        }
        run(&issue)?;
        // The names that QEMU's `tls-creds-x509` expects.
        for (ours, theirs) in [
            ("ca.pem", "ca-cert.pem"),
            ("host.pem", "server-cert.pem"),
            ("host.key", "server-key.pem"),
            ("host.pem", "client-cert.pem"),
            ("host.key", "client-key.pem"),
        ] {
            std::fs::copy(tls.join(ours), tls.join(theirs))?;
        }
        Ok(lab)
    }

    /// The command, with a runtime directory of its own.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.vmferry);
        // The default, /run/vmferry, is on a tmpfs too.
        command.env("VMFERRY_RUNTIME_DIR", self.world.path_on_tmpfs("host"));
        command
    }
}
