//! Which host may send what, by the command: policies, revocation, a destination's URI, and renewal
//! without a restart.

use std::path::Path;

use crate::support::{Host, Running, World, run_ok, text};

fn source(world: &World) -> (Host, Running) {
    let host = world.host("a");
    let guest = host.guest("web", &["--memory", "64M", "--workload", "hot=8,random"]);
    (host, guest)
}

/// A certificate for 127.0.0.1, of the world's own authority.
fn issue(world: &World, name: &str) -> String {
    let (authority, out) = (world.path("ca"), world.path(&format!("tls-{name}")));
    let arguments = [
        "pki",
        "issue",
        name,
        "--dir",
        text(&authority),
        "--out",
        text(&out),
        "--address",
        "127.0.0.1",
    ];
    run_ok(&world.host("pki"), &arguments);
    out.display().to_string()
}

/// Replaces a file atomically, so that readers always see it whole.
fn replace(path: &Path, content: &str) {
    let fresh = path.with_extension("fresh");
    std::fs::write(&fresh, content).unwrap();
    std::fs::rename(fresh, path).unwrap();
}

#[test]
fn policy_admits_sources_and_changes_while_listening() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let (sender, receiver) = (issue(&world, "host-a"), issue(&world, "host-b"));
    let policy = world.path("policy.toml");
    let rule = |guest: &str| {
        format!("[[allow]]\nsource = \"spiffe://vmferry/host/*-a\"\nguests = [\"{guest}\"]\n")
    };
    std::fs::write(&policy, rule("db-*")).unwrap();
    let flags =
        ["--listen", "127.0.0.1:0", "--tls", &receiver, "--policy", text(&policy), "--once"];
    let (mut destination, address) = world.host("b").receive(&flags);

    let send = |tls: &str| a.run(&["send", "web", "--to", &address, "--tls", tls]);
    send(&sender).failed(4, "spiffe://vmferry/host/host-a may not send guest web");
    let seen = destination.event("authenticated");
    assert_eq!(seen["names"][0], "spiffe://vmferry/host/host-a", "{seen}");
    assert_eq!(seen["key_exchange"], "X25519MLKEM768", "{seen}");
    let said = destination.event("turned-away");
    let words = "the policy allows it other guests only";
    assert!(said["reason"].as_str().unwrap().contains(words), "{said}");
    a.check_guest("web");
    send(&world.tls()).failed(4, "spiffe://vmferry/host/test-host may not send guests here");
    destination.event("turned-away");
    a.check_guest("web");

    // A policy with a mistake is reported and changes nothing. Neither refusal ends `--once`.
    replace(&policy, "[[allow]]\nsuorce = \"x\"\n");
    send(&sender).failed(4, "may not send guest web");
    let said = destination.event("policy");
    assert!(said["message"].as_str().unwrap().contains("at line 2"), "{said}");
    replace(&policy, &rule("web"));
    send(&sender).exited(0);
    destination.event("serving");
    let b = world.host("b");
    b.check_guest("web");

    // A report of it can be made, which names the hosts.
    run_ok(&b, &["quit", "web"]);
    let record = world.path("received.json");
    destination.finish().exited(0).save(&record);
    let page = world.path("received.html");
    run_ok(&b, &["report", text(&record), "-o", text(&page)]);
    let page = std::fs::read_to_string(page).unwrap();
    for words in ["is spiffe://vmferry/host/host-a", "away: the destination refused: "] {
        assert!(page.contains(words), "no `{words}`: {page}");
    }
}

#[test]
fn revoked_host_is_refused_without_a_restart() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let (stolen, receiver) = (issue(&world, "host-a"), issue(&world, "host-b"));
    let (mut destination, address) =
        world.host("b").receive(&["--listen", "127.0.0.1:0", "--tls", &receiver]);

    let authority = world.path("ca");
    let revoke = ["pki", "revoke", "host-a", "--dir", text(&authority)];
    let list = run_ok(&world.host("pki"), &revoke);
    assert_eq!((&list["added"], &list["number"]), (&1.into(), &1.into()), "{list}");
    let crl = std::fs::read_to_string(authority.join("crl.pem")).unwrap();
    replace(&world.path("tls-host-b/crl.pem"), &crl);
    a.run(&["send", "web", "--to", &address, "--tls", &stolen]).failed(4, "it was revoked");
    destination.event("certificates");
    let said = destination.event("turned-away");
    assert!(said["reason"].as_str().unwrap().contains("was revoked by its authority"), "{said}");
    a.check_guest("web");

    // The source's own list: the destination's certificate is checked there.
    run_ok(&world.host("pki"), &["pki", "revoke", "host-b", "--dir", text(&authority)]);
    let crl = authority.join("crl.pem");
    let good = world.tls();
    a.run(&["send", "web", "--to", &address, "--tls", &good, "--crl", text(&crl)])
        .failed(4, "was revoked by its authority");
    a.check_guest("web");

    let unknown = ["pki", "revoke", "nobody", "--dir", text(&authority)];
    world.host("pki").run(&unknown).failed(4, "issued to `nobody`");
    a.run(&["send", "web", "--to", &address, "--tls", &good]).exited(0);
}

#[test]
fn destination_can_be_identified_by_its_uri() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let good = world.tls();
    // A certificate without any address.
    let out = world.path("far");
    let authority = world.path("ca");
    let arguments = ["pki", "issue", "far", "--dir", text(&authority), "--out", text(&out)];
    run_ok(&world.host("pki"), &arguments);
    let (_destination, address) =
        world.host("b").receive(&["--listen", "127.0.0.1:0", "--tls", text(&out)]);
    let send = ["send", "web", "--to", &address, "--tls", &good];
    a.run(&send).failed(4, "not for 127.0.0.1");
    let wrong = [&send[..], &["--destination-id", "spiffe://vmferry/host/near"]].concat();
    a.run(&wrong).failed(4, "not for spiffe://vmferry/host/near");
    a.check_guest("web");
    let right = [&send[..], &["--destination-id", "spiffe://vmferry/host/far"]].concat();
    a.run(&right).exited(0);
}

#[test]
fn contradictory_trust_options_are_refused_with_advice() {
    let world = World::new();
    let b = world.host("b");
    let good = world.tls();
    let policy = world.path("policy.toml");
    let receive = ["receive", "--listen", "127.0.0.1:0", "--tls", &good];
    let with = |more: &[&str]| b.run(&[&receive[..], more].concat());
    with(&["--policy", text(&policy)]).failed(2, "can't be read");
    std::fs::write(&policy, "[[allow]]\nguests = [\"*\"]\n").unwrap();
    with(&["--policy", text(&policy)]).failed(2, "wrong at line 1: a rule needs either");
    with(&["--crl", text(&policy)]).failed(4, "vmferry pki revoke");
    let plain = ["receive", "--listen", "unix:/tmp/x", "--crl", text(&policy)];
    b.run(&plain).failed(2, "add --tls DIR");
    let send = ["send", "web", "--to", "unix:/tmp/x", "--destination-id", "spiffe://x/y"];
    b.run(&send).failed(2, "add --tls DIR");
    std::fs::remove_file(world.path("good/ca.pem")).unwrap();
    with(&[]).failed(4, "ca.pem: can't be read");
}
