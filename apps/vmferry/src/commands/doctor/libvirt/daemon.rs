//! Checks of this host's `vmferry daemon`.

use std::path::Path;
use std::sync::Arc;

use vmferry_proxy::{LIBVIRT_SOCKET, Peer, ProxyConfig};

use crate::commands::daemon::config::Configuration;
use crate::commands::daemon::streams;
use crate::commands::doctor::host::look_at_policy;
use crate::commands::doctor::{Findings, Level};
use crate::output::Output;

/// The configuration of a daemon that can be used.
pub struct Daemon {
    /// The file.
    pub configuration: Configuration,
    /// What the proxy makes of it.
    pub proxy: ProxyConfig,
}

/// Checks the configuration, and whether a daemon uses it. `None` if it is wrong.
pub fn look(path: &Path, output: &Output, findings: &mut Findings) -> Option<Daemon> {
    let read = Configuration::read(path).and_then(|configuration| {
        Ok((
            configuration.proxy(output, configuration.qemu_owner()?, &Arc::default())?,
            configuration,
        ))
    });
    let (proxy, configuration) = match read {
        Ok(read) => read,
        Err(failure) => {
            let remedy = "correct it (`vmferry daemon --check`), or name another file with \
                          --daemon-config: docs/libvirt.md describes it";
            findings.bad("daemon", Level::Error, path.display(), failure, remedy);
            return None;
        }
    };
    findings.ok("daemon", path.display(), "the configuration is valid");
    match configuration.policy() {
        Some(policy) => look_at_policy(policy, findings),
        None => {
            findings.note("policy", path.display(), "there is none: this host receives nothing")
        }
    }
    let daemon = Daemon { configuration, proxy };
    daemon.look_at_process(findings);
    Some(daemon)
}

impl Daemon {
    /// The peer of this name.
    pub fn peer(&self, name: &str) -> Option<&Peer> {
        self.proxy.peers.iter().find(|peer| peer.name == name)
    }

    /// The names of all peers.
    pub fn peers(&self) -> String {
        let names: Vec<&str> = self.proxy.peers.iter().map(|peer| peer.name.as_str()).collect();
        if names.is_empty() { "none".into() } else { names.join(", ") }
    }

    /// Checks the user that owns the sockets of migrations.
    pub fn look_at_user(&self, of_libvirt: Option<u32>, findings: &mut Findings) {
        let ours = self.proxy.qemu.uid;
        match of_libvirt {
            Some(theirs) if theirs != ours => findings.bad(
                "qemu-user",
                Level::Error,
                "this host",
                format!(
                    "libvirt runs QEMU as the user {theirs}, and the daemon makes its sockets for \
                     the user {ours}"
                ),
                "set `qemu_user` in the daemon's configuration to `user` of libvirt's qemu.conf",
            ),
            Some(_) => {
                let why = format!("QEMU runs as the user {ours}, who may use the daemon's sockets");
                findings.ok("qemu-user", "this host", why);
            }
            None => {}
        }
    }

    /// Names the peers that guests may be sent to.
    pub fn look_at_peers(&self, findings: &mut Findings) {
        let why = format!("peers: {}; `--to PEER` checks one", self.peers());
        findings.note("peers", "this host", why);
    }

    /// Checks whether the daemon has made its socket for a peer.
    pub fn look_at_socket(&self, peer: &str, findings: &mut Findings) {
        let path = self.proxy.directory.join(peer).join(LIBVIRT_SOCKET);
        if std::fs::symlink_metadata(&path).is_err() {
            findings.bad(
                "daemon",
                Level::Error,
                path.display(),
                "this socket is missing: the daemon does not run with this configuration, or could \
                 not make it",
                "look at the log of `vmferry daemon`, and start it again",
            );
        }
    }

    fn look_at_process(&self, findings: &mut Findings) {
        let directory = &self.proxy.directory;
        match streams::ask(directory) {
            Ok(status) => {
                let open: u64 = status.carried.iter().map(|carried| carried.open).sum();
                let why = format!(
                    "vmferry {} runs (process {}) with {open} streams to other hosts",
                    status.release, status.pid
                );
                findings.ok("daemon", "this host", why);
                if status.release != env!("CARGO_PKG_VERSION") {
                    let why = format!("it is not the release of this command ({})", RELEASE);
                    let remedy = "start it again when no guest is moving";
                    findings.bad("daemon", Level::Warning, "this host", why, remedy);
                }
            }
            Err(error) => findings.bad(
                "daemon",
                Level::Error,
                directory.display(),
                format!("no daemon serves this directory: {}", vmferry::chain(&error)),
                "start it: `systemctl enable --now vmferry-daemon`",
            ),
        }
    }
}

const RELEASE: &str = env!("CARGO_PKG_VERSION");
