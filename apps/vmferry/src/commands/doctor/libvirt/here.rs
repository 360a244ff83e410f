//! Checks of this host's libvirt and of the guest's definition.

use bytesize::ByteSize;
use roxmltree::Document;
use vmferry_memory::MemoryKind;

use super::definition::{Accelerator, Definition};
use super::disks;
use crate::commands::doctor::guest::Guest;
use crate::commands::doctor::{Findings, Level};
use crate::commands::libvirt::{Domain, JobStats, Releases, Version, Virsh};
use crate::exit::{Code, Failure};

/// libvirt migrates over Unix sockets from this release on.
const FIRST_WITH_SOCKETS: Version = Version::new(6, 8, 0);

const HERE: &str = "this host";

/// What is known about this host's libvirt.
pub struct Libvirt {
    /// The releases of libvirt and QEMU.
    pub releases: Releases,
    /// The user that it runs QEMU as, if it says.
    pub qemu_user: Option<u32>,
    /// The guest, if it can be read.
    pub guest: Option<Guest>,
    /// Its definition, as libvirt sends it to another host.
    pub definition: Option<String>,
}

/// Checks libvirt and the guest. `None` if libvirt does not answer.
pub fn look(
    virsh: &Virsh,
    guest: &str,
    findings: &mut Findings,
) -> Result<Option<Libvirt>, Failure> {
    let releases = match Releases::ask(virsh) {
        Ok(releases) => releases,
        Err(error) => {
            let remedy = "start it (`systemctl start libvirtd` or `virtqemud.socket`), or name \
                          another one with --connect";
            findings.bad("libvirt", Level::Error, HERE, vmferry::chain(&error), remedy);
            return Ok(None);
        }
    };
    look_at_releases(&releases, findings);
    let qemu_user = look_at_confinement(virsh, findings);
    let guest = look_at_guest(virsh, guest, findings)?;
    let definition = guest.as_ref().and_then(|guest| {
        let uuid = guest.identity.uuid.to_string();
        virsh.run(&["dumpxml", "--migratable", "--domain", &uuid]).ok()
    });
    Ok(Some(Libvirt { releases, qemu_user, guest, definition }))
}

fn look_at_releases(releases: &Releases, findings: &mut Findings) {
    let Releases { libvirt, qemu } = releases;
    let name = libvirt.as_deref().unwrap_or("of an unknown release");
    let qemu = qemu.as_deref().unwrap_or("of an unknown release");
    let version = libvirt.as_deref().and_then(Version::parse);
    if version.is_some_and(|version| version < FIRST_WITH_SOCKETS) {
        findings.bad(
            "libvirt",
            Level::Error,
            HERE,
            format!("libvirt {name} can't migrate over Unix sockets"),
            "upgrade to libvirt 6.8 or newer",
        );
    } else {
        findings.ok("libvirt", HERE, format!("libvirt {name} answers, with QEMU {qemu}"));
    }
}

/// Checks what confines QEMU. Returns its user, if libvirt says.
fn look_at_confinement(virsh: &Virsh, findings: &mut Findings) -> Option<u32> {
    let text = virsh.run(&["capabilities"]).unwrap_or_default();
    let (models, user) = confinement(&text);
    for model in &models {
        let (why, remedy) = match model.as_str() {
            "selinux" => (
                "SELinux confines QEMU, and the daemon's sockets have the daemon's context",
                "begin without --parallel, --postcopy and copied disks, and look for denials with \
                 `ausearch -m avc -ts recent` (docs/libvirt.md)",
            ),
            "apparmor" => (
                "AppArmor confines QEMU, and its profiles have no rule for the daemon's sockets",
                "add the rule of docs/libvirt.md to libvirt's abstraction for QEMU, and look for \
                 denials with `dmesg`",
            ),
            _ => continue,
        };
        findings.bad("confinement", Level::Warning, HERE, why, remedy);
    }
    if models.iter().any(|model| model == "none") {
        findings.ok("confinement", HERE, "no security driver confines QEMU");
    }
    user
}

/// The security models in `virsh capabilities`, and the user of the model `dac`.
fn confinement(capabilities: &str) -> (Vec<String>, Option<u32>) {
    let Ok(document) = Document::parse(capabilities) else { return (Vec::new(), None) };
    let models = document.descendants().filter(|node| node.has_tag_name("secmodel"));
    let (mut names, mut user) = (Vec::new(), None);
    for model in models {
        let text = |name: &str| {
            let child = model.children().find(|child| child.has_tag_name(name));
            child.and_then(|child| child.text()).unwrap_or_default().trim()
        };
        let name = text("model");
        if name == "dac" {
            // Such as `+64055:+994`.
            let uid = text("baselabel").split(':').next().unwrap_or_default();
            user = uid.trim_start_matches('+').parse().ok();
        }
        names.push(name.to_owned());
    }
    (names, user)
}

fn look_at_guest(
    virsh: &Virsh,
    guest: &str,
    findings: &mut Findings,
) -> Result<Option<Guest>, Failure> {
    let domain = match Domain::find(virsh, guest) {
        Ok(domain) => domain,
        Err(failure) if failure.code == Code::UnknownGuest => {
            let remedy = "`virsh list --all` shows the guests; --connect names another libvirt";
            findings.bad("guest", Level::Error, format!("guest {guest}"), failure, remedy);
            return Ok(None);
        }
        Err(failure) => return Err(failure),
    };
    let (name, uuid) = (&domain.identity.name, domain.identity.uuid.to_string());
    let (object, memory) = (format!("guest {name}"), ByteSize(domain.memory_bytes));
    if !domain.is_active {
        let why = format!("it does not run (libvirt: {})", domain.state);
        let remedy = format!("start it with `virsh start {name}`: only a running guest is moved");
        findings.bad("guest", Level::Error, &object, why, remedy);
    } else if is_busy(virsh, &uuid) {
        let why = "libvirt has another job for it, such as a migration, a backup or a save";
        let remedy = format!("wait for its end (`virsh domjobinfo {name}`), or abort it");
        findings.bad("guest", Level::Error, &object, why, remedy);
    } else {
        findings.ok("guest", &object, format!("it is {}, with {memory}", domain.state));
    }
    if let Ok(snapshots) = virsh.run(&["snapshot-list", "--domain", &uuid, "--name"])
        && let Some(first) = snapshots.lines().find(|line| !line.trim().is_empty())
    {
        let why = format!("it has snapshots, such as {first}: libvirt does not move them");
        let remedy = format!("`virsh snapshot-delete {name} {first} --metadata` for each of them");
        findings.bad("snapshots", Level::Error, &object, why, remedy);
    }
    let text = virsh.run(&["dumpxml", "--domain", &uuid])?;
    let definition = match Definition::read(&text) {
        Ok(definition) => definition,
        Err(error) => {
            let why = format!("its definition can't be read: {error}");
            findings.bad("devices", Level::Warning, &object, why, "`virsh dumpxml` shows it");
            Definition::default()
        }
    };
    look_at_devices(&object, &definition, findings);
    disks::look(&definition.disks, findings);
    Ok(Some(Guest {
        machine: None,
        identity: domain.identity.clone(),
        memory_bytes: domain.memory_bytes,
        memory_kind: definition.has_huge_pages.then_some(MemoryKind::Hugetlb),
        on_kvm: Some(definition.accelerator == Accelerator::Kvm),
        cpu_model: definition.cpu_model(),
        is_carried: true,
    }))
}

fn is_busy(virsh: &Virsh, uuid: &str) -> bool {
    let text = virsh.run(&["domjobinfo", "--domain", uuid, "--rawstats"]);
    text.is_ok_and(|text| JobStats::parse(&text).is_active)
}

fn look_at_devices(object: &str, definition: &Definition, findings: &mut Findings) {
    for obstacle in &definition.obstacles {
        let (level, why, remedy) = (obstacle.level, &obstacle.why, obstacle.remedy);
        findings.bad("devices", level, object, why, remedy);
    }
    if definition.obstacles.is_empty() {
        findings.ok("devices", object, "none that is known to stay on its host");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libvirt_without_unix_sockets_is_an_error() {
        let releases = Releases { libvirt: Some("11.3.0".into()), qemu: Some("10.0.2".into()) };
        let mut findings = Findings::default();
        look_at_releases(&releases, &mut findings);
        assert_eq!(findings.worst(), Level::Ok);
        let old = Releases { libvirt: Some("6.7.0".into()), ..releases };
        look_at_releases(&old, &mut findings);
        assert_eq!(findings.worst(), Level::Error);
    }

    #[test]
    fn confinement_is_read_from_the_capabilities() {
        let xml = "<capabilities><host><secmodel><model>apparmor</model><doi>0</doi></secmodel>\
                    <secmodel><model>dac</model><doi>0</doi>\
                    <baselabel type='kvm'>+64055:+994</baselabel></secmodel></host></capabilities>";
        let (models, user) = confinement(xml);
        assert_eq!((models, user), (vec!["apparmor".into(), "dac".into()], Some(64055)));
        assert_eq!(confinement("").1, None);
    }
}
