//! Compares a definition with the list, element by element.

use std::path::Path;

use roxmltree::{Attribute, Node};
use vmferry::config::policy::DefinitionRules;

use super::chain::{self, NamingImage, Source};
use super::facts::{DefinitionFacts, Remembered};
use super::limits;
use super::names::Names;
use super::objection::{MOST_OBJECTIONS, Objection};
use super::place::{Place, Within};
use super::schema::{Content, Element, ROOT, SCHEMA};

/// The most elements inside of each other. libvirt has no chain of more than 200 images.
const MOST_NESTED: usize = 256;

/// The reason for which the list does not have something.
const NOT_PERMITTED: &str = "this is not permitted";

/// Judges the documents of one guest by one rule.
pub(super) struct Judge<'a> {
    rules: &'a DefinitionRules,
    facts: &'a Remembered,
    names: Names<'a>,
    /// What is not permitted, at most [`MOST_OBJECTIONS`].
    pub objections: Vec<Objection>,
}

/// What is refused of an element: its attribute with this name, or else the element or its text.
/// And the value, if it has one.
type Part<'a> = (Option<&'a str>, Option<&'a str>);

/// What in the rule would permit it.
enum Remedy<'a> {
    /// Its path.
    Path,
    /// A value of this key.
    Key(&'static str, &'a str),
    /// Nothing that can be recommended.
    None,
}

impl<'a> Judge<'a> {
    /// A judge of the guest with this name.
    pub fn new(guest: &'a str, rules: &'a DefinitionRules, facts: &'a Remembered) -> Self {
        let names = Names::new(guest, rules, facts);
        Self { rules, facts, names, objections: Vec::new() }
    }

    /// Judges a `<domain>`, which is below `parent` in its document.
    pub fn judge(&mut self, parent: &str, domain: Node<'_, '_>) {
        self.judge_element(Within::Document(parent), domain, &[SCHEMA.root()]);
        for objection in limits::objections(&format!("{parent}/{ROOT}"), domain, self.rules) {
            self.add(objection);
        }
    }

    /// Judges what the images of a `<domain>` that is started name.
    pub fn judge_named(&mut self, domain: Node<'_, '_>) {
        for image in chain::naming_images(domain) {
            if self.is_full() {
                return;
            }
            if self.rules.permits_path(&image.general) {
                continue;
            }
            if let Err((name, reason)) = self.names_of_image(&image) {
                let objection = Objection::new(&image.disk, name.as_deref(), reason);
                self.add(objection.permitted_by("permit", &image.general));
            }
        }
    }

    /// # Errors
    /// A name that is not permitted, if there is one, and why.
    fn names_of_image(&self, image: &NamingImage) -> Result<(), (Option<String>, String)> {
        let top = match &image.source {
            Source::File(file) => file.clone(),
            Source::Volume { pool, volume } => match self.names.volume(pool, volume) {
                Some(file) => file,
                None => return Ok(()),
            },
        };
        // It was objected to, and nothing may be said of what is in it.
        if matches!(image.source, Source::File(_)) && self.names.judge_image(&top).is_err() {
            return Ok(());
        }
        let mut file = top.clone();
        for _ in 0..chain::MOST_IMAGES {
            let Ok(resolved) = self.facts.resolve(Path::new(&file)) else { return Ok(()) };
            let names = self.facts.image_names(&resolved.path).map_err(|problem| {
                (
                    None,
                    format!("it is not known what its image names, in a file or device: {problem}"),
                )
            })?;
            let backing = names.backing.filter(|_| image.names_backing || file != top);
            for name in names.data_file.iter().chain(&backing) {
                let named = chain::named(&resolved.path, name);
                self.names.judge_image(&named).map_err(|refused| {
                    (Some(named), format!("its image names this file: {}", refused.reason))
                })?;
            }
            match backing {
                Some(name) => file = chain::named(&resolved.path, &name),
                None => return Ok(()),
            }
        }
        Err((None, "its chain of images is too long".to_owned()))
    }

    fn is_full(&self) -> bool {
        self.objections.len() >= MOST_OBJECTIONS
    }

    fn add(&mut self, objection: Objection) {
        if !self.is_full() {
            self.objections.push(objection);
        }
    }

    /// Objects to an element or its attribute, unless the rule permits it by its path.
    fn object(
        &mut self,
        place: &Place<'_, '_, '_>,
        (attribute, value): Part<'_>,
        reason: &str,
        remedy: Remedy<'_>,
    ) {
        let path = |path: String| match attribute {
            Some(name) => format!("{path}/@{name}"),
            None => path,
        };
        let general = path(place.general());
        if self.is_full() || self.rules.permits_path(&general) {
            return;
        }
        let objection = Objection::new(&path(place.shown()), value, reason);
        self.add(match remedy {
            Remedy::Path => objection.permitted_by("permit", &general),
            Remedy::Key(key, value) => objection.permitted_by(key, value),
            Remedy::None => objection,
        });
    }

    /// Judges an element that one of `lines` of the list may allow.
    fn judge_element(
        &mut self,
        within: Within<'_, '_, '_>,
        node: Node<'_, '_>,
        lines: &[&Element],
    ) {
        let place = Place::new(within, node, lines);
        let fits = |line: &&&Element| {
            let mut selectors = line.selectors.iter();
            selectors.all(|(name, values)| {
                node.attribute(*name).is_some_and(|value| values.contains(&value))
            })
        };
        let Some(line) = lines.iter().find(fits) else {
            return self.object(&place, (None, None), NOT_PERMITTED, Remedy::Path);
        };
        if line.is_free
            || self.rules.permits_some_path() && self.rules.permits_path(&place.general())
        {
            return;
        }
        if place.depth > MOST_NESTED {
            return self.object(&place, (None, None), "it is nested too deeply", Remedy::None);
        }
        for attribute in node.attributes() {
            self.judge_attribute(&place, attribute, line);
        }
        if let Some(content) = &line.text {
            self.judge_text(&place, content);
        }
        for child in node.children().filter(Node::is_element) {
            if self.is_full() {
                return;
            }
            let lines = match child.tag_name().namespace() {
                None => SCHEMA.children(line, child.tag_name().name()),
                Some(_) => Vec::new(),
            };
            self.judge_element(Within::Element(&place), child, &lines);
        }
    }

    fn judge_attribute(
        &mut self,
        place: &Place<'_, '_, '_>,
        attribute: Attribute<'_, '_>,
        line: &Element,
    ) {
        let (name, value) = (attribute.name(), attribute.value());
        match SCHEMA.attribute(line, name).filter(|_| attribute.namespace().is_none()) {
            Some(content) => self.judge_value(place, Some(name), value, content),
            None => self.object(place, (Some(name), Some(value)), NOT_PERMITTED, Remedy::Path),
        }
    }

    fn judge_text(&mut self, place: &Place<'_, '_, '_>, content: &Content) {
        let mut children = place.node.children();
        let text = match (children.next(), children.next()) {
            (None, _) => "",
            (Some(text), None) if text.is_text() => text.text().unwrap_or_default(),
            // XPath's `string()`, by which libvirt reads it, would skip a comment.
            _ => return self.object(place, (None, None), "it has more than text", Remedy::None),
        };
        self.judge_value(place, None, text, content);
    }

    fn judge_value(
        &mut self,
        place: &Place<'_, '_, '_>,
        attribute: Option<&str>,
        value: &str,
        content: &Content,
    ) {
        let at = (attribute, Some(value));
        match content {
            Content::Any => {}
            Content::OneOf(values) if values.contains(&value) => {}
            Content::OneOf(values) => {
                let reason = format!("only {} is permitted", values.join(", "));
                self.object(place, at, &reason, Remedy::Path);
            }
            Content::Judged(kind) => {
                if let Err(refused) = self.names.judge(*kind, place.node, value) {
                    let remedy = match &refused.permit {
                        Some((key, value)) => Remedy::Key(key, value),
                        None => Remedy::None,
                    };
                    self.object(place, at, &refused.reason, remedy);
                }
            }
        }
    }
}
