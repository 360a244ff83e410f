//! The policy file format.

use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use vmferry_transport::PeerIdentity;
use vmferry_wire::GuestIdentity;

use super::PolicyError;
use super::definition::DefinitionRules;
use super::pattern::{NamePattern, SourcePattern};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    allow: Vec<Rule>,
}

/// A source, and the guests that it may send.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "RuleText")]
pub struct Rule {
    source: Source,
    guests: Vec<NamePattern>,
    uuids: Vec<uuid::Uuid>,
    definition: Arc<DefinitionRules>,
}

#[derive(Clone, Debug)]
enum Source {
    /// A peer with this name in its certificate.
    Named(SourcePattern),
    /// A peer on a Unix socket, by its user ID.
    User(u32),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleText {
    source: Option<SourcePattern>,
    uid: Option<u32>,
    #[serde(default)]
    guests: Vec<NamePattern>,
    #[serde(default)]
    uuids: Vec<uuid::Uuid>,
    #[serde(default)]
    definition: DefinitionRules,
}

impl TryFrom<RuleText> for Rule {
    type Error = &'static str;

    fn try_from(text: RuleText) -> Result<Self, Self::Error> {
        let source = match (text.source, text.uid) {
            (Some(pattern), None) => Source::Named(pattern),
            (None, Some(uid)) => Source::User(uid),
            _ => return Err("a rule needs either `source` or `uid`"),
        };
        if text.guests.is_empty() && text.uuids.is_empty() {
            return Err(
                "a rule needs `guests` (names) or `uuids`: guests = [\"*\"] is every guest",
            );
        }
        let definition = Arc::new(text.definition);
        Ok(Self { source, guests: text.guests, uuids: text.uuids, definition })
    }
}

impl Rule {
    /// Whether the rule applies to this source.
    pub fn is_for(&self, source: &PeerIdentity) -> bool {
        match &self.source {
            Source::Named(pattern) => {
                source.tls && source.names.iter().any(|name| pattern.matches(name))
            }
            Source::User(uid) => source.uid == Some(*uid),
        }
    }

    /// Whether the rule applies to this guest.
    pub fn names(&self, guest: &GuestIdentity) -> bool {
        self.uuids.contains(&guest.uuid)
            || self.guests.iter().any(|pattern| pattern.matches(&guest.name))
    }

    /// What the definition of a guest may name.
    pub fn definition(&self) -> &Arc<DefinitionRules> {
        &self.definition
    }
}

/// An error in a policy's text.
#[derive(Debug)]
pub struct Mistake {
    /// The line, from 1.
    pub line: usize,
    /// What is wrong, in one line.
    pub problem: String,
}

/// Parses the rules of a policy's text.
pub fn parse(text: &str) -> Result<Arc<[Rule]>, Mistake> {
    let file: File = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        Mistake {
            line: before.matches('\n').count() + 1,
            problem: error.message().replace('\n', " "),
        }
    })?;
    Ok(file.allow.into())
}

/// Reads the rules of a policy file.
pub fn read(path: &Path) -> Result<Arc<[Rule]>, PolicyError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| PolicyError::Unreadable { path: path.to_owned(), source })?;
    parse(&text).map_err(|Mistake { line, problem }| PolicyError::Invalid {
        path: path.to_owned(),
        line,
        problem,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_mistakes_are_reported_with_their_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("policy.toml");
        for (text, line, problem) in [
            ("[[allow]]\nsource = \"a\"\nguest = [\"x\"]\n", 3, "unknown field `guest`"),
            ("# one\n\n[[deny]]\nsource = \"a\"\n", 3, "unknown field `deny`"),
            ("\n[[allow]]\nguests = [\"x\"]\n", 2, "either `source` or `uid`"),
            ("[[allow]]\nsource = \"a\"\nuid = 1\nguests = [\"x\"]\n", 1, "either"),
            ("[[allow]]\nsource = \"a\"\n", 1, "needs `guests`"),
            ("[[allow]]\nsource = \"\"\nguests = [\"x\"]\n", 2, "is no name"),
            ("[[allow]]\nsource = \"a b\"\nguests = [\"x\"]\n", 2, "is no name"),
            ("[[allow]]\nsource = \"a\"\nuuids = [\"x\"]\n", 3, ""),
            (
                "[[allow]]\nsource = \"a\"\nguests = [\"x\"]\n[allow.definition]\nbridge = []\n",
                5,
                "unknown field `bridge`",
            ),
            (
                "[[allow]]\nsource = \"a\"\nguests = [\"x\"]\n[allow.definition]\n\
                 devices = [\"sda\"]\n",
                5,
                "no device below",
            ),
            ("[[allow]\n", 1, ""),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains(&format!("at line {line}: ")), "{text}: {error}");
            assert!(error.contains(problem), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
