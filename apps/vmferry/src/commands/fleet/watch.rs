//! `vmferry fleet watch`.

use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::{Value, json};
use vmferry_fleet::{Fleet, HostView, MigrationView};

use super::moving::in_words;
use super::show;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// How often etcd is asked whether it still has this fleet.
const CHECK_PERIOD: Duration = Duration::from_secs(3);

/// What is shown, by its key: the event, and its sentence.
type Picture = BTreeMap<String, (Value, String)>;

/// Shows changes until the process is interrupted.
pub fn run(fleet: &Fleet, output: &Output) -> Result<(), Failure> {
    let (changed, changes) = channel();
    let ended = changed.clone();
    let watches_changed = move || {
        // The command ends.
        let _ = changed.send(Heard::Changed);
    };
    crate::signals::on_end(move || {
        let _ = ended.send(Heard::Ended);
    })?;
    let _hosts = fleet.follow_hosts(watches_changed.clone());
    let _migrations = fleet.follow_migrations(watches_changed);
    let (mut shown, mut silent) = (Picture::new(), false);
    loop {
        match changes.recv_timeout(CHECK_PERIOD) {
            Ok(Heard::Changed) => {}
            Ok(Heard::Ended) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                let asked = fleet.check_incarnation();
                match asked {
                    Err(error) if error.is_lasting() => return Err(error.into()),
                    _ => {}
                }
                if asked.is_err() != std::mem::replace(&mut silent, asked.is_err()) {
                    let text = match &asked {
                        Ok(()) => "etcd answers again".to_owned(),
                        Err(error) => format!("{}; guests run on", vmferry::chain(error)),
                    };
                    let event = json!({ "event": "etcd", "answers": asked.is_ok() });
                    output.event(&event, || text);
                }
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new(Code::Internal, "the watches of etcd have ended"));
            }
        }
        let (Some(hosts), Some(migrations)) = (fleet.followed_hosts(), fleet.followed_migrations())
        else {
            continue;
        };
        let now = picture(&hosts?, &migrations);
        for (event, text) in differences(&shown, &now) {
            output.event(&event, || text);
        }
        shown = now;
    }
}

enum Heard {
    Changed,
    Ended,
}

fn picture(hosts: &[HostView], migrations: &[MigrationView]) -> Picture {
    let mut picture = Picture::new();
    let problem = |text: String| (json!({ "event": "problem", "message": text }), text);
    for view in hosts {
        let name = view.name.to_string();
        let event = json!({
            "event": "host", "host": name, "present": view.presence.is_some(),
            "cordoned": view.orders.cordoned, "lost": view.orders.lost.is_some(),
        });
        let words = format!("host {name}: {}", show::state(view));
        picture.insert(format!("0 {name}"), (event, words));
        if let Err(error) = &view.host {
            picture.insert(format!("1 {name}"), problem(error.to_string()));
        }
        for (number, guest) in view.guests.iter().enumerate() {
            let (key, shown) = match guest {
                Ok(guest) => {
                    let phase = show::phase(view, guest);
                    let words = format!("guest {} on {name}: {}", guest.name, show::word(&phase));
                    let event = json!({
                        "event": "guest", "host": name, "uuid": guest.uuid, "name": guest.name,
                        "phase": phase,
                    });
                    (format!("2 {name} {}", guest.uuid), (event, words))
                }
                Err(error) => (format!("3 {name} {number}"), problem(error.to_string())),
            };
            picture.insert(key, shown);
        }
    }
    for MigrationView { guest, migration } in migrations {
        let shown = match migration {
            Ok(migration) => {
                let mut event = json!(migration);
                event["event"] = "move".into();
                let (name, to) = (&migration.guest.name, &migration.destination);
                let what = in_words(&migration.phase);
                (event, format!("move of {name} from {} to {to}: {what}", migration.source))
            }
            Err(error) => problem(error.to_string()),
        };
        picture.insert(format!("4 {guest}"), shown);
    }
    picture
}

/// What is new in a picture, or gone.
fn differences(before: &Picture, now: &Picture) -> Vec<(Value, String)> {
    let gone =
        before.iter().filter(|(key, _)| !now.contains_key(*key)).map(|(_, (event, text))| {
            let mut event = event.clone();
            event["gone"] = true.into();
            let what = text.split_once(':').map_or(text.as_str(), |(what, _)| what);
            (event, format!("{what}: gone"))
        });
    let new = now.iter().filter(|(key, shown)| before.get(*key) != Some(shown));
    gone.chain(new.map(|(_, shown)| shown.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_what_is_new_changed_or_gone() {
        let of = |pairs: &[(&str, &str)]| -> Picture {
            let entry = |(key, text): &(&str, &str)| {
                ((*key).to_owned(), (json!({ "key": key, "text": text }), (*text).to_owned()))
            };
            pairs.iter().map(entry).collect()
        };
        let before = of(&[("a", "host a: present"), ("b", "host b: present"), ("c", "x")]);
        let now = of(&[("b", "host b: not heard"), ("c", "x"), ("d", "host d: present")]);
        let changes = differences(&before, &now);
        let texts: Vec<&str> = changes.iter().map(|(_, text)| text.as_str()).collect();
        assert_eq!(texts, ["host a: gone", "host b: not heard", "host d: present"]);
        assert_eq!((&changes[0].0["gone"], &changes[1].0["gone"]), (&true.into(), &Value::Null));
        assert!(differences(&now, &now).is_empty());
    }
}
