//! What this host's libvirt offers to guests: emulators and storage pools.

use std::path::PathBuf;

use roxmltree::Document;
use vmferry_proxy::definition::{LibvirtResources, Pool};

use super::domains::virsh;

/// Asks libvirt through `virsh`. Changes nothing.
///
/// # Errors
/// libvirt's words.
pub fn of_libvirt() -> Result<LibvirtResources, String> {
    let emulators = emulators(&virsh(&["capabilities"])?)?;
    // A libvirt without its storage driver has none.
    let names = virsh(&["pool-list", "--name"]).unwrap_or_default();
    let mut pools = Vec::new();
    for name in names.lines().map(str::trim).filter(|name| !name.is_empty()) {
        // A pool that was removed meanwhile is none.
        let Ok(xml) = virsh(&["pool-dumpxml", "--pool", name]) else { continue };
        pools.push(pool(name, &xml)?);
    }
    Ok(LibvirtResources { emulators, pools })
}

/// The emulators in libvirt's capabilities.
fn emulators(xml: &str) -> Result<Vec<PathBuf>, String> {
    let document = parse(xml)?;
    let all = document.descendants().filter(|node| node.has_tag_name("emulator"));
    Ok(all.filter_map(|node| node.text()).map(|path| path.trim().into()).collect())
}

/// A pool as `virsh pool-dumpxml` prints it.
fn pool(name: &str, xml: &str) -> Result<Pool, String> {
    let document = parse(xml)?;
    let root = document.root_element();
    let target = root.children().find(|node| node.has_tag_name("target"));
    let path = target.and_then(|node| node.children().find(|node| node.has_tag_name("path")));
    Ok(Pool {
        name: name.to_owned(),
        kind: root.attribute("type").unwrap_or_default().to_owned(),
        target: path.and_then(|path| path.text()).map(|path| path.trim().into()),
    })
}

fn parse(xml: &str) -> Result<Document<'_>, String> {
    Document::parse(xml).map_err(|error| format!("libvirt's answer can't be read: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn emulators_are_those_of_all_architectures() {
        let xml = "<capabilities><host/><guest><arch name='i686'>\
            <emulator>/usr/bin/qemu-system-i386</emulator></arch></guest>\
            <guest><arch name='x86_64'><emulator>/usr/bin/qemu-system-x86_64</emulator>\
            <domain type='kvm'><emulator>/usr/bin/kvm</emulator></domain></arch></guest>\
            </capabilities>";
        let expected = ["/usr/bin/qemu-system-i386", "/usr/bin/qemu-system-x86_64", "/usr/bin/kvm"];
        assert_eq!(emulators(xml).unwrap(), expected.map(PathBuf::from));
        assert!(emulators("<capabilities>").is_err());
    }

    #[test]
    fn pool_has_its_type_and_directory() {
        let xml = "<pool type='dir'><name>a</name><source><dir path='/x'/></source>\
            <target><path>/srv/images</path></target></pool>";
        let target = Some("/srv/images".into());
        assert_eq!(pool("a", xml), Ok(Pool { name: "a".into(), kind: "dir".into(), target }));
        let xml = "<pool type='rbd'><name>b</name></pool>";
        let expected = Pool { name: "b".into(), kind: "rbd".into(), target: None };
        assert_eq!(pool("b", xml), Ok(expected));
    }
}
