//! The part of `vmferry status --sessions` about guests that libvirt has moved.

use std::path::Path;

use comfy_table::{Table, presets};
use serde_json::{Value, json};
use vmferry_handover::journal::Side;

use crate::commands::daemon::domains::DomainLook;
use crate::commands::finishes::{Finish, Finishes, Looks, advice, says};
use crate::exit::Failure;

/// The sessions, with what libvirt of this host says about their guests.
pub struct Moved {
    sessions: Vec<(Finish, Option<DomainLook>)>,
    unreadable: Vec<Value>,
}

impl Moved {
    /// Reads the journals, whether a daemon runs or not, and asks libvirt.
    pub fn read(journals: &Path) -> Result<Self, Failure> {
        let found = Finishes::read(journals)?;
        let mut looks = Looks::default();
        let mut look = |finish: &Finish| found.is_last(finish).then(|| looks.at(finish.guest.uuid));
        let sessions = found.all.iter().map(|one| (one.clone(), look(one))).collect();
        let unreadable = found
            .unreadable
            .iter()
            .map(|one| json!({ "session": one.session, "side": one.side, "error": one.reason }));
        Ok(Self { sessions, unreadable: unreadable.collect() })
    }

    /// The sessions as JSON.
    pub fn to_json(&self) -> Vec<Value> {
        self.sessions.iter().map(|(finish, look)| finish.to_json(look.as_ref())).collect()
    }

    /// The journals that can't be read, as JSON.
    pub fn unreadable_json(&self) -> &[Value] {
        &self.unreadable
    }

    /// A line for each session, and what to do; `None` if there are none.
    pub fn table(&self) -> Option<String> {
        if self.sessions.is_empty() && self.unreadable.is_empty() {
            return None;
        }
        let mut table = Table::new();
        table.load_style(presets::ASCII_BORDERS_ONLY_CONDENSED);
        table.set_header(["guest of libvirt", "session", "this host was", "peer", "and"]);
        for (finish, look) in &self.sessions {
            table.add_row([
                finish.guest.name.clone(),
                finish.session.to_string(),
                match finish.state.side() {
                    Side::Source => "source".into(),
                    Side::Destination => "destination".into(),
                },
                finish.peer.clone(),
                says(finish, look.as_ref()),
            ]);
        }
        let mut shown = table.to_string();
        for (finish, look) in &self.sessions {
            if let Some(advice) = advice(finish, look.as_ref()) {
                shown.push_str(&format!("\n{advice}"));
            }
        }
        for unreadable in &self.unreadable {
            let (session, error) = (&unreadable["session"], &unreadable["error"]);
            let (session, error) = (session.as_str(), error.as_str());
            shown.push_str(&format!(
                "\nthe journal of session {} can't be read, so no word can be given from it: {}",
                session.unwrap_or_default(),
                error.unwrap_or_default()
            ));
        }
        Some(shown)
    }
}
