//! `vmferry demo`, the first command of a new user.

use crate::support::World;

#[test]
fn demo_moves_a_guest_and_reports_its_promises() {
    let world = World::new();
    for flags in [
        &["--memory", "128M", "--hot", "16M"][..],
        &["--guest", "process", "--memory", "64M", "--hot", "8M", "--transport", "unix"],
        &["--memory", "64M", "--workload", "idle", "--transport", "tcp", "--channels", "1"],
        &["--memory", "64M", "--workload", "display", "--transport", "unix"],
        &["--guest", "process", "--memory", "64M", "--workload", "display read=16"],
        &["--memory", "64M", "--vcpus", "2", "--workload", "read=32"],
    ] {
        let mut arguments = vec!["demo"];
        arguments.extend(flags);
        let ended = world.host("x").run(&arguments).exited(0);
        assert_eq!(ended.lines.len(), 1, "one object and nothing else");
        let result = ended.last();
        assert_eq!(result["ok"], true, "{result}");
        assert_eq!(
            (&result["digest_match"], &result["verify_match"]),
            (&true.into(), &true.into())
        );
        assert_eq!(result["guest_corruptions"], 0);
        // Guests with the workloads named here are fast enough for it.
        assert!(result["guest_checked_all"] == true || !flags.contains(&"--workload"), "{result}");
        for number in [
            "total_ms",
            "downtime_ms",
            "sent_bytes",
            "memory_bytes",
            "source_cpu_s",
            "destination_cpu_s",
        ] {
            assert!(
                result[number].as_f64().is_some_and(|number| number > 0.0),
                "{number}: {result}"
            );
        }
        let rounds = result["rounds"].as_array().unwrap();
        assert!(rounds.len() >= 2, "{result}");
        for round in rounds {
            assert!(round["pages"].is_u64() && round["bytes"].is_u64() && round["ms"].is_f64());
        }
        assert!(["kvm", "process"].contains(&result["guest"].as_str().unwrap()));
        assert!(["tls", "tcp", "unix"].contains(&result["transport"].as_str().unwrap()));
    }
}

#[test]
fn demo_that_can_not_converge_says_why_and_keeps_its_guest_running() {
    let world = World::new();
    let ended = world.host("x").run(&[
        "demo",
        "--memory",
        "64M",
        "--hot",
        "32M",
        "--max-bandwidth",
        "8M",
        "--downtime-limit",
        "10ms",
        "--max-rounds",
        "2",
        "--compress",
        "none",
    ]);
    ended.failed(10, "does not converge");
}

#[test]
fn huge_idle_guest_costs_only_its_populated_pages() {
    let world = World::new();
    for flags in [&["--memory-kind", "private"][..], &["--memory-kind", "memfd"]] {
        let mut arguments = vec!["demo", "--memory", "8G", "--workload", "fill=64,incompressible"];
        arguments.extend(flags);
        let ended = world.host("x").run(&arguments).exited(0);
        let result = ended.last();
        for side in ["source_peak_rss_bytes", "destination_peak_rss_bytes"] {
            assert!(result[side].as_u64().unwrap() < 300 << 20, "{side}: {result}");
        }
        assert!(result["sent_bytes"].as_u64().unwrap() < 80 << 20, "{result}");
        let first = &result["rounds"][0];
        assert!(first["pages"].as_u64().unwrap() < 17_000, "{first}");
    }
}
