//! Judges the definition of a guest of libvirt before libvirt of this host reads it.
//!
//! libvirt does what a definition says, as root: it opens disks and devices, and starts the
//! emulator. So a definition that another host sends may contain only what is listed in
//! `allowed.txt`, and name only what the policy permits ([`DefinitionRules`]). Everything else is
//! refused with its path in the document.
//!
//! libvirt reads the same text with another parser. [`parse`] refuses what the two could read
//! differently, and a text that is judged may not be interrupted by comments, which XPath's
//! `string()` skips.

mod chain;
mod facts;
mod judge;
mod limits;
mod names;
mod objection;
mod place;
mod qcow2;
mod schema;

use std::sync::Arc;

use vmferry::config::policy::DefinitionRules;
use vmferry_libvirt_rpc::{RpcError, parse};
use vmferry_transport::PeerIdentity;
use vmferry_wire::GuestIdentity;

pub use facts::{DefinitionFacts, FileKind, LibvirtResources, Pool, Resolved, resolve};
pub use objection::{Objection, refusal};
pub use qcow2::{ImageNames, image_names};

use crate::proxy::Shared;
use facts::Remembered;
use judge::Judge;
use schema::ROOT;

/// A definition that a rule decides on.
#[derive(Clone, Copy, Debug)]
pub struct Definition<'a> {
    /// The guest's name at this host.
    pub guest: &'a str,
    /// The definition.
    pub xml: Option<&'a str>,
    /// A cookie of its migration, which can contain the definition that libvirt keeps after the
    /// guest has ended.
    pub cookie: Option<&'a str>,
}

/// What is not permitted by the rule that objects least. Nothing if one permits all.
///
/// # Errors
/// A document can't be read.
pub fn objections(
    definition: Definition<'_>,
    rules: &[Arc<DefinitionRules>],
    facts: Arc<dyn DefinitionFacts>,
) -> Result<Vec<Objection>, RpcError> {
    let facts = Remembered::new(facts);
    Judgment { rules: rules.to_vec(), facts }.objections(definition)
}

/// The rules for a guest, and what was learned about this host for it.
#[derive(Debug)]
pub(crate) struct Judgment {
    rules: Vec<Arc<DefinitionRules>>,
    facts: Remembered,
}

impl Judgment {
    /// By the policy and the facts of a daemon.
    ///
    /// # Errors
    /// The daemon can't judge, for people.
    pub fn new(
        shared: &Shared,
        peer: &PeerIdentity,
        guest: &GuestIdentity,
    ) -> Result<Self, String> {
        let config = shared.config();
        let Some(facts) = &config.definition_facts else {
            return Err("this daemon can't judge the definitions of guests".into());
        };
        let rules = match &config.policy {
            Some(policy) => policy.definition_rules(peer, guest),
            None => vec![Arc::default()],
        };
        Ok(Self { rules, facts: Remembered::new(Arc::clone(facts)) })
    }

    /// What is not permitted by the rule that objects least. Nothing if one permits all.
    ///
    /// # Errors
    /// A document can't be read.
    pub fn objections(&self, definition: Definition<'_>) -> Result<Vec<Objection>, RpcError> {
        let document = definition.xml.map(|text| parse(text, ROOT, "domain definition"));
        let document = document.transpose()?;
        let cookie = definition.cookie;
        let cookie = cookie.map(|text| parse(text, "qemu-migration", "migration cookie"));
        let cookie = cookie.transpose()?;
        let kept = cookie.iter().flat_map(|cookie| cookie.root_element().children());
        let kept: Vec<_> = kept.filter(|child| child.tag_name().name() == ROOT).collect();
        let by = |rules: &Arc<DefinitionRules>| {
            let mut judge = Judge::new(definition.guest, rules, &self.facts);
            if let Some(document) = &document {
                judge.judge("", document.root_element());
                judge.judge_named(document.root_element());
            }
            kept.iter().for_each(|domain| judge.judge("/qemu-migration", *domain));
            judge.objections
        };
        let least = self.rules.iter().map(by).min_by_key(Vec::len);
        Ok(least.unwrap_or_else(|| vec![Objection::of_all()]))
    }
}

#[cfg(test)]
mod tests;
