//! Two hosts in one process.

use std::net::SocketAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tempfile::TempDir;
use vmferry::config::compression::CompressionConfig;
use vmferry_kit::Cable;
use vmferry_proxy::{
    Forward, ForwardExit, ForwardSource, Owner, Peer, Proxy, ProxyConfig, ProxyEvent, Timings,
};
use vmferry_transport::Address;

/// No wait of a test is longer.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Host `a` dials host `b` through a cable. What connects to `entrance` on `a` comes out at `exit`
/// on `b`.
pub struct Hosts {
    pub a: Proxy,
    pub b: Option<Proxy>,
    pub cable: Cable,
    pub entrance: PathBuf,
    pub exit: UnixListener,
    pub events: Events,
    pub directory: TempDir,
    b_config: ProxyConfig,
}

/// The events of both hosts.
#[derive(Clone, Default)]
pub struct Events(Arc<Heard>);

#[derive(Default)]
struct Heard {
    events: Mutex<Vec<(char, ProxyEvent)>>,
    more: Condvar,
}

impl Events {
    fn of(&self, host: char) -> Box<vmferry_proxy::Observer> {
        let events = self.clone();
        Box::new(move |event| {
            events.0.events.lock().push((host, event));
            events.0.more.notify_all();
        })
    }

    /// Waits for an event of a host.
    pub fn wait_for(&self, host: char, mut is_it: impl FnMut(&ProxyEvent) -> bool) -> ProxyEvent {
        let deadline = Instant::now() + LIMIT;
        let mut events = self.0.events.lock();
        loop {
            if let Some((_, event)) =
                events.iter().find(|(from, event)| *from == host && is_it(event))
            {
                return event.clone();
            }
            let waited = self.0.more.wait_until(&mut events, deadline);
            assert!(!waited.timed_out(), "no such event of {host} in {events:#?}");
        }
    }

    /// The number of events of a host so far.
    pub fn count(&self, host: char, mut is_it: impl FnMut(&ProxyEvent) -> bool) -> usize {
        self.0.events.lock().iter().filter(|(from, event)| *from == host && is_it(event)).count()
    }
}

pub fn timings() -> Timings {
    let millis = Duration::from_millis;
    Timings { silence: millis(600), reconnect: millis(20_000), connect: millis(2000) }
}

fn config(directory: PathBuf) -> ProxyConfig {
    ProxyConfig {
        listen: "tcp:127.0.0.1:0".parse().unwrap(),
        tls: None,
        policy: None,
        peers: Vec::new(),
        forwards: Vec::new(),
        journals: directory.join("journals"),
        domains: None,
        definition_facts: None,
        keeper: None,
        access: None,
        receivers: None,
        directory,
        libvirt: "/nowhere".into(),
        qemu: Owner {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        },
        timings: timings(),
        compression: CompressionConfig::default(),
        bandwidth: None,
    }
}

fn socket_address(proxy: &Proxy) -> SocketAddr {
    let Address::Tcp { port, .. } = proxy.address() else { unreachable!() };
    SocketAddr::from(([127, 0, 0, 1], *port))
}

impl Hosts {
    pub fn start() -> Self {
        Self::with(|_| {})
    }

    pub fn with(change: impl Fn(&mut ProxyConfig)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let (entrance, exit, events) = (path("entrance"), path("exit"), Events::default());
        let listener = UnixListener::bind(&exit).unwrap();
        let rule = Forward { name: "rule".into(), listen: None, connect: None };
        let mut b = config(path("b"));
        let connect = Some(ForwardExit { path: exit, from: vec![ForwardSource::Any] });
        b.forwards = vec![Forward { connect, ..rule.clone() }];
        change(&mut b);
        let b_proxy = Proxy::start(b.clone(), events.of('b')).unwrap();
        let address = socket_address(&b_proxy);
        b.listen = b_proxy.address().clone();
        let cable = Cable::new();
        cable.lead_to(address);
        let mut a = config(path("a"));
        let port = cable.address.port();
        let address = format!("tcp:127.0.0.1:{port}").parse().unwrap();
        a.peers = vec![Peer { name: "b".into(), address, id: None }];
        a.forwards = vec![Forward { listen: Some((entrance.clone(), "b".into())), ..rule }];
        change(&mut a);
        let a = Proxy::start(a, events.of('a')).unwrap();
        Self {
            a,
            b: Some(b_proxy),
            cable,
            entrance,
            exit: listener,
            events,
            directory,
            b_config: b,
        }
    }

    /// A connection of a program on `a` and the one that it comes out as on `b`.
    pub fn connect(&self) -> (UnixStream, UnixStream) {
        let near = UnixStream::connect(&self.entrance).unwrap();
        let (far, _) = self.exit.accept().unwrap();
        for socket in [&near, &far] {
            socket.set_read_timeout(Some(LIMIT)).unwrap();
            socket.set_write_timeout(Some(LIMIT)).unwrap();
        }
        (near, far)
    }

    /// Ends the daemon of `b` and starts it again with the same configuration.
    pub fn restart_b(&mut self) {
        self.b = None;
        self.b = Some(Proxy::start(self.b_config.clone(), self.events.of('b')).unwrap());
    }
}
