//! What happens when somebody dies or gives up, phase after phase.

mod support;

use support::proxy::Proxy;
use support::{BEFORE_COMMIT, Host, Running, World, run_ok};

struct Scene {
    world: World,
    a: Host,
    b: Host,
    _guest: Running,
}

impl Scene {
    fn new() -> Self {
        let world = World::new();
        let (a, b) = (world.host("a"), world.host("b"));
        let guest = a.guest("web", &["--memory", "64M", "--workload", "hot=2,random ticks"]);
        Self { world, a, b, _guest: guest }
    }

    fn receive(&self) -> (Running, String) {
        self.b.receive(&["--listen", "127.0.0.1:0", "--tls", &self.world.tls(), "--once"])
    }

    /// A migration over TLS.
    fn send(&self, address: &str) -> Running {
        let tls = self.world.tls();
        self.send_over(address, &["--tls", &tls])
    }

    /// A migration whose rounds take half a second each, the paused one too.
    fn send_over(&self, address: &str, link: &[&str]) -> Running {
        let mut arguments = vec!["send", "web", "--to", address];
        arguments.extend(link);
        arguments.extend([
            "--compress",
            "none",
            "--reconnect-timeout",
            "1s",
            "--max-bandwidth",
            "4M",
            "--max-rounds",
            "2",
            "--when-stuck",
            "switch-over",
            "--downtime-limit",
            "50ms",
            "--verify",
        ]);
        self.a.start(&arguments)
    }
}

#[test]
fn the_destination_dies_in_each_phase() {
    let scene = Scene::new();
    for (name, moment) in BEFORE_COMMIT {
        let (mut destination, address) = scene.receive();
        let mut send = scene.send(&address);
        send.event_where(moment);
        destination.kill();
        let sent = send.finish();
        assert_eq!(sent.code, Some(12), "{name}: {sent:?}");
        scene.a.check_guest("web");
    }
    arrives(&scene);
}

#[test]
fn the_link_is_cut_in_each_phase() {
    let scene = Scene::new();
    for (name, moment) in BEFORE_COMMIT {
        let (destination, address) =
            scene.b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain", "--once"]);
        let proxy = Proxy::before(&address);
        let mut send = scene.send_over(&proxy.address, &["--plain"]);
        send.event_where(moment);
        proxy.cut();
        let sent = send.finish();
        assert_eq!(sent.code, Some(12), "{name}: {sent:?}");
        let received = destination.finish();
        assert_eq!(received.code, Some(12), "{name}: {received:?}");
        scene.a.check_guest("web");
    }
    arrives(&scene);
}

#[test]
fn the_client_that_asked_for_the_migration_dies_in_each_phase() {
    let scene = Scene::new();
    for (name, moment) in BEFORE_COMMIT {
        let (destination, address) = scene.receive();
        let mut send = scene.send(&address);
        send.event_where(moment);
        send.kill();
        let received = destination.finish();
        assert_eq!(received.code, Some(11), "{name}: {received:?}");
        scene.a.check_guest("web");
    }
    arrives(&scene);
}

#[test]
fn cancelled_in_each_phase() {
    let scene = Scene::new();
    for (name, moment) in BEFORE_COMMIT {
        let (destination, address) = scene.receive();
        let mut send = scene.send(&address);
        send.event_where(moment);
        run_ok(&scene.a, &["cancel", "web"]);
        let sent = send.finish();
        assert_eq!(sent.code, Some(11), "{name}: {sent:?}");
        let received = destination.finish();
        assert_eq!(received.code, Some(11), "{name}: {received:?}");
        scene.a.check_guest("web");
    }
    arrives(&scene);
}

#[test]
fn the_source_dies_in_each_phase_and_the_destination_never_runs_half_a_guest() {
    for (name, moment) in BEFORE_COMMIT {
        let mut scene = Scene::new();
        let (destination, address) = scene.receive();
        let mut send = scene.send(&address);
        send.event_where(moment);
        scene._guest.kill();
        let received = destination.finish();
        assert_eq!(received.code, Some(12), "{name}: {received:?}");
        assert!(!received.lines.iter().any(|event| event["event"] == "running"), "{name}");
        assert_ne!(send.finish().code, Some(0), "{name}");
    }
}

/// After everything that went wrong, a migration still works.
fn arrives(scene: &Scene) {
    let (mut destination, address) = scene.receive();
    let sent = scene.send(&address).finish();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    destination.event("serving");
    scene.b.check_guest("web");
}
