//! The environment of the QEMU benchmarks: a directory, certificates, and the `vmferry` command.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
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
        lab.pki(&["init", "--dir", text(&lab.world.path("pki"))?])?;
        let addresses = [Ipv4Addr::LOCALHOST, SOURCE_ADDRESS, DESTINATION_ADDRESS];
        lab.issue("bench", &lab.tls, &addresses)?;
        let tls = &lab.tls;
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

    /// Issues a certificate for a host with these addresses, in the directory `out`.
    pub fn issue(&self, host: &str, out: &Path, addresses: &[Ipv4Addr]) -> anyhow::Result<()> {
        let pki = self.world.path("pki");
        let mut issue = vec!["issue", host, "--dir", text(&pki)?, "--out", text(out)?];
        let addresses: Vec<String> = addresses.iter().map(Ipv4Addr::to_string).collect();
        for address in &addresses {
            issue.extend(["--address", address]);
        }
        self.pki(&issue)
    }

    fn pki(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let done = self.command().arg("pki").args(arguments).output()?;
        let problem = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "vmferry pki failed: {problem}");
        Ok(())
    }

    /// The command, with a runtime directory of its own.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.vmferry);
        // The default, /run/vmferry, is on a tmpfs too.
        command.env("VMFERRY_RUNTIME_DIR", self.world.path_on_tmpfs("host"));
        command
    }
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().context("a path is not UTF-8")
}
