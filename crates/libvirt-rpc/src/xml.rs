//! XML of libvirt, read strictly: nothing that another parser could read differently.

use roxmltree::{Document, ExpandedName, Node, ParsingOptions};

use crate::error::RpcError;
use crate::guest::{check_name, cut, parse_uuid};

/// The most nodes of a document. Large definitions have a few thousand.
const MAX_NODES: u32 = 100_000;

/// The most `=` of a document: attributes, and text.
const MAX_EQUALS: usize = 200_000;

/// The most attributes of an element: roxmltree compares each with all others. Elements of libvirt
/// have about a dozen.
const MAX_ATTRIBUTES: usize = 128;

/// The most namespace declarations, which roxmltree copies for each element that has one.
/// Definitions have a few: `qemu`, and those of metadata.
const MAX_NAMESPACES: usize = 64;

/// The name and UUID that a document's root element contains.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub name: String,
    pub uuid: uuid::Uuid,
}

/// Parses a document whose root is `root`.
///
/// libvirt reads the same document with libxml2. So everything that could make libxml2 see another
/// name than roxmltree is refused: an XML declaration (its encoding), a byte-order mark, and a DTD
/// (its entities). libvirt writes none of them. `document` is the document's name for errors.
///
/// # Errors
/// [`RpcError::BadXml`].
pub fn parse<'a>(
    xml: &'a str,
    root: &str,
    document: &'static str,
) -> Result<Document<'a>, RpcError> {
    let bad = |detail: &str| RpcError::BadXml { document, detail: detail.to_owned() };
    let begins = xml.strip_prefix('<').and_then(|rest| rest.strip_prefix(root));
    if !begins.is_some_and(|rest| rest.starts_with(['>', ' ', '\n', '\t'])) {
        return Err(bad(&format!("it does not begin with <{root}>")));
    }
    // roxmltree allocates for each `<` and each `=`. No tag contains a second `<`.
    let (mut tags, mut most) = (0, 0);
    for part in xml.split('<') {
        tags += 1;
        most = most.max(attributes(part));
    }
    if tags > MAX_NODES || xml.matches('=').count() > MAX_EQUALS {
        return Err(bad("it has too many elements or attributes"));
    }
    if most > MAX_ATTRIBUTES {
        return Err(bad("an element has too many attributes"));
    }
    if xml.matches("xmlns").count() > MAX_NAMESPACES {
        return Err(bad("it declares too many namespaces"));
    }
    let options = ParsingOptions { nodes_limit: MAX_NODES, ..ParsingOptions::default() };
    Document::parse_with_options(xml, options).map_err(|error| bad(cut(&error.to_string())))
}

/// The attributes of a tag that is well-formed, without its `<`.
fn attributes(tag: &str) -> usize {
    let (mut attributes, mut quote) = (0, None);
    for byte in tag.bytes() {
        match (quote, byte) {
            (Some(open), _) if open == byte => quote = None,
            (Some(_), _) => {}
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, b'=') => attributes += 1,
            (None, b'>') => break,
            (None, _) => {}
        }
    }
    attributes
}

/// Reads the elements `name` and `uuid` directly below an element: `virDomainDefParseXML` in
/// `src/conf/domain_conf.c` takes the first of each. A second one is refused.
pub(crate) fn identity(parent: Node<'_, '_>, document: &'static str) -> Result<Identity, RpcError> {
    let name = child_text(parent, "name", document)?;
    check_name(name)?;
    let uuid = parse_uuid(child_text(parent, "uuid", document)?, document)?;
    Ok(Identity { name: name.to_owned(), uuid })
}

/// The text of the only child element `tag` without a namespace. A comment or an element inside of
/// it is refused, because XPath's `string()` skips the one and reads the other.
pub(crate) fn child_text<'a>(
    parent: Node<'a, '_>,
    tag: &'static str,
    document: &'static str,
) -> Result<&'a str, RpcError> {
    let bad = |detail: String| RpcError::BadXml { document, detail };
    // `has_tag_name` would ignore the namespace.
    let is_tag = |name: ExpandedName<'_, '_>| name.name() == tag && name.namespace().is_none();
    let mut found = parent.children().filter(|child| is_tag(child.tag_name()));
    let Some(element) = found.next() else { return Err(bad(format!("no <{tag}>"))) };
    if found.next().is_some() {
        return Err(bad(format!("more than one <{tag}>")));
    }
    let mut content = element.children();
    match (content.next(), content.next()) {
        (Some(text), None) if text.is_text() => Ok(text.text().unwrap_or_default()),
        (None, None) => Ok(""),
        _ => Err(bad(format!("<{tag}> contains more than text"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "c7a5fdbd-cdaf-9455-926a-d65c16db1809";

    fn read(xml: &str) -> Result<Identity, RpcError> {
        let parsed = parse(xml, "domain", "definition")?;
        identity(parsed.root_element(), "definition")
    }

    fn refusal(xml: &str) -> String {
        read(xml).unwrap_err().to_string()
    }

    #[test]
    fn identity_is_read_from_a_definition() {
        let xml = format!(
            "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\n\
            <metadata><name>other</name><x:name xmlns:x='y'>other</x:name></metadata>\n\
            <name>a &amp; b &lt;<![CDATA[c]]></name><uuid>{UUID}</uuid>\n\
            <q:name xmlns:q='z'>other</q:name></domain>\n"
        );
        let identity = read(&xml).unwrap();
        assert_eq!(identity.name, "a & b <c");
        assert_eq!(identity.uuid.to_string(), UUID);
    }

    #[test]
    fn identity_refuses_what_another_parser_could_read_differently() {
        let rest = format!("<uuid>{UUID}</uuid></domain>");
        for (xml, expected) in [
            (format!("<domain>{rest}"), "no <name>"),
            (format!("<domain><name>a</name><name>b</name>{rest}"), "more than one <name>"),
            (format!("<domain><name>a</name><uuid>{UUID}</uuid>{rest}"), "more than one <uuid>"),
            (format!("<domain><name>a<!-- --></name>{rest}"), "contains more than text"),
            (format!("<domain><name><b>a</b></name>{rest}"), "contains more than text"),
            (format!("<domain><name>a<?x y?>b</name>{rest}"), "contains more than text"),
            (format!("<domain><name/>{rest}"), "it is empty"),
            (format!("<domain><name>../a</name>{rest}"), "slash"),
            (format!("<domain xmlns='x'><name>a</name>{rest}"), "no <name>"),
            (format!("<domain><name>a</name>{rest}<domain/>"), "bad definition"),
            (format!("<?xml version='1.0' encoding='UTF-7'?><domain>{rest}"), "does not begin"),
            (format!("\u{feff}<domain><name>a</name>{rest}"), "does not begin"),
            (format!("<domainsnapshot><name>a</name>{rest}"), "does not begin"),
            ("<!DOCTYPE d [<!ENTITY a 'b'>]><domain/>".to_owned(), "does not begin"),
            (format!("<domain><name>&a;</name>{rest}"), "bad definition"),
            ("<domain><name>a</name><uuid>x</uuid></domain>".to_owned(), "usual form"),
            ("<domain".to_owned(), "does not begin"),
            ("<domain><name>a".to_owned(), "bad definition"),
        ] {
            assert!(refusal(&xml).contains(expected), "{xml}: {}", refusal(&xml));
        }
    }

    #[test]
    fn parse_bounds_its_work() {
        let attributes: String = (0..1000).map(|n| format!(" a{n}='x'")).collect();
        assert!(refusal(&format!("<domain{attributes}/>")).contains("too many attributes"));
        let text = format!("<domain a='>'><b>{}</b></domain>", "=".repeat(1000));
        assert!(refusal(&text).contains("no <name>"));
        let hidden = format!("<domain><b c='>'{attributes}/></domain>");
        assert!(refusal(&hidden).contains("too many attributes"));
        let nested: String = (0..100).map(|n| format!("<a xmlns:b{n}='x{n}'>")).collect();
        assert!(refusal(&format!("<domain>{nested}")).contains("too many namespaces"));
        let wide = "<a/>".repeat(MAX_NODES as usize);
        assert!(refusal(&format!("<domain>{wide}</domain>")).contains("elements"));
        let text = format!("<domain>{}</domain>", "=".repeat(MAX_EQUALS + 1));
        assert!(refusal(&text).contains("too many"));
        let deep = MAX_NODES as usize / 2 - 2;
        let deep = format!("<domain>{}{}</domain>", "<a>".repeat(deep), "</a>".repeat(deep));
        assert!(refusal(&deep).contains("no <name>"));
    }
}
