//! The list of what a definition may contain, `allowed.txt`.

use std::collections::HashMap;
use std::sync::LazyLock;

/// The list.
static TEXT: &str = include_str!("allowed.txt");

/// The list as a tree.
pub static SCHEMA: LazyLock<Schema> = LazyLock::new(|| Schema::parse(TEXT));

/// The name of the root of every definition.
pub const ROOT: &str = "domain";

/// Elements and groups.
#[derive(Debug, Default)]
pub struct Schema {
    root: Element,
    groups: HashMap<&'static str, Element>,
}

/// An element of the list, or a group.
#[derive(Debug, Default)]
pub struct Element {
    name: &'static str,
    /// The attributes that select this line, with their values.
    pub selectors: Vec<(&'static str, Vec<&'static str>)>,
    attributes: Vec<(&'static str, Content)>,
    /// What its text may be. Without it, libvirt reads no text of the element.
    pub text: Option<Content>,
    /// Whether everything inside has no effect outside of the guest.
    pub is_free: bool,
    children: Vec<Element>,
    groups: Vec<&'static str>,
}

/// What an attribute or text may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Anything.
    Any,
    /// One of these values.
    OneOf(Vec<&'static str>),
    /// What the rules permit.
    Judged(Kind),
}

/// What an attribute or text names on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::EnumString)]
#[strum(serialize_all = "kebab-case")]
pub enum Kind {
    /// A file that QEMU or libvirt opens or makes.
    File,
    /// A kernel or an initial RAM disk.
    BootFile,
    /// A directory.
    Directory,
    /// An image: a file or a block device.
    Image,
    /// An image of firmware that is only read.
    Firmware,
    /// A socket that QEMU makes.
    Socket,
    /// The program that runs the guest.
    Emulator,
    /// A storage pool of libvirt.
    Pool,
    /// A disk in the network: the attribute `protocol` of a `<source>`.
    NetworkDisk,
    /// A network of libvirt.
    Network,
    /// A bridge of the host.
    Bridge,
    /// An IP address that a display listens on.
    Listen,
    /// The name of a network interface that libvirt makes.
    Tap,
    /// A name from which libvirt or QEMU makes the path of a file.
    Label,
}

impl Schema {
    /// The root element.
    pub fn root(&self) -> &Element {
        &self.root
    }

    /// The lines for the children of an element with this name.
    pub fn children<'a>(&'a self, of: &'a Element, name: &str) -> Vec<&'a Element> {
        let parts = self.with_groups(of);
        let all = parts.iter().flat_map(|part| &part.children);
        all.filter(|child| child.name == name).collect()
    }

    /// What an attribute of an element may be. None if the element has no such attribute.
    pub fn attribute<'a>(&'a self, of: &'a Element, name: &str) -> Option<&'a Content> {
        let parts = self.with_groups(of);
        let mut all = parts.iter().flat_map(|part| &part.attributes);
        all.find(|(known, _)| *known == name).map(|(_, content)| content)
    }

    /// The element and all groups that it contains.
    fn with_groups<'a>(&'a self, element: &'a Element) -> Vec<&'a Element> {
        let mut found = vec![element];
        let mut next = 0;
        while let Some(part) = found.get(next) {
            found.extend(part.groups.iter().filter_map(|name| self.groups.get(name)));
            next += 1;
        }
        found
    }

    /// # Panics
    /// The text is not in the format that it describes. It is part of this crate.
    fn parse(text: &'static str) -> Self {
        let mut schema = Self::default();
        // The elements that are open, from the outermost.
        let mut open: Vec<Element> = Vec::new();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let depth = (line.len() - line.trim_start().len()) / 2;
            while open.len() > depth {
                schema.close(&mut open);
            }
            let line = line.trim_start();
            match (line.strip_prefix('@'), open.last_mut()) {
                (Some(group), Some(parent)) => parent.groups.push(group),
                _ => open.push(Element::parse(line)),
            }
        }
        while !open.is_empty() {
            schema.close(&mut open);
        }
        schema
    }

    /// Puts the innermost open element where it belongs.
    fn close(&mut self, open: &mut Vec<Element>) {
        let Some(done) = open.pop() else { return };
        match (open.last_mut(), done.name) {
            (Some(parent), _) => parent.children.push(done),
            (None, ROOT) => self.root = done,
            (None, name) => drop(self.groups.insert(name, done)),
        }
    }
}

impl Element {
    fn parse(line: &'static str) -> Self {
        let mut words = line.strip_prefix("group ").unwrap_or(line).split(' ');
        let mut element = Self::default();
        let mut selectors = words.next().unwrap_or_default().split('[');
        element.name = selectors.next().unwrap_or_default();
        for selector in selectors {
            let (name, values) = selector.trim_end_matches(']').split_once('=').expect("a value");
            element.selectors.push((name, values.split('|').collect()));
        }
        for word in words {
            if word == "*" {
                element.is_free = true;
                continue;
            }
            let at = word.find([':', '=']).unwrap_or(word.len());
            let content = match word[at..].split_at_checked(1) {
                Some((":", kind)) => Content::Judged(kind.parse().expect("a kind")),
                Some((_, values)) => Content::OneOf(values.split('|').collect()),
                None => Content::Any,
            };
            match &word[..at] {
                "#" => element.text = Some(content),
                name => element.attributes.push((name, content)),
            }
        }
        element
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_the_elements_of_its_lines_and_groups() {
        let schema = &*SCHEMA;
        let devices = schema.children(schema.root(), "devices")[0];
        let disks = schema.children(devices, "disk");
        assert_eq!(disks.len(), 4);
        assert_eq!(disks[0].selectors, [("type", vec!["file"])]);
        let source = schema.children(disks[0], "source")[0];
        let image = Content::Judged(Kind::Image);
        assert_eq!(schema.attribute(source, "file"), Some(&image));
        assert_eq!(schema.attribute(source, "dev"), None);
        // Of groups, and of groups in groups.
        let no = Content::OneOf(vec!["no"]);
        assert_eq!(schema.attribute(disks[0], "rawio"), Some(&no));
        assert!(schema.children(disks[0], "alias")[0].is_free);
        let mut store = schema.children(disks[0], "backingStore")[0];
        for _ in 0..3 {
            let source = schema.children(store, "source")[0];
            assert_eq!(schema.attribute(source, "file"), Some(&image));
            store = schema.children(store, "backingStore")[0];
        }
        let kernel = schema.children(schema.children(schema.root(), "os")[0], "kernel")[0];
        assert_eq!(kernel.text, Some(Content::Judged(Kind::BootFile)));
        assert!(schema.children(schema.root(), "bootloader").is_empty());
    }

    #[test]
    fn every_group_is_used_and_every_used_group_exists() {
        fn used(element: &Element, names: &mut Vec<&'static str>) {
            names.extend(&element.groups);
            element.children.iter().for_each(|child| used(child, names));
        }
        let schema = &*SCHEMA;
        let mut names = Vec::new();
        used(schema.root(), &mut names);
        schema.groups.values().for_each(|group| used(group, &mut names));
        names.sort_unstable();
        names.dedup();
        let mut groups: Vec<_> = schema.groups.keys().copied().collect();
        groups.sort_unstable();
        assert_eq!(names, groups);
    }

    #[test]
    fn lines_end_at_100_columns() {
        assert!(TEXT.lines().all(|line| line.len() <= 100));
    }
}
