//! What users see and change of a migration while it runs, and the record that is kept of it.

use serde_json::{Value, json};

use crate::support::{Host, Running, World, run_ok};

const WORKLOAD: &str = "ticks fill=4,text hot=16,random";

struct Scene {
    world: World,
    a: Host,
    b: Host,
    vmm: Running,
    receiver: Running,
    address: String,
}

/// A guest on host a, and host b, which waits for it.
fn scene() -> Scene {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let vmm = a.guest("web", &["--guest", "process", "--memory", "64M", "--workload", WORKLOAD]);
    a.wait_for("web", |status| status["report"]["rounds"].as_u64() > Some(0));
    let listen = format!("unix:{}", world.path("in.sock").display());
    let (receiver, address) = b.receive(&["--listen", &listen]);
    Scene { world, a, b, vmm, receiver, address }
}

/// Checks the value against a schema of the API.
pub fn fits(schema: &str, value: &Value) {
    let document: Value = serde_json::from_str(vmferry_control::OPENAPI).unwrap();
    let mut wanted = json!({ "$ref": format!("#/components/schemas/{schema}") });
    wanted["components"] = document["components"].clone();
    let validator = jsonschema::draft202012::new(&wanted).unwrap();
    if let Err(error) = validator.validate(value) {
        panic!("{schema}: {error}: {value}");
    }
}

#[test]
fn hold_waits_for_the_operator_and_then_moves() {
    let Scene { world: _world, a, b, vmm, mut receiver, address } = scene();
    let hold = ["--pause-before-switchover", "--downtime-limit", "5s", "--verify"];
    let mut sender = a.start(&[&["send", "web", "--to", &address][..], &hold].concat());
    let run = sender.event("started")["run"].clone();
    let held = sender.event("held");
    assert!(held["predicted_downtime_ms"].as_f64().unwrap() > 0.0, "{held}");
    // Rounds continue meanwhile: far more than two, if the migration were not held.
    let status = a.wait_for("web", |status| status["migration"]["round"].as_u64() >= Some(4));
    assert_eq!(status["migration"]["held"], true, "{status}");
    fits("Status", &status);
    let metrics = run_ok(&a, &["metrics"]);
    let metrics = metrics["metrics"].as_str().unwrap();
    let line =
        |name: &str| metrics.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap();
    assert!(line("vmferry_migration_held").ends_with(" 1.0"), "{metrics}");
    assert!(line("vmferry_guest_memory_bytes").ends_with(" 67108864.0"), "{metrics}");
    a.run(&["estimate", "web"]).failed(7, "a migration of this guest is under way");
    run_ok(&a, &["switch-over", "web"]);
    let sent = sender.finish().exited(0);
    assert_eq!(sent.last()["verify_match"], true, "{sent:?}");
    fits("SourceStats", sent.last());
    let lines = &sent.lines[..sent.lines.len() - 1];
    for line in lines {
        fits("Event", line);
        assert_eq!(line["run"], run, "{line}");
        assert!(line["time"].as_str().unwrap().ends_with('Z'), "{line}");
    }
    assert!(lines.iter().any(|line| line["event"] == "progress"), "{lines:?}");
    for forecast in lines.iter().filter(|line| line["event"] == "forecast") {
        fits("Forecast", forecast);
    }
    // The destination's events have the same session number.
    let received = receiver.event("received");
    assert_eq!((&received["session"], &received["run"]), (&run, &run), "{received}");
    vmm.finish().exited(0);
    b.check_guest("web");
}

#[test]
fn limits_change_during_a_migration() {
    let Scene { world: _world, a, b, vmm, mut receiver, address } = scene();
    // 20 MiB at 64 KiB/s would take minutes and never fit.
    let slow = ["--max-bandwidth", "64K", "--downtime-limit", "10ms", "--compress", "none"];
    let mut sender = a.start(&[&["send", "web", "--to", &address][..], &slow].concat());
    sender.event("connected");
    assert_eq!(a.run(&["set", "web"]).code, Some(2), "something must be changed");
    a.run(&["set", "web", "--max-bandwidth", "1K"]).failed(2, "below 64 KiB/s");
    let set =
        ["set", "web", "--max-bandwidth", "none", "--downtime-limit", "60s", "--throttle", "0"];
    let set = run_ok(&a, &set);
    assert_eq!(set, json!({ "max_bandwidth": null, "downtime_limit_ms": 60000, "throttle": 0 }));
    sender.finish().exited(0);
    receiver.event("serving");
    vmm.finish().exited(0);
    b.check_guest("web");
    b.run(&["set", "web", "--max-rounds", "3"])
        .failed(9, "no migration of this guest is under way");
    b.run(&["switch-over", "web"]).failed(9, "no migration of this guest is under way");
}

/// A migration that does not converge reports that while it runs, in words and numbers, and its
/// record has it too.
#[test]
fn convergence_verdict_precedes_the_end_and_the_run_is_recorded() {
    let Scene { world, a, b: _b, vmm: _vmm, receiver: _receiver, address } = scene();
    let saved = world.path("run.json");
    let saved = saved.to_str().unwrap();
    let limits = [
        "--max-bandwidth",
        "32M",
        "--downtime-limit",
        "20ms",
        "--max-rounds",
        "4",
        "--compress",
        "none",
    ];
    let send = ["send", "web", "--to", &address, "--save-run", saved];
    let failed = a.run(&[&send[..], &limits].concat());
    failed.failed(10, "does not converge");
    let record: Vec<Value> = std::fs::read_to_string(saved)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (last, events) = record.split_last().unwrap();
    assert_eq!((&last["event"], &last["error"]["exit"]), (&json!("failed"), &json!(10)), "{last}");
    // The record has what the events said.
    let names = |lines: &[Value]| -> Vec<String> {
        lines.iter().map(|line| line["event"].as_str().unwrap_or_default().to_owned()).collect()
    };
    assert_eq!(names(events), names(&failed.lines[..failed.lines.len() - 1]));
    let advised = events.iter().find(|event| event["verdict"] == "not-converging").unwrap();
    let advice = advised["advice"].as_str().unwrap();
    assert!(advice.contains("raise the bandwidth cap to"), "{advice}");
    assert!(advice.contains("allow a downtime of"), "{advice}");
    a.check_guest("web");
    let nowhere = a.run(&["send", "web", "--to", &address, "--save-run", "/nowhere/run.json"]);
    nowhere.failed(2, "/nowhere/run.json");
}

#[test]
fn estimate_predicts_the_cost_and_leaves_the_guest_alone() {
    let Scene { world: _world, a, b: _b, vmm: _vmm, receiver: _receiver, address: _ } = scene();
    let estimate = |link: &str| {
        run_ok(
            &a,
            &[
                "estimate",
                "web",
                "--time",
                "500ms",
                "--max-bandwidth",
                link,
                "--downtime-limit",
                "200ms",
            ],
        )
    };
    let fast = estimate("10Gbit/s");
    fits("Estimate", &fast["seen"]);
    assert_eq!(fast["seen"]["memory_bytes"], 64 << 20);
    // 4 MiB of text and 16 MiB that are rewritten completely in any half second.
    let hot = fast["seen"]["hot_bytes"].as_u64().unwrap();
    assert!(((8 << 20)..(18 << 20)).contains(&hot), "{fast}");
    assert_eq!(fast["outlook"]["converges"], true, "{fast}");
    let slow = estimate("8Mbit/s");
    assert_eq!(slow["outlook"]["converges"], false, "{slow}");
    assert!(slow["outlook"]["needed_bytes_per_s"].as_f64().unwrap() > 1e6, "{slow}");
    let status = a.status("web");
    assert!(status["migration"].is_null(), "{status}");
    a.check_guest("web");
    a.run(&["estimate", "web", "--time", "1h"]).failed(2, "at most 600 s");
    run_ok(&a, &["pause", "web"]);
    a.run(&["estimate", "web"]).failed(9, "`vmferry resume` it first");
}

/// A watcher that disconnects leaves the guest free again.
#[test]
fn estimate_ends_with_its_client() {
    let Scene { world: _world, a, b: _b, vmm: _vmm, receiver: _receiver, address: _ } = scene();
    let mut watching = a.start(&["estimate", "web", "--time", "10min"]);
    a.wait_for("web", |status| status["watched"] == true);
    a.run(&["pause", "web"]).failed(7, "is watched by `vmferry estimate`");
    watching.kill();
    // The VMM notices that the client has gone.
    a.wait_for("web", |status| status["watched"] == false);
    run_ok(&a, &["pause", "web"]);
    run_ok(&a, &["resume", "web"]);
    a.check_guest("web");
}

#[test]
fn metrics_are_served_to_prometheus() {
    use std::io::{Read, Write};

    let Scene { world: _world, a, b: _b, vmm: _vmm, receiver: _receiver, address: _ } = scene();
    let mut server = a.start(&["metrics", "--listen", "127.0.0.1:0"]);
    let address = server.event("listening")["address"].as_str().unwrap().to_owned();
    let get = |path: &str| {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let metrics = get("/metrics");
    assert!(metrics.starts_with("HTTP/1.1 200 OK"), "{metrics}");
    assert!(metrics.contains("\nvmferry_guest_running{guest=\"web\",uuid=\""), "{metrics}");
    assert!(!metrics.contains("\nvmferry_migration_round{"), "none is under way: {metrics}");
    assert!(get("/").starts_with("HTTP/1.1 404"));
    // A client that sends garbage is answered, and the next one is served.
    let mut nonsense = std::net::TcpStream::connect(&address).unwrap();
    nonsense.write_all(b"\0\0\r\n\r\n").unwrap();
    let mut answer = String::new();
    nonsense.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    // A silent client is closed, and the next one gets its turn.
    let silent = std::net::TcpStream::connect(&address).unwrap();
    assert!(get("/metrics").contains("vmferry_guest_answers"));
    drop(silent);
    server.kill();
}
