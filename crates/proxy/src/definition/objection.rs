//! What is refused in a definition.

use serde::{Deserialize, Serialize};

/// The most objections that are collected.
pub(super) const MOST_OBJECTIONS: usize = 64;

/// The longest text of a definition in an objection, in bytes.
const MOST_TEXT: usize = 200;

/// How many objections a refusal lists.
const MOST_LISTED: usize = 3;

/// Something in a definition that is not permitted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Objection {
    /// Where: the XPath of an element or attribute, such as `/domain/devices/disk[2]/source/@file`.
    pub path: String,
    /// Its value, if it is an attribute or text.
    pub value: Option<String>,
    /// Why it is refused.
    pub reason: String,
    /// The line of the rule's table `[allow.definition]` that would permit it, if one would.
    pub permit: Option<String>,
}

impl Objection {
    pub(super) fn new(path: &str, value: Option<&str>, reason: impl Into<String>) -> Self {
        let shown = |text: &str| cut(text).replace(char::is_control, " ");
        let value = value.map(shown);
        Self { path: shown(path), value, reason: reason.into(), permit: None }
    }

    /// With the line `KEY = ["VALUE"]`, unless the value has characters that need care.
    pub(super) fn permitted_by(mut self, key: &str, value: &str) -> Self {
        let is_plain =
            |byte: u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\' | b'*');
        if value.len() <= MOST_TEXT && value.bytes().all(is_plain) {
            self.permit = Some(format!("{key} = [\"{value}\"]"));
        }
        self
    }

    /// No rule is for the guest.
    pub(super) fn of_all() -> Self {
        Self::new("/domain", None, "no rule of the policy is for this guest")
    }
}

impl Objection {
    /// The objection without the line that would permit it.
    #[must_use]
    pub fn without_remedy(&self) -> String {
        let value = self.value.as_ref().map(|value| format!(" = {value:?}")).unwrap_or_default();
        format!("{}{value}: {}", self.path, self.reason)
    }
}

impl std::fmt::Display for Objection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.without_remedy())?;
        if let Some(line) = &self.permit {
            write!(f, " (to permit it: {line})")?;
        }
        Ok(())
    }
}

/// The words of a refusal, for people on both hosts. None if there is no objection.
#[must_use]
pub fn refusal(guest: &str, objections: &[Objection]) -> Option<String> {
    if objections.is_empty() {
        return None;
    }
    let listed = objections.iter().take(MOST_LISTED).map(Objection::to_string);
    let listed = listed.collect::<Vec<_>>().join("; ");
    let more = match objections.len().saturating_sub(MOST_LISTED) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    Some(format!(
        "the definition of guest {guest} has what this host's policy does not permit: \
         {listed}{more}"
    ))
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MOST_TEXT)]
}
