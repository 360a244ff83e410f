//! Name patterns with wildcards.

use serde::Deserialize;

/// A pattern for a URI, DNS name or IP address of a source. A `*` matches any part, including an
/// empty one, of one path segment of a URI or of one label of a DNS name: it never crosses a `/` or
/// a `.` respectively. DNS names are compared without regard to case.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct SourcePattern {
    text: String,
    is_uri: bool,
}

/// Prefix of the name that the transport gives to a peer whose certificate contains no name.
const KEY_PREFIX: &str = "key:";

/// A pattern for a guest's name, in which a `*` matches anything.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct NamePattern(String);

/// A pattern for a path or URL, in which a `*` matches anything within one part: it never crosses a
/// `/`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct PathPattern(pub(super) String);

impl TryFrom<String> for SourcePattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!("`{text}` is no name of a source"));
        }
        let is_uri = text.contains("://");
        Ok(Self { text: if is_uri { text } else { text.to_ascii_lowercase() }, is_uri })
    }
}

impl SourcePattern {
    /// Whether the pattern matches this name of a certificate.
    pub fn matches(&self, name: &str) -> bool {
        // The name of a key is its hash. A wildcard for host names must not admit every certificate
        // that contains no host name.
        if name.starts_with(KEY_PREFIX) {
            return self.text == name;
        }
        match (self.is_uri, name.contains("://")) {
            (true, true) => matches(&self.text, name, Some(b'/')),
            (false, false) => matches(&self.text, &name.to_ascii_lowercase(), Some(b'.')),
            _ => false,
        }
    }
}

impl NamePattern {
    /// Whether the pattern matches this guest's name.
    pub fn matches(&self, name: &str) -> bool {
        matches(&self.0, name, None)
    }
}

impl PathPattern {
    /// Whether the pattern matches this path or URL.
    pub fn matches(&self, text: &str) -> bool {
        matches(&self.0, text, Some(b'/'))
    }
}

/// Whether `text` matches `pattern`, in which each `*` matches any number of bytes other than
/// `border`.
fn matches(pattern: &str, text: &str, border: Option<u8>) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // The position of the last star, and the end of what it matches.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(&b'*') {
            star = Some((p, t));
            p += 1;
        } else if pattern.get(p) == Some(&text[t]) {
            (p, t) = (p + 1, t + 1);
        } else if let Some((at, reach)) = star
            && Some(text[reach]) != border
        {
            star = Some((at, reach + 1));
            (p, t) = (at + 1, reach + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn source(pattern: &str, name: &str) -> bool {
        SourcePattern::try_from(pattern.to_owned()).unwrap().matches(name)
    }

    #[test]
    fn pattern_star_stays_within_its_part() {
        for (pattern, name, expected) in [
            ("spiffe://vmferry/host/a", "spiffe://vmferry/host/a", true),
            ("spiffe://vmferry/host/a", "spiffe://vmferry/host/A", false),
            ("spiffe://vmferry/host/*", "spiffe://vmferry/host/a", true),
            ("spiffe://vmferry/host/*", "spiffe://vmferry/host/a/b", false),
            ("*", "key:sha256:00ff", false),
            ("key:*", "key:sha256:00ff", false),
            ("key:sha256:00ff", "key:sha256:00ff", true),
            ("key:sha256:00FF", "key:sha256:00ff", true),
            ("spiffe://vmferry/*", "spiffe://vmferry/host/a", false),
            ("spiffe://*/host/a", "spiffe://evil/x/host/a", false),
            ("spiffe://vmferry/host/rack*-b", "spiffe://vmferry/host/rack1-2-b", true),
            ("*.example.org", "a.example.org", true),
            ("*.example.org", "a.b.example.org", false),
            ("*.example.org", "example.org", false),
            ("*.Example.org", "A.example.ORG", true),
            ("*", "spiffe://vmferry", false),
            ("10.0.0.*", "10.0.0.7", true),
        ] {
            assert_eq!(source(pattern, name), expected, "{pattern} {name}");
        }
        assert!(NamePattern("web-*-*x".into()).matches("web-1/2-.x"));
        assert!(!NamePattern("web-*".into()).matches("we"));
        assert!(NamePattern("*".into()).matches(""));
        assert!(!NamePattern(String::new()).matches("x"));
    }

    /// The same by exhaustive search.
    fn naive(pattern: &[u8], text: &[u8], border: Option<u8>) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some((b'*', rest)) => {
                let most = text.iter().position(|b| Some(*b) == border).unwrap_or(text.len());
                (0..=most).any(|taken| naive(rest, &text[taken..], border))
            }
            Some((byte, rest)) => text.first() == Some(byte) && naive(rest, &text[1..], border),
        }
    }

    proptest! {
        #[test]
        fn pattern_matches_as_the_naive_matcher_does(
            pattern in "[ab/*]{0,9}",
            text in "[ab/]{0,12}",
            bordered: bool,
        ) {
            let border = bordered.then_some(b'/');
            let expected = naive(pattern.as_bytes(), text.as_bytes(), border);
            prop_assert_eq!(matches(&pattern, &text, border), expected);
        }
    }
}
