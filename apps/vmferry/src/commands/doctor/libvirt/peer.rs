//! Checks of a peer through its daemon: admission, its host, its libvirt, and the link.

use serde_json::Value;
use vmferry::probe::{HostFacts, LibvirtFacts};
use vmferry_proxy::ask_to_judge;
use vmferry_transport::Dialer;

use super::daemon::Daemon;
use super::here::Libvirt;
use crate::args::DoctorOptions;
use crate::commands::doctor::guest::Guest;
use crate::commands::doctor::peer::{Asking, Program, facts};
use crate::commands::doctor::{Findings, Level};
use crate::commands::libvirt::Version;
use crate::exit::Failure;
use crate::output::Output;

/// What is known about this host.
pub struct Hosts<'a> {
    /// Its facts.
    pub ours: &'a HostFacts,
    /// Its libvirt with the guest.
    pub libvirt: Option<&'a Libvirt>,
    /// Its daemon.
    pub daemon: &'a Daemon,
}

/// Checks the peer `to`. Returns its facts and the measurements of the link.
pub fn look(
    to: &str,
    options: &DoctorOptions,
    hosts: &Hosts,
    output: &Output,
    findings: &mut Findings,
) -> Result<Value, Failure> {
    let daemon = hosts.daemon;
    let Some(peer) = daemon.peer(to) else {
        let why = format!("the daemon's configuration has no such peer; it has {}", daemon.peers());
        let remedy = "add a [[peer]] with this name, its address and its id";
        findings.bad("other-host", Level::Error, to, why, remedy);
        return Ok(Value::Null);
    };
    daemon.look_at_socket(to, findings);
    let mut dialer = Dialer::new(peer.address.clone(), daemon.proxy.tls.clone());
    dialer.destination_id.clone_from(&peer.id);
    let guest = hosts.libvirt.and_then(|libvirt| libvirt.guest.as_ref());
    let name = format!("{to} ({})", peer.address);
    let asking = Asking { to: &name, dialer: &dialer, program: Program::Daemon, options };
    let Some(probed) = asking.ask(hosts.ours, guest, output, findings) else {
        return Ok(Value::Null);
    };
    if let (None, Some(guest), Some(xml)) =
        (&probed.refusal, guest, hosts.libvirt.and_then(|libvirt| libvirt.definition.as_deref()))
    {
        look_at_definition(&dialer, to, guest, xml, findings);
    }
    match &probed.host.libvirt {
        Some(theirs) => look_at_libvirt(to, theirs, hosts, findings),
        // A host that this one may not send to says nothing about itself.
        None if probed.refusal.is_some() => {}
        None => findings.bad(
            "libvirt",
            Level::Warning,
            to,
            "its daemon does not report its libvirt",
            "upgrade vmferry there",
        ),
    }
    Ok(facts(&probed, to, options))
}

/// Asks the peer what its policy does not permit in the guest's definition.
fn look_at_definition(
    dialer: &Dialer,
    to: &str,
    guest: &Guest,
    xml: &str,
    findings: &mut Findings,
) {
    // libvirt sends no XML declaration, and `virsh` may print an empty line at the end.
    match ask_to_judge(dialer, &guest.identity, xml.trim()) {
        Ok(None) => findings.bad(
            "definition",
            Level::Warning,
            to,
            "its daemon does not say what its policy permits",
            "upgrade vmferry there",
        ),
        Ok(Some(objections)) if objections.is_empty() => {
            findings.ok("definition", to, "its policy permits the guest's whole definition");
        }
        Ok(Some(objections)) => {
            for objection in objections {
                let remedy = match &objection.permit {
                    Some(line) => format!("{line} in [allow.definition] of the policy there"),
                    None => "change the guest, or see docs/security.md".to_owned(),
                };
                let why = objection.without_remedy();
                findings.bad("definition", Level::Error, to, why, remedy);
            }
        }
        Err(error) => {
            let why = vmferry::chain(&error);
            findings.bad("definition", Level::Warning, to, why, "see the log of its daemon");
        }
    }
}

fn look_at_libvirt(to: &str, theirs: &LibvirtFacts, hosts: &Hosts, findings: &mut Findings) {
    if let Some(problem) = &theirs.problem {
        let remedy = "start libvirt there, and check `libvirt_socket` of its daemon";
        findings.bad("libvirt", Level::Error, to, problem, remedy);
    }
    let known = |release: &Option<String>| release.clone().unwrap_or_else(|| "unknown".into());
    let (libvirt, qemu) = (known(&theirs.libvirt), known(&theirs.qemu));
    if theirs.problem.is_none() {
        findings.ok("libvirt", to, format!("libvirt {libvirt} answers, with QEMU {qemu}"));
    }
    let here = hosts.libvirt.map(|libvirt| &libvirt.releases);
    if let (Some(ours), Some(theirs)) = (here.and_then(|it| it.qemu.as_ref()), &theirs.qemu)
        && Version::parse(theirs) < Version::parse(ours)
    {
        findings.bad(
            "qemu",
            Level::Warning,
            to,
            format!(
                "its QEMU {theirs} is older than this host's {ours}: a guest whose machine type or \
                 devices it does not know can't move there"
            ),
            "upgrade it, or start the guest with a machine type of the older release",
        );
    }
    let ours = &hosts.daemon.proxy.directory;
    if let Some(directory) = theirs.directory.as_ref().filter(|it| it.as_path() != ours.as_path()) {
        findings.bad(
            "daemon",
            Level::Error,
            to,
            format!(
                "its sockets are in {}, and those of this host in {}: a migration has the same \
                 paths on both",
                directory.display(),
                ours.display()
            ),
            "set `directory` to the same path in both configurations",
        );
    }
}

#[cfg(test)]
mod tests {
    use vmferry_proxy::Owner;

    use super::*;
    use crate::commands::daemon::config::Configuration;
    use crate::commands::libvirt::Releases;

    fn found(theirs: &LibvirtFacts) -> Vec<(&'static str, Level)> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "listen = \"127.0.0.1:0\"\nplain = true").unwrap();
        let configuration = Configuration::read(file.path()).unwrap();
        let admitted = std::sync::Arc::default();
        let proxy = configuration.proxy(&Output::new(false, true), Owner::default(), &admitted);
        let proxy = proxy.unwrap();
        let daemon = Daemon { configuration, proxy };
        let releases = Releases { libvirt: Some("11.3.0".into()), qemu: Some("10.0.2".into()) };
        let libvirt = Libvirt { releases, qemu_user: None, guest: None, definition: None };
        let hosts = Hosts { ours: &HostFacts::default(), libvirt: Some(&libvirt), daemon: &daemon };
        let mut findings = Findings::default();
        look_at_libvirt("host-b", theirs, &hosts, &mut findings);
        findings.0.iter().map(|one| (one.check, one.level)).collect()
    }

    #[test]
    fn peer_must_have_libvirt_and_the_same_directory() {
        let same = LibvirtFacts {
            libvirt: Some("11.3.0".into()),
            qemu: Some("10.0.2".into()),
            problem: None,
            qemu_user: Some(0),
            directory: Some("/run/vmferry-peers".into()),
        };
        assert_eq!(found(&same), [("libvirt", Level::Ok)]);
        let older = LibvirtFacts { qemu: Some("7.2.0".into()), ..same.clone() };
        assert_eq!(found(&older), [("libvirt", Level::Ok), ("qemu", Level::Warning)]);
        let elsewhere = LibvirtFacts { directory: Some("/run/other".into()), ..same.clone() };
        assert_eq!(found(&elsewhere), [("libvirt", Level::Ok), ("daemon", Level::Error)]);
        let silent = LibvirtFacts { problem: Some("refused".into()), ..same };
        assert_eq!(found(&silent), [("libvirt", Level::Error)]);
    }
}
