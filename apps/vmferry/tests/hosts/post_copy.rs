//! Post-copy between the command's processes: on KVM and of threads, with every kind of memory,
//! over TLS, in the sandbox, and with links that break.

use vmferry_kit::need_kvm;

use crate::support::proxy::Proxy;
use crate::support::{Running, World};
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

#[test]
fn guest_of_threads_fetches_its_pages_into_every_kind_of_memory() {
    for kind in ["private", "memfd", "thp"] {
        move_there_and_back("process", kind);
    }
}

#[test]
fn guest_on_kvm_fetches_its_pages_into_every_kind_of_memory() {
    need_kvm();
    for kind in ["private", "memfd", "thp"] {
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
    let cap = ["--max-bandwidth", "64M", "--downtime-limit", "5ms", "--max-rounds", "10000"];
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
fn guest_that_can_not_fetch_stays() {
    need_kvm();
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let flags = ["--guest", "kvm", "--memory", "64M", "--balloon", "--workload", "hot=8"];
    let _vmm = a.guest("web", &flags);
    let listen = format!("unix:{}", world.path("in.sock").display());
    let (_destination, address) = b.receive(&["--listen", &listen]);
    let send = ["send", "web", "--to", &address];
    let refused = "can't be moved with post-copy: the destination does not support it";
    a.run(&[&send[..], &["--post-copy", "now"]].concat()).failed(6, refused);
    let verified = ["--post-copy", "now", "--verify"];
    a.run(&[&send[..], &verified].concat()).failed(6, "both memories are to be compared");
    // With `auto` it moves without post-copy.
    let auto = ["--post-copy", "auto", "--downtime-limit", "10s"];
    let sent = a.run(&[&send[..], &auto].concat()).exited(0);
    assert_eq!(sent.last()["missing_pages"], 0);
    b.check_guest("web");
}
