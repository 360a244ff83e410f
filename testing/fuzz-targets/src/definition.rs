//! Any bytes, read as the definition of a guest of libvirt.

use std::path::Path;
use std::sync::Arc;

use vmferry_proxy::definition::{
    Definition, DefinitionFacts, FileKind, ImageNames, LibvirtResources, Resolved, objections,
    refusal,
};

/// The longest refusal, in bytes. libvirt's error replies have about as many.
const MOST_WORDS: usize = 4 << 10;

/// A host on which every path leads to a file outside of all directories.
#[derive(Debug)]
struct Outside;

impl DefinitionFacts for Outside {
    fn libvirt(&self) -> Result<LibvirtResources, String> {
        Ok(LibvirtResources::default())
    }

    fn resolve(&self, path: &Path) -> Result<Resolved, String> {
        let outside = Path::new("/outside").join(path.strip_prefix("/").unwrap_or(path));
        Ok(Resolved { path: outside, kind: FileKind::File })
    }

    fn image_names(&self, _path: &Path) -> Result<ImageNames, String> {
        Ok(ImageNames::default())
    }
}

/// What the judge permits must not have the well-known ways to the host, as they are found by a
/// plain search.
pub fn run(data: &[u8]) {
    let xml = String::from_utf8_lossy(data);
    let definition = Definition { guest: "web", xml: Some(&xml), cookie: None };
    let Ok(found) = objections(definition, &[Arc::default()], Arc::new(Outside)) else {
        return;
    };
    let words = refusal("web", &found);
    assert_eq!(words.is_some(), !found.is_empty());
    assert!(words.is_none_or(|words| words.len() <= MOST_WORDS));
    if !found.is_empty() {
        return;
    }
    let document = roxmltree::Document::parse(&xml).expect("it was judged");
    let in_metadata = |node: &roxmltree::Node<'_, '_>| {
        node.ancestors().any(|parent| parent.has_tag_name("metadata"))
    };
    for node in document.descendants().filter(|node| node.is_element() && !in_metadata(node)) {
        let name = node.tag_name().name();
        assert!(!matches!(name, "hostdev" | "filesystem" | "shmem" | "commandline"), "{xml}");
        assert!(!matches!(name, "bootloader" | "launchSecurity" | "lease" | "script"), "{xml}");
        let is_path = |text: Option<&str>| text.is_some_and(|text| text.starts_with('/'));
        if name == "source" && node.ancestors().any(|parent| parent.has_tag_name("disk")) {
            assert!(!["file", "dev", "dir"].iter().any(|it| is_path(node.attribute(*it))), "{xml}");
        }
        if matches!(name, "emulator" | "kernel" | "initrd" | "loader") {
            assert!(!is_path(node.text()), "{xml}");
        }
    }
}
