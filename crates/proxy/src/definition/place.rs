//! Where an element is in a definition.

use roxmltree::Node;

use super::schema::Element;

/// The namespace of `<qemu:commandline>` and the like.
const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// An element that is judged, in the elements that contain it. Paths are made only for
/// objections, because a document can have many elements.
pub(super) struct Place<'p, 'a, 'input> {
    /// The element that contains it, or the path of the document's `<domain>`.
    pub within: Within<'p, 'a, 'input>,
    /// The element.
    pub node: Node<'a, 'input>,
    /// The attribute that selects among the lines for this element, with its value.
    selected: Option<(&'static str, &'a str)>,
    /// How many elements contain it.
    pub depth: usize,
}

/// What contains an element.
#[derive(Clone, Copy)]
pub(super) enum Within<'p, 'a, 'input> {
    /// The document, with the path of what contains its `<domain>`.
    Document(&'p str),
    /// An element.
    Element(&'p Place<'p, 'a, 'input>),
}

impl<'p, 'a, 'input> Place<'p, 'a, 'input> {
    /// The place of an element for which the list has these lines.
    pub fn new(within: Within<'p, 'a, 'input>, node: Node<'a, 'input>, lines: &[&Element]) -> Self {
        // The first attribute of the first line, such as `type`.
        let selector = lines.first().and_then(|line| line.selectors.first());
        let selected = selector.and_then(|(name, _)| Some((*name, node.attribute(*name)?)));
        let depth = match within {
            Within::Document(_) => 0,
            Within::Element(parent) => parent.depth + 1,
        };
        Self { within, node, selected, depth }
    }

    /// The XPath with the positions of elements, for people.
    pub fn shown(&self) -> String {
        let parent = match self.within {
            Within::Document(path) => path.to_owned(),
            Within::Element(parent) => parent.shown(),
        };
        let same = |other: &Node<'_, '_>| other.tag_name() == self.node.tag_name();
        let position = self.node.prev_siblings().skip(1).filter(same).count() + 1;
        let is_only = position == 1 && !self.node.next_siblings().skip(1).any(|one| same(&one));
        let position = if is_only { String::new() } else { format!("[{position}]") };
        format!("{parent}/{}{position}", self.name())
    }

    /// The path by which a policy permits this element, with the attributes that select it.
    pub fn general(&self) -> String {
        let parent = match self.within {
            Within::Document(_) => String::new(),
            Within::Element(parent) => parent.general(),
        };
        let selected = self.selected.map(|(name, value)| format!("[@{name}='{value}']"));
        format!("{parent}/{}{}", self.name(), selected.unwrap_or_default())
    }

    fn name(&self) -> String {
        let tag = self.node.tag_name();
        match tag.namespace() {
            None => tag.name().to_owned(),
            Some(QEMU_NAMESPACE) => format!("qemu:{}", tag.name()),
            Some(other) => format!("{{{other}}}{}", tag.name()),
        }
    }
}
