//! The `--json` output of commands that succeed: the names and kinds of all fields, as scripts rely
//! on them. The values differ from run to run. `TRYCMD=overwrite` updates the pinned files, as it
//! does for messages.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use serde_json::{Map, Value};

use vmferry_kit::need_kvm;

use crate::support::{Host, World, run_ok, text};

/// Fields whose values scripts compare.
const WORDS: [&str; 6] = ["event", "phase", "verdict", "kind", "way", "side"];

/// Fields that are null or not depending on the machine's speed or kernel.
const EITHER: [&str; 7] =
    ["eta_ms", "advice", "forecast", "needed_bytes_per_s", "hints", "statistics", "sandbox"];

/// Names and kinds of a value.
fn shape(name: &str, value: &Value) -> Value {
    let kind = |kind: &str| Value::String(kind.to_owned());
    if EITHER.contains(&name) {
        return kind("null or a value");
    }
    match value {
        Value::Null => Value::Null,
        Value::Bool(_) => kind("bool"),
        Value::Number(_) => kind("number"),
        Value::String(_) if WORDS.contains(&name) => value.clone(),
        Value::String(_) => kind("text"),
        // The first item represents all items of a list.
        Value::Array(all) => all.first().map(|first| shape("", first)).into_iter().collect(),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| (name.clone(), shape(name, value)));
            Value::Object(fields.collect::<Map<_, _>>())
        }
    }
}

/// The shapes of commands, in the order of a story.
#[derive(Default)]
struct Story {
    told: String,
}

impl Story {
    fn result(&mut self, command: &str, value: &Value) {
        let _ = writeln!(self.told, "{command}\n    {}", shape("", value));
    }

    /// Events by name; other tests check how often and in which order they occur. Whether a phase
    /// has progress events depends on the machine's speed, except in a migration that is held.
    fn events(&mut self, command: &str, lines: &[Value]) {
        let mut kinds = BTreeMap::new();
        for line in lines.iter().filter(|line| line["held"] != false) {
            kinds.entry(line["event"].as_str().unwrap_or("")).or_insert_with(|| shape("", line));
        }
        let _ = writeln!(self.told, "{command}");
        for kind in kinds.values() {
            let _ = writeln!(self.told, "    {kind}");
        }
    }

    fn runs(&mut self, host: &Host, arguments: &[&str]) {
        let shown: Vec<&str> =
            arguments.iter().map(|word| word.rsplit('/').next().unwrap_or(word)).collect();
        self.result(&shown.join(" "), &run_ok(host, arguments));
    }
}

/// The first file of a directory by name.
fn first_of(directory: &Path) -> String {
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    text(&files.min().unwrap()).to_owned()
}

#[test]
fn json_fields_stay_unchanged() {
    need_kvm();
    let world = World::without_certificates();
    let (a, b) = (world.host("a"), world.host("b"));
    let path = |name: &str| text(&world.path(name)).to_owned();
    let mut story = Story::default();

    let pki = path("pki");
    story.runs(&a, &["pki", "init", "--dir", &pki]);
    let issue = ["pki", "issue", "host-a", "--dir", &pki, "--out", &path("tls"), "--address"];
    story.runs(&a, &[&issue[..], &["127.0.0.1"]].concat());
    story.runs(&a, &["pki", "revoke", "host-a", "--dir", &pki]);

    let flags = ["--guest", "kvm", "--memory", "64M", "--balloon"];
    let workload = "ticks fill=4,text hot=4,random,rate=100";
    let mut vmm = a.guest("web", &[&flags[..], &["--workload", workload]].concat());
    story.runs(&a, &["status"]);
    story.runs(&a, &["status", "web"]);
    story.runs(&a, &["metrics"]);
    story.runs(&a, &["estimate", "web", "--time", "300ms"]);
    story.runs(&a, &["balloon", "web"]);
    story.runs(&a, &["pause", "web"]);
    story.runs(&a, &["resume", "web"]);

    let (mut receiver, address) = b.receive(&["--listen", &format!("unix:{}", path("in.sock"))]);
    let (run, recorded) = (path("run.json"), path("recorded"));
    let hold = ["--pause-before-switchover", "--downtime-limit", "5s", "--verify"];
    let keep = ["--save-run", &run, "--record", &recorded];
    let mut send = a.start(&[&["send", "web", "--to", &address][..], &hold, &keep].concat());
    send.event("held");
    send.event("progress");
    story.runs(&a, &["status", "web"]);
    story.runs(&a, &["set", "web", "--max-rounds", "60"]);
    story.runs(&a, &["switch-over", "web"]);
    let sent = send.finish().exited(0);
    let (result, events) = sent.lines.split_last().unwrap();
    story.events("send web: events", events);
    story.result("send web", result);
    story.events("run web", &vmm.finish_by_ref().lines);
    receiver.event("serving");

    story.runs(&a, &["status", "--sessions"]);
    let control = first_of(&world.path("recorded"));
    let journal = first_of(&b.runtime.join("journal"));
    story.result("inspect CHANNEL", &run_ok(&a, &["inspect", &control]));
    story.runs(&a, &["report", &run]);
    story.result("inspect JOURNAL", &run_ok(&b, &["inspect", &journal]));
    story.runs(&b, &["quit", "web"]);
    story.events("receive", &receiver.finish().lines);

    let demo = ["demo", "--guest", "process", "--memory", "64M", "--transport", "unix"];
    story.runs(&a, &demo);

    let kept = "tests/pinned/shapes.txt";
    if std::env::var("TRYCMD").is_ok_and(|what| what == "overwrite") {
        std::fs::write(kept, &story.told).unwrap();
    }
    let pinned = std::fs::read_to_string(kept).unwrap();
    for (now, then) in story.told.lines().zip(pinned.lines()) {
        assert_eq!(now, then, "if this is meant, `TRYCMD=overwrite` writes it to {kept}");
    }
    assert_eq!(story.told.lines().count(), pinned.lines().count(), "{kept}");
}
