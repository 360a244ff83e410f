//! The policy: which source may send which guest to this destination.
//!
//! Certificates identify a source; a policy says what that source may do. The policy is checked
//! twice, before anything is promised, allocated or written: when the source greets, whether any
//! rule matches it, and when the guest is announced, whether one of these rules matches the guest.
//!
//! ```toml
//! # Sources that no rule names may send nothing.
//! [[allow]]
//! source = "spiffe://vmferry/host/rack1-*"
//! guests = ["web-*", "cache"]
//!
//! [[allow]]
//! source = "backup.example.org"
//! uuids = ["6f1ae1f6-3d3c-4b53-9c5d-6f1d8c1c9c11"]
//!
//! [[allow]]                  # peers on a unix: socket, by their user
//! uid = 0
//! guests = ["*"]
//! ```

mod definition;
mod file;
mod pattern;

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use vmferry_transport::{FileVersion, PeerIdentity};
use vmferry_wire::GuestIdentity;

pub use self::definition::{DefinitionRules, is_plain_path};
use self::file::Rule;

/// Decides which source may send which guest here. Answers are not cached, so a decision can change
/// while a destination listens.
pub trait Admission: Debug + Send + Sync {
    /// Whether this source may send any guest at all.
    ///
    /// # Errors
    /// The reason for the refusal, for people on both sides.
    fn check_source(&self, source: &PeerIdentity) -> Result<(), String>;

    /// Whether this source may send this guest.
    ///
    /// # Errors
    /// The reason for the refusal, for people on both sides.
    fn check_guest(&self, source: &PeerIdentity, guest: &GuestIdentity) -> Result<(), String>;

    /// What the definition of a guest of libvirt may name, by each rule that allows this source
    /// this guest. One of them must permit all of it. By default one rule with its defaults.
    fn definition_rules(
        &self,
        _source: &PeerIdentity,
        _guest: &GuestIdentity,
    ) -> Vec<Arc<DefinitionRules>> {
        vec![Arc::default()]
    }
}

/// A policy that can't be loaded.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The file can't be read.
    #[error("the policy {path} can't be read")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The file is not a valid policy.
    #[error("the policy {path} is wrong at line {line}: {problem}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
}

/// Receives messages about a changed policy file: that it is in use, or why it is not.
type Teller = Box<dyn Fn(&str) + Send + Sync>;

/// A policy in a file, which is checked for changes at each query. If a changed file is invalid,
/// this is reported once and the old policy stays in use.
pub struct Policy {
    path: PathBuf,
    state: Mutex<State>,
    teller: Mutex<Option<Teller>>,
}

struct State {
    seen: Option<FileVersion>,
    rules: Arc<[Rule]>,
}

impl Debug for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Policy").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Policy {
    /// Reads a policy.
    ///
    /// # Errors
    /// [`PolicyError`], with the line.
    pub fn load(path: &Path) -> Result<Self, PolicyError> {
        // The stamp is taken before the file is read, so that a change in between is noticed at the
        // next query.
        let seen = FileVersion::of(path);
        let rules = file::read(path)?;
        let state = Mutex::new(State { seen, rules });
        Ok(Self { path: path.to_owned(), state, teller: Mutex::new(None) })
    }

    /// Sets the receiver of messages about changes of the file, one line each. It must not block.
    pub fn tell(&self, teller: impl Fn(&str) + Send + Sync + 'static) {
        *self.teller.lock() = Some(Box::new(teller));
    }

    fn rules(&self) -> Arc<[Rule]> {
        let mut state = self.state.lock();
        let seen = FileVersion::of(&self.path);
        let mut said = None;
        if seen != state.seen {
            state.seen = seen;
            said = Some(match file::read(&self.path) {
                Ok(rules) => {
                    state.rules = rules;
                    "the policy has changed, and the new one is in use".to_owned()
                }
                Err(error) => format!(
                    "the policy has changed and is not usable, so the old one stays in use: {}",
                    crate::causes::chain(&error)
                ),
            });
        }
        let rules = Arc::clone(&state.rules);
        drop(state);
        if let Some(said) = said
            && let Some(teller) = &*self.teller.lock()
        {
            teller(&said);
        }
        rules
    }
}

impl Admission for Policy {
    fn check_source(&self, source: &PeerIdentity) -> Result<(), String> {
        Rules(self.rules()).check_source(source)
    }

    fn check_guest(&self, source: &PeerIdentity, guest: &GuestIdentity) -> Result<(), String> {
        Rules(self.rules()).check_guest(source, guest)
    }

    fn definition_rules(
        &self,
        source: &PeerIdentity,
        guest: &GuestIdentity,
    ) -> Vec<Arc<DefinitionRules>> {
        Rules(self.rules()).definition_rules(source, guest)
    }
}

/// The rules of a policy, from any source of text.
#[derive(Clone, Debug)]
pub struct Rules(Arc<[Rule]>);

impl std::str::FromStr for Rules {
    type Err = String;

    /// Parses a policy's text. The error names the line.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |file::Mistake { line, problem }| format!("wrong at line {line}: {problem}");
        file::parse(text).map(Self).map_err(wrong)
    }
}

impl Admission for Rules {
    fn check_source(&self, source: &PeerIdentity) -> Result<(), String> {
        if self.0.iter().any(|rule| rule.is_for(source)) {
            return Ok(());
        }
        Err(format!("{} may not send guests here: no rule of the policy is for it", who(source)))
    }

    fn check_guest(&self, source: &PeerIdentity, guest: &GuestIdentity) -> Result<(), String> {
        let Self(rules) = self;
        let mut own = rules.iter().filter(|rule| rule.is_for(source)).peekable();
        let why = if own.peek().is_none() {
            "no rule of the policy is for it"
        } else if own.any(|rule| rule.names(guest)) {
            return Ok(());
        } else {
            "the policy allows it other guests only"
        };
        Err(format!("{} may not send guest {guest} here: {why}", who(source)))
    }

    fn definition_rules(
        &self,
        source: &PeerIdentity,
        guest: &GuestIdentity,
    ) -> Vec<Arc<DefinitionRules>> {
        let applies = |rule: &&Rule| rule.is_for(source) && rule.names(guest);
        self.0.iter().filter(applies).map(|rule| Arc::clone(rule.definition())).collect()
    }
}

/// The source's name for messages.
fn who(source: &PeerIdentity) -> String {
    source.name().unwrap_or_else(|| "a source that shows no certificate".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> PeerIdentity {
        let names = vec![format!("spiffe://vmferry/host/{name}"), format!("{name}.example.org")];
        PeerIdentity::authenticated("192.0.2.1:5".into(), names, None)
    }

    fn guest(name: &str) -> GuestIdentity {
        GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: name.into() }
    }

    fn policy(text: &str) -> (tempfile::TempDir, Policy) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("policy.toml");
        std::fs::write(&path, text).unwrap();
        let policy = Policy::load(&path).unwrap();
        (directory, policy)
    }

    #[test]
    fn policy_denies_what_it_does_not_name() {
        let (_directory, policy) = policy(
            r#"
            [[allow]]
            source = "spiffe://vmferry/host/rack1-*"
            guests = ["web-*"]
            [[allow]]
            source = "rack1-A.Example.org"
            uuids = ["00000000-0000-0000-0000-000000000007"]
            [[allow]]
            uid = 17
            guests = ["*"]
            "#,
        );
        policy.check_guest(&host("rack1-b"), &guest("web-1")).unwrap();
        let refused = policy.check_guest(&host("rack1-b"), &guest("db")).unwrap_err();
        let said = "spiffe://vmferry/host/rack1-b may not send guest db (";
        assert!(refused.starts_with(said), "{refused}");
        assert!(refused.ends_with("here: the policy allows it other guests only"), "{refused}");
        policy.check_guest(&host("rack1-a"), &guest("db")).unwrap();
        let refused = policy.check_source(&host("rack2-a")).unwrap_err();
        assert!(refused.contains("no rule of the policy is for it"), "{refused}");
        assert!(policy.check_guest(&host("rack2-a"), &guest("web-1")).is_err());

        let mut local = PeerIdentity::anonymous("unix".into());
        assert!(policy.check_source(&local).unwrap_err().contains("shows no certificate"));
        local.uid = Some(17);
        policy.check_guest(&local, &guest("anything")).unwrap();
        local.uid = Some(18);
        assert!(policy.check_source(&local).is_err());
    }

    #[test]
    fn definition_rules_are_those_of_the_rules_that_allow_the_guest() {
        let (_directory, policy) = policy(
            r#"
            [[allow]]
            source = "a.example.org"
            guests = ["web-*"]
            [[allow]]
            source = "a.example.org"
            guests = ["*"]
            definition.bridges = ["br0"]
            [[allow]]
            source = "b.example.org"
            guests = ["*"]
            [allow.definition]
            bridges = ["br1"]
            "#,
        );
        let bridges = |source: &str, guest_name: &str| {
            let rules = policy.definition_rules(&host(source), &guest(guest_name));
            let of = |rule: &Arc<DefinitionRules>| {
                (rule.permits_bridge("br0"), rule.permits_bridge("br1"))
            };
            rules.iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(bridges("a", "web-1"), [(false, false), (true, false)]);
        assert_eq!(bridges("a", "db"), [(true, false)]);
        assert_eq!(bridges("b", "db"), [(false, true)]);
        assert_eq!(bridges("c", "db"), []);
    }

    #[test]
    fn policy_that_is_empty_allows_nothing() {
        let (_directory, policy) = policy("# nothing yet\n");
        assert!(policy.check_source(&host("a")).is_err());
    }

    #[test]
    fn policy_reloads_a_changed_file_and_ignores_a_wrong_one() {
        let (directory, policy) =
            policy("[[allow]]\nsource = \"a.example.org\"\nguests = [\"*\"]\n");
        let said = Arc::new(Mutex::new(Vec::new()));
        let hearer = Arc::clone(&said);
        policy.tell(move |text| hearer.lock().push(text.to_owned()));
        let write = |text: &str| {
            let fresh = directory.path().join("fresh");
            std::fs::write(&fresh, text).unwrap();
            std::fs::rename(fresh, directory.path().join("policy.toml")).unwrap();
        };
        policy.check_source(&host("a")).unwrap();
        write("[[allow]]\nsource = \"b.example.org\"\n");
        policy.check_source(&host("a")).unwrap();
        policy.check_source(&host("a")).unwrap();
        let words = std::mem::take(&mut *said.lock());
        assert_eq!(words.len(), 1, "{words:?}");
        assert!(words[0].contains("at line 1"), "{words:?}");
        write("[[allow]]\nsource = \"b.example.org\"\nguests = [\"*\"]\n");
        assert!(policy.check_source(&host("a")).is_err());
        policy.check_source(&host("b")).unwrap();
        std::fs::remove_file(directory.path().join("policy.toml")).unwrap();
        policy.check_source(&host("b")).unwrap();
        let words = std::mem::take(&mut *said.lock());
        assert_eq!(words.len(), 2, "{words:?}");
    }
}
