//! Post-copy between the command's processes: on KVM and of threads, with every kind of memory,
//! over TLS, in the sandbox, and with links that break.

use vmferry_kit::{HugePages, need_kvm};

use crate::live::fits;
use crate::support::proxy::Proxy;
use crate::support::{Host, Running, World, all, run_ok, text};
use serde_json::Value;

/// A guest that rewrites 32 MiB as fast as it can.
const HOT: &str = "fill=16,text hot=32,random ticks";

/// Pages of the guest that it rewrites in the first round, at least. The cap makes that round last
/// for 2 s, so that it rewrites them on a busy machine too.
const MISSING_PAGES: u64 = 4_000;

/// Reads the statistics of both sides, and checks that they agree. Returns the destination's.
fn fetched(sent: &Value, destination: &mut Running) -> Value {
    let fetching = destination.event("fetching");
    destination.event("fetched");
    let fetch = destination.event("received")["stats"]["fetch"].clone();
    let number = |of: &Value, name: &str| of[name].as_u64().unwrap_or_else(|| panic!("{of}"));
    let missing = number(sent, "missing_pages");
    assert!(missing >= MISSING_PAGES, "{sent}");
    assert_eq!(number(&fetching, "pages"), missing, "{fetching}");
    assert_eq!(number(&fetch, "missing_pages"), missing, "{fetch}");
    let arrived = number(&fetch, "fault_pages") + number(&fetch, "background_pages");
    assert_eq!(arrived, missing, "{fetch}");
    fetch
}

/// Moves a hot guest there and back, each time with post-copy, and checks its whole memory.
fn move_there_and_back(guest: &str, kind: &str) {
    // Two guests of 64 MiB: one at each host.
    let _pool = (kind == "hugetlb").then(|| HugePages::reserve(2 * 32));
    let world = World::new();
    let tls = world.tls();
    let (a, b) = (world.host("a"), world.host("b"));
    let flags = ["--guest", guest, "--vcpus", "2", "--memory", "64M", "--memory-kind", kind];
    let mut vmm = a.guest("web", &[&flags[..], &["--workload", HOT]].concat());
    for (here, there) in [(&a, &b), (&b, &a)] {
        let listen = ["--listen", "tls:127.0.0.1:0", "--tls", &tls, "--sandbox", "require"];
        let (mut next, address) = there.receive(&[&listen[..], &["--memory-kind", kind]].concat());
        // The cap delays the background too, so that the guest touches missing pages.
        let send = ["send", "web", "--to", &address, "--tls", &tls, "--max-bandwidth", "24M"];
        let limits = ["--post-copy", "now", "--downtime-limit", "5ms", "--compress", "none"];
        let sent = here.run(&[&send[..], &limits].concat()).exited(0);
        let fetch = fetched(sent.last(), &mut next);
        assert!(fetch["fault_pages"].as_u64() > Some(0), "{guest}, {kind}: {fetch}");
        assert!(fetch["wait_max_us"].as_u64() > Some(0), "{guest}, {kind}: {fetch}");
        vmm.finish().exited(0);
        there.check_guest("web");
        vmm = next;
    }
}

const MEMORY_KINDS: [&str; 4] = ["memfd", "thp", "private", "hugetlb"];

/// Together with the next test, a sample has every kind.
#[test]
fn guest_of_threads_fetches_its_pages_into_every_kind_of_memory() {
    for kind in if all() { &MEMORY_KINDS[..] } else { &MEMORY_KINDS[..2] } {
        move_there_and_back("process", kind);
    }
}

#[test]
fn guest_on_kvm_fetches_its_pages_into_every_kind_of_memory() {
    need_kvm();
    for kind in if all() { &MEMORY_KINDS[..] } else { &MEMORY_KINDS[2..] } {
        move_there_and_back("kvm", kind);
    }
}

/// The guest is stuck on a capped link, and the user lets it go.
#[test]
fn user_moves_a_stuck_guest_with_post_copy() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let flags = ["--guest", "process", "--memory", "64M", "--workload", HOT];
    let _vmm = a.guest("web", &flags);
    let listen = format!("unix:{}", world.path("in.sock").display());
    let (mut destination, address) = b.receive(&["--listen", &listen]);
    let cap = ["--max-bandwidth", "4M", "--downtime-limit", "100ms", "--max-rounds", "10000"];
    let send = ["send", "web", "--to", &address];
    let mut sending = a.start(&[&send[..], &cap].concat());
    sending.event_where(|event| event["event"] == "round-done" && event["round"] == 2);
    a.run(&["set", "web", "--post-copy"]).exited(0);
    let event = sending.event("post-copy");
    assert!(event["pages"].as_u64() >= Some(MISSING_PAGES), "{event}");
    let sent = sending.finish().exited(0);
    fetched(sent.last(), &mut destination);
    b.check_guest("web");
}

/// All channels break while the guest fetches, again and again. It waits for its pages, and nothing
/// else happens to it.
#[test]
fn broken_links_delay_a_guest_that_fetches() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let flags = ["--guest", "process", "--memory", "64M", "--workload", HOT];
    let _vmm = a.guest("web", &flags);
    let (mut destination, address) = b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain"]);
    let proxy = Proxy::holding(&address, "127.0.0.1", None);
    let limits = ["--max-bandwidth", "4M", "--post-copy", "now", "--downtime-limit", "5ms"];
    let mut sending =
        a.start(&[&["send", "web", "--plain", "--to", &proxy.address], &limits[..]].concat());
    sending.event("serving");
    for _ in 0..3 {
        proxy.cut();
        sending.event("link-lost");
        proxy.heal();
        sending.event("link-restored");
    }
    // From here on as fast as the link is.
    a.run(&["set", "web", "--max-bandwidth", "none"]).exited(0);
    let sent = sending.finish().exited(0);
    fetched(sent.last(), &mut destination);
    b.check_guest("web");
}

#[test]
fn comparison_of_both_memories_excludes_post_copy() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let flags = ["--guest", "process", "--memory", "64M", "--workload", "hot=8"];
    let _vmm = a.guest("web", &flags);
    let listen = format!("unix:{}", world.path("in.sock").display());
    let (_destination, address) = b.receive(&["--listen", &listen]);
    let send = ["send", "web", "--to", &address];
    let verified = ["--post-copy", "now", "--verify"];
    a.run(&[&send[..], &verified].concat()).failed(6, "both memories are to be compared");
    // With `auto` it moves without post-copy.
    let auto = ["--post-copy", "auto", "--downtime-limit", "10s"];
    let sent = a.run(&[&send[..], &auto].concat()).exited(0);
    assert_eq!(sent.last()["missing_pages"], 0);
    b.check_guest("web");
}

/// The guest allocates, frees and reports memory all the time, and relies on zeros in what it has
/// freed. Nothing that it frees is returned to the host before its last page has arrived.
#[test]
fn balloon_keeps_its_pages_while_others_are_missing() {
    need_kvm();
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let kinds = if all() { &["memfd", "private", "thp"][..] } else { &["memfd", "private"] };
    for kind in kinds {
        let workload = "hot=24,random churn=24,rate=20000 freed=16 init-on-free reporting";
        let flags = ["--guest", "kvm", "--memory", "128M", "--balloon", "--workload", workload];
        let vmm = a.guest("web", &[&flags[..], &["--memory-kind", kind]].concat());
        a.run(&["balloon", "web", "16M"]).exited(0);
        let listen = ["--listen", "tcp:127.0.0.1:0", "--plain", "--memory-kind", kind];
        let (mut next, address) = b.receive(&listen);
        let proxy = Proxy::holding(&address, "127.0.0.1", None);
        let limits = ["--max-bandwidth", "8M", "--post-copy", "now", "--downtime-limit", "5ms"];
        let send = ["send", "web", "--plain", "--to", &proxy.address, "--compress", "none"];
        let mut sending = a.start(&[&send[..], &limits].concat());
        sending.event("post-copy");
        a.run(&["set", "web", "--max-bandwidth", "512K"]).exited(0);
        next.event("fetching");
        sending.event("serving");
        // The guest gives 16 MiB more to its balloon, although it waits for a page again and again.
        b.run(&["balloon", "web", "32M"]).exited(0);
        let number = |it: &Value, name: &str| it["balloon"][name].as_u64();
        let discarded = |it: &Value| number(it, "discarded_bytes");
        let inflated = b.wait_for("web", |it| number(it, "actual_bytes") == Some(32 << 20));
        assert!(inflated["fetch"]["remaining_pages"].as_u64() > Some(0), "{kind}: {inflated}");
        assert_eq!(discarded(&inflated), Some(0), "{kind}: {inflated}");
        // Without a link, the device may wait for a page, and the status does not wait for it.
        proxy.cut();
        next.event("link-lost");
        for _ in 0..3 {
            let status = run_ok(&b, &["status", "web"]);
            assert!(status["fetch"]["remaining_pages"].as_u64() > Some(0), "{kind}: {status}");
            assert!(discarded(&status).is_none_or(|bytes| bytes == 0), "{kind}: {status}");
        }
        proxy.heal();
        a.run(&["set", "web", "--max-bandwidth", "none"]).exited(0);
        sending.finish().exited(0);
        next.event("received");
        vmm.finish().exited(0);
        b.check_guest("web");
        b.run(&["balloon", "web", "48M"]).exited(0);
        b.wait_for("web", |it| discarded(it) > Some(16 << 20));
        b.check_guest("web");
        b.run(&["quit", "web"]).exited(0);
        next.finish();
    }
}

/// The guest has died with its destination. Its source keeps the memory until the operator gives
/// the guest up, which is explained first.
#[test]
fn guest_whose_destination_is_lost_is_given_up() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let flags = ["--guest", "process", "--memory", "64M", "--workload", HOT];
    let mut vmm = a.guest("web", &flags);
    let (mut destination, address) = b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain"]);
    let give_up = ["resolve", "web", "--give-up"];
    a.run(&give_up).failed(9, "no other host needs pages of it from here");
    let limits = ["--max-bandwidth", "4M", "--post-copy", "now", "--downtime-limit", "5ms"];
    let mut sending =
        a.start(&[&["send", "web", "--plain", "--to", &address], &limits[..]].concat());
    sending.event("serving");
    destination.event("fetching");
    destination.kill();
    sending.event("link-lost");
    a.run(&["resolve", "web", "--destination-owns", "--yes"]).failed(9, "not in doubt");
    a.run(&give_up).failed(2, "everything in its memory is gone");
    a.run(&[&give_up[..], &["--yes"]].concat()).exited(0);
    vmm.finish_by_ref();
    a.run(&give_up).failed(9, "no other host needs pages of it from here");
}

/// `vmferry status web`, as people see it.
fn in_words(host: &Host) -> String {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_vmferry"));
    command.args(["status", "web"]).env("VMFERRY_RUNTIME_DIR", &host.runtime);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The value of a metric of guest web, if it is exported.
fn metric(host: &Host, name: &str) -> Option<f64> {
    let metrics = run_ok(host, &["metrics"]);
    let metrics = metrics["metrics"].as_str().unwrap();
    let line = metrics.lines().find(|line| line.starts_with(&format!("vmferry_{name}{{")))?;
    Some(line.rsplit(' ').next().unwrap().parse().unwrap())
}

/// The page that `vmferry report` makes of a record.
fn report(host: &Host, record: &str) -> String {
    let page = format!("{record}.html");
    run_ok(host, &["report", record, "-o", &page]);
    std::fs::read_to_string(page).unwrap()
}

/// Both hosts show a fetch and a lost link, and the guest is not sent on before its end.
#[test]
fn fetch_is_seen_on_both_hosts_and_no_second_hop_begins() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    // Slow enough that its faults, which the cap does not delay, do not fetch everything at once.
    let slow = "fill=16,text hot=32,random,rate=1000 ticks";
    let flags = ["--guest", "process", "--memory", "64M", "--workload", slow];
    let _vmm = a.guest("web", &flags);
    let (mut destination, address) = b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain"]);
    let proxy = Proxy::holding(&address, "127.0.0.1", None);
    let limits = ["--max-bandwidth", "4M", "--post-copy", "now", "--downtime-limit", "5ms"];
    let record = text(&world.path("run.json")).to_owned();
    let send = ["send", "web", "--plain", "--to", &proxy.address, "--save-run", &record];
    let mut sending = a.start(&[&send[..], &limits].concat());
    sending.event("serving");
    proxy.cut();
    let progress = destination.event("fetch-progress");
    assert!(progress["remaining_pages"].as_u64() > Some(0), "{progress}");
    let lost = b.wait_for("web", |status| {
        let fetch = &status["fetch"];
        fetch["link_lost_ms"].as_f64() > Some(0.0) && fetch["awaited_pages"].as_u64() > Some(0)
    });
    assert!(lost["fetch"]["lost_channels"].as_u64() > Some(0), "{lost}");
    fits("Status", &lost);
    assert_eq!(metric(&b, "fetch_active"), Some(1.0));
    for name in ["missing_bytes", "remaining_bytes", "faults", "lost_channels"] {
        assert!(metric(&b, &format!("fetch_{name}")) > Some(0.0), "{name}");
    }
    assert_eq!(metric(&a, "migration_serving"), Some(1.0));
    assert!(metric(&a, "migration_remaining_bytes") > Some(0.0));
    assert_eq!(metric(&a, "fetch_remaining_bytes"), None, "the source fetches nothing");
    let words = in_words(&b);
    assert!(words.contains("runs here, needs ") && words.contains(" faults"), "{words}");
    assert!(words.contains("that host reconnects by itself"), "{words}");
    let words = in_words(&a);
    assert!(words.contains("runs at ") && words.contains("more pages"), "{words}");
    let hop = ["send", "web", "--plain", "--to", "tcp:127.0.0.1:1"];
    // A time, or that no page arrives: the link is cut.
    b.run(&hop).failed(7, "and are fetched while the guest runs (");
    proxy.heal();
    a.run(&["set", "web", "--max-bandwidth", "none"]).exited(0);
    sending.finish().exited(0);
    let fetch = destination.event("received")["stats"]["fetch"].clone();
    assert!(fetch["reconnections"].as_u64() > Some(0), "{fetch}");
    assert!(b.status("web")["fetch"].is_null(), "nothing is fetched any more");
    let fetched = ["fetch_active", "fetch_remaining_bytes"].map(|name| metric(&b, name));
    assert_eq!(fetched, [Some(0.0), None]);
    let page = report(&a, &record);
    assert!(page.contains("Post-copy") && page.contains("source served pages"), "{page}");
    b.check_guest("web");
    run_ok(&b, &["quit", "web"]);
    let record = world.path("received.json");
    destination.finish().exited(0).save(&record);
    let page = report(&b, text(&record));
    assert!(page.contains("web moved") && page.contains("Waits for missing pages"), "{page}");
}

/// The VMM is the guest's process, so the operator's command ends it from outside its sandbox.
#[test]
fn guest_whose_source_is_lost_is_given_up() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    for kind in ["memfd", "private"] {
        let flags = ["--guest", "process", "--memory", "64M", "--workload", HOT];
        let mut vmm = a.guest("web", &flags);
        let listen = ["--listen", "tcp:127.0.0.1:0", "--plain", "--memory-kind", kind];
        let (mut destination, address) = b.receive(&listen);
        let limits = ["--max-bandwidth", "4M", "--post-copy", "now", "--downtime-limit", "5ms"];
        let send = ["send", "web", "--plain", "--to", &address];
        let mut sending = a.start(&[&send[..], &limits].concat());
        destination.event("fetching");
        // Until then the source is in doubt.
        sending.event("serving");
        vmm.kill();
        destination.event("link-lost");
        let directory = world.path(kind);
        let give_up = ["resolve", "web", "--give-up", "--yes", "--dump", text(&directory)];
        let given_up = b.run(&give_up).exited(0);
        let dumped = given_up.last()["dumped_bytes"].as_u64().unwrap();
        assert!(dumped > 16 << 20, "{kind}: {given_up:?}");
        assert!(given_up.last()["absent_pages"].as_u64() > Some(1000), "{kind}: {given_up:?}");
        let list = std::fs::read(directory.join("memory.json")).unwrap();
        let list: Value = serde_json::from_slice(&list).unwrap();
        assert_eq!(list["about"]["guest"]["name"], "web", "{kind}: {list}");
        destination.finish();
        drop(sending);
        let left = &run_ok(&b, &["status"])["unattended"];
        assert_eq!(left, &serde_json::json!([]), "{kind}");
        a.run(&["resolve", "web", "--give-up", "--yes"]).exited(0);
    }
}
