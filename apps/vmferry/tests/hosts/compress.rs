//! `--compress`, its related options, and `vmferry set`.

use crate::support::{World, run_ok};

const WORKLOAD: [&str; 4] = ["--memory", "64M", "--workload", "ticks fill=24,text hot=8,random"];

#[test]
fn compress_modes_move_the_guest_and_report_their_work() {
    let world = World::new();
    let (mut here, mut there) = (world.host("a"), world.host("b"));
    let mut guest = here.guest("web", &WORKLOAD);
    here.check_guest("web");
    for way in ["auto", "none", "delta", "lz4", "zstd:3", "zlib"] {
        let (mut destination, address) = there.receive(&["--listen", "tcp:127.0.0.1:0", "--plain"]);
        let sent = run_ok(
            &here,
            &[
                "send",
                "web",
                "--to",
                &address,
                "--plain",
                "--verify",
                "--compress",
                way,
                "--when-busy",
                "wait",
                "--workers",
                "2",
                "--delta-memory",
                "16M",
            ],
        );
        assert_eq!(sent["verify_match"], true, "{way}");
        let named = if way == "zlib" { "zlib:1" } else { way };
        assert_eq!(sent["compression"], named);
        let pages = |encoding: &str| sent["encoded"][encoding].as_u64().unwrap();
        let content: u64 = ["raw", "delta", "lz4", "zstd", "zlib"].map(pages).iter().sum();
        assert!(content > 6000, "{way}: {}", sent["encoded"]);
        match way {
            "none" => assert_eq!(pages("raw"), content),
            "delta" => assert_eq!(pages("raw") + pages("delta"), content),
            "auto" => {}
            way => {
                let algorithm = way.split(':').next().unwrap();
                assert!(pages(algorithm) > 5000, "{way}: {}", sent["encoded"]);
                assert!(sent["compression_ratio"].as_f64().unwrap() > 1.5, "{way}");
            }
        }
        destination.event("serving");
        there.check_guest("web");
        guest.finish();
        guest = destination;
        std::mem::swap(&mut here, &mut there);
    }
    run_ok(&here, &["quit", "web"]);
    guest.finish();
}

#[test]
fn bandwidth_cap_changes_during_a_migration() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let _guest = a.guest("web", &WORKLOAD);
    let (mut destination, address) = b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain"]);
    a.run(&["set", "web", "--max-bandwidth", "1M"]).failed(9, "no migration of this guest");
    a.run(&["set", "web", "--max-bandwidth", "fast"]).exited(2);

    // At that rate the migration would take minutes.
    let slow = ["--max-bandwidth", "128K", "--compress", "none"];
    let mut send =
        a.start(&[&["send", "web", "--to", &address, "--plain", "--verify"], &slow[..]].concat());
    send.event("round-started");
    a.run(&["set", "web", "--max-bandwidth", "1K"]).failed(2, "below 64 KiB/s");
    let set = run_ok(&a, &["set", "web", "--max-bandwidth", "none"]);
    assert!(set["max_bandwidth"].is_null(), "{set}");
    send.finish().exited(0);
    destination.event("serving");
    b.check_guest("web");
}

#[test]
fn unknown_compress_modes_are_usage_errors_that_list_the_valid_ones() {
    let world = World::new();
    let send = ["send", "web", "--to", "unix:/nowhere", "--compress"];
    for (way, words) in
        [("gzip", "lz4, zstd or zlib"), ("zstd:99", "1 to 19"), ("lz4:3", "takes no level")]
    {
        let mut command = world.host("a").command(&[&send[..], &[way]].concat());
        let output = command.stderr(std::process::Stdio::piped()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(words), "{text}");
    }
    let workers = [&send[..], &["auto", "--workers", "0"]].concat();
    world.host("a").run(&workers).exited(2);
}
