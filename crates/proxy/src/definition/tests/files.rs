//! Files, images and pools.

use std::fs;
use std::os::unix::fs::symlink;

use super::*;

#[test]
fn files_are_where_their_links_lead() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    fs::create_dir(root.join("images")).unwrap();
    fs::create_dir(root.join("secrets")).unwrap();
    fs::write(root.join("secrets/key"), "").unwrap();
    fs::write(root.join("images/disk"), "").unwrap();
    symlink(root.join("secrets"), root.join("images/away")).unwrap();
    symlink(root.join("secrets/key"), root.join("images/key")).unwrap();
    symlink(root.join("images"), root.join("link")).unwrap();
    symlink("/nowhere/x", root.join("images/dangling")).unwrap();
    let images = format!("only_listed = true\ndirectories = [{:?}]", root.join("link"));
    let judge = |path: &str| {
        let xml = format!(
            "<domain type='kvm'><devices><disk type='file'><source file='{}'/></disk></devices>\
             </domain>",
            root.join(path).display()
        );
        self::judge(&xml, None, &images)
    };
    for permitted in ["images/disk", "link/disk", "images/new", "link/new"] {
        assert_eq!(judge(permitted), [], "{permitted}");
    }
    for refused in
        ["secrets/key", "images/key", "images/away/key", "images/away/new", "images/dangling"]
    {
        assert_eq!(judge(refused).len(), 1, "{refused}");
    }
    // What a link leads to, and what is outside, is nothing that a peer may learn.
    for (path, about) in [
        ("images/key", "has a link in it"),
        ("secrets/key", "no directory"),
        ("secrets/none", "no directory"),
        ("secrets", "no directory"),
    ] {
        let said = judge(path)[0].to_string();
        assert!(said.contains(about) && !said.contains("there is"), "{said}");
    }
    assert!(!judge("images/key")[0].to_string().contains("secrets"));
}

/// The sender can have written the image.
#[test]
fn files_that_images_name_are_judged() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    let write = |name: &str, backing: &str, data: &str| {
        let data = (0x4441_5441, data.as_bytes());
        let extensions = if data.1.is_empty() { vec![] } else { vec![data] };
        fs::write(root.join(name), qcow2::tests::header(&extensions, backing)).unwrap();
    };
    write("alone", "", "");
    write("overlay", "alone", "");
    write("hostile", "/dev/sda", "");
    write("above", "hostile", "");
    write("network", "nbd://192.0.2.1/x", "");
    write("split", "", "/etc/shadow");
    write("circle", "circle", "");
    fs::write(root.join("raw"), "").unwrap();
    let rules = format!("directories = [{root:?}]");
    let disk = |format: &str, name: &str, below: &str| {
        let file = root.join(name);
        with_device(&format!(
            "<disk type='file'><driver name='qemu' type='{format}'/>\
             <source file='{}'/>{below}</disk>",
            file.display()
        ))
    };
    for (format, name, below) in [
        ("qcow2", "alone", ""),
        ("qcow2", "overlay", ""),
        ("qcow2", "missing", ""),
        ("qcow2", "raw", ""),
        // libvirt does not look into it.
        ("raw", "hostile", ""),
        ("qcow2", "hostile", "<backingStore/>"),
    ] {
        assert_eq!(judge(&disk(format, name, below), None, &rules), [], "{format} {name}");
    }
    for (name, below, says) in [
        ("hostile", "", "\"/dev/sda\": its image names this file"),
        ("above", "", "\"/dev/sda\""),
        ("network", "", "nbd:"),
        ("split", "", "\"/etc/shadow\""),
        ("split", "<backingStore/>", "\"/etc/shadow\""),
        ("circle", "", "too long"),
    ] {
        let xml = disk("qcow2", name, below);
        let found = judge(&xml, None, &rules);
        assert!(found.len() == 1 && found[0].to_string().contains(says), "{name}: {found:?}");
        assert_eq!(found[0].path, "/domain/devices/disk[4]");
        let permitted = format!("{rules}\n{}", found[0].permit.as_ref().unwrap());
        assert_eq!(judge(&xml, None, &permitted), []);
        // What libvirt keeps is not opened.
        let cookie = format!("<qemu-migration>{xml}</qemu-migration>");
        assert_eq!(judge(USUAL, Some(&cookie), &rules), []);
    }
    // The last image that the definition names.
    let below = format!(
        "<backingStore type='file'><format type='qcow2'/><source file='{}'/></backingStore>",
        root.join("hostile").display()
    );
    assert_eq!(judge(&disk("qcow2", "alone", &below), None, &rules).len(), 1);
}

/// Pools that somebody's tools have made are no permission.
#[test]
fn pools_are_usable_if_they_are_for_images() {
    let with_pool = |kind: &str, target: &str, path: &str, policy: &str| {
        let mut here = Here::new();
        here.0.pools.push(Pool {
            name: "more".into(),
            kind: kind.into(),
            target: Some(target.into()),
        });
        let xml = format!(
            "<domain type='kvm'><devices><disk type='file'><source file='{path}'/></disk>\
             </devices></domain>"
        );
        let definition = Definition { guest: "web", xml: Some(&xml), cookie: None };
        objections(definition, &rules(policy), Arc::new(here)).unwrap().is_empty()
    };
    assert!(with_pool("dir", "/srv/isos", "/srv/isos/new", ""));
    assert!(!with_pool("dir", "/srv/isos", "/srv/isos/below/new", ""));
    assert!(!with_pool("dir", "/srv/isos", "/srv/isos/.hidden", ""));
    for home in ["/root", "/home/u", "/tmp", "/etc", "/srv", "/var/lib/libvirt/qemu"] {
        let path = format!("{home}/new");
        assert!(!with_pool("dir", home, &path, ""), "{home}");
        assert!(with_pool("dir", home, &path, "pools = ['more']"), "{home}");
    }
    assert!(!with_pool("logical", "/dev/fast", "/dev/fast/web", ""));
    assert!(with_pool("logical", "/dev/fast", "/dev/fast/web", "pools = ['more']"));
    assert!(!with_pool("logical", "/dev/mapper", "/dev/sda", "pools = ['more']"));
    // No log or other file that QEMU writes.
    let log = with_device("<serial type='file'><source path='/srv/isos/x'/></serial>");
    assert_eq!(judge(&log, None, "pools = ['*']").len(), 1);
}

/// An image of a directory of its own guest only.
#[test]
fn directory_may_contain_the_name_of_the_guest() {
    let xml = |path: &str| {
        format!(
            "<domain type='kvm'><devices><disk type='file'><source file='{path}'/></disk>\
             </devices></domain>"
        )
    };
    let policy = "only_listed = true\ndirectories = ['/srv/guests/{name}']";
    assert_eq!(judge(&xml("/srv/guests/web/disk"), None, policy), []);
    assert_eq!(judge(&xml("/srv/guests/db/disk"), None, policy).len(), 1);
    assert_eq!(judge(&xml("/srv/guests/web2/disk"), None, policy).len(), 1);
    assert_eq!(judge(&xml("/var/lib/libvirt/images/disk"), None, policy).len(), 1);
    assert_eq!(judge(&xml("/dev/fast/web"), None, policy).len(), 1);
    let policy = format!("{policy}\npools = ['default', 'fast']");
    assert_eq!(judge(&xml("/var/lib/libvirt/images/disk"), None, &policy), []);
    assert_eq!(judge(&xml("/dev/fast/web"), None, &policy), []);
}
