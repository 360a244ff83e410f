//! A migration that is kept running while its destination is attacked.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use vmferry::config::{BandwidthCap, RoundLimit};
use vmferry::destination::{Notice, receive};
use vmferry::source::{Change, Report, migrate};
use vmferry::stats::SourceStats;
use vmferry_transport::pki::Validity;
use vmferry_transport::{Address, Dialer, Listener, TlsIdentity};
use vmferry_wire::{ControlMessage, HelloStatus, PROTOCOL_VERSION_MAX, Role, SessionId, Token};

use super::by_hand::{PATIENCE, Pki, greet, hello, load, policy};
use super::recorder::Recorder;
use crate::support::{DestinationGuest, Scenario, given, owned, running_guest};

/// So slow that the rounds never get shorter, while several finish per second.
const CAP: u64 = 8 << 20;

/// The source address of hostile connections, if they do not use the source's own.
pub const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// The attacker's view of the migration, and the notices about the attack.
pub struct Siege<'a> {
    /// The address on which the destination listens.
    pub address: Address,
    pub pki: &'a Pki,
    /// Recordings of what the source has sent.
    pub recorder: Recorder,
    notices: Mutex<Receiver<Notice>>,
    rounds: Mutex<Receiver<()>>,
}

impl Siege<'_> {
    /// Waits until a connection is turned away for this reason.
    pub fn turned_away(&self, reason: &str) -> String {
        let mut heard = Vec::new();
        loop {
            match self.notices.lock().unwrap().recv_timeout(PATIENCE) {
                Ok(Notice::TurnedAway { reason: said, .. }) if said.contains(reason) => {
                    return said;
                }
                Ok(other) => heard.push(other),
                Err(error) => {
                    panic!("no connection was turned away for `{reason}` ({error}): {heard:?}")
                }
            }
        }
    }

    /// Checks that the migration continues: whole rounds are placed from now on.
    pub fn goes_on(&self) {
        let rounds = self.rounds.lock().unwrap();
        while rounds.try_recv().is_ok() {}
        // One may have been in flight.
        for _ in 0..2 {
            rounds.recv_timeout(PATIENCE).expect("the migration goes on");
        }
    }

    pub fn socket(&self) -> SocketAddr {
        socket(&self.address)
    }

    /// A connection from an address of this host.
    pub fn connect_from(&self, from: Ipv4Addr) -> TcpStream {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
        bind(&socket, &SocketAddrV4::new(from, 0)).unwrap();
        connect(&socket, &self.socket()).unwrap();
        TcpStream::from(socket)
    }

    pub fn dialer(&self, identity: Arc<TlsIdentity>) -> Dialer {
        Dialer::new(self.address.clone(), Some(identity))
    }

    /// Checks that a legitimate source that queries an unknown session receives an answer.
    pub fn is_served(&self, identity: Arc<TlsIdentity>) {
        let (mut reader, mut writer) = self.dialer(identity).connect().unwrap().split();
        reader.set_timeout(Some(PATIENCE)).unwrap();
        let mut question = Vec::new();
        ControlMessage::Query { session: SessionId([9; 16]), offer: None }
            .encode(PROTOCOL_VERSION_MAX, &mut question);
        assert_eq!(
            greet(&mut reader, &mut writer, hello(Role::Query, 0, Token([0; 16]))),
            HelloStatus::Ok
        );
        writer.write_all(&question).unwrap();
        reader.read_exact(&mut [0; 16]).expect("an answer");
    }
}

/// Migrates a guest whose memory is rewritten continuously, attacks the destination meanwhile, and
/// then lets the migration end, which must succeed.
pub fn withstand(mut scenario: Scenario, attack: impl FnOnce(&Siege) + Send) -> SourceStats {
    let pki = Pki::new();
    scenario.source.max_bandwidth = Some(BandwidthCap::new(CAP).unwrap());
    scenario.source.max_rounds = RoundLimit::new(u32::MAX).unwrap();
    scenario.source.compression.way = vmferry::config::compression::CompressionWay::Off;
    let tls = matches!(scenario.listen_at, Address::Tls { .. } | Address::Grpc { .. });
    let mut files = pki.files("destination", Validity::days(1));
    pki.files("revoked", Validity::days(1));
    files.revocations = vec![pki.revoke("revoked")];
    if tls {
        scenario.destination.policy = Some(policy(&pki.path("policy.toml")));
    }
    let identity = tls.then(|| load(files));
    let listener = Listener::bind(&scenario.listen_at, identity).unwrap();
    let address = listener.local_address().clone();
    let recorder = Recorder::start(socket(&address));
    let dialer = Dialer::new(through(&recorder, &address), tls.then(|| pki.identity("source")));
    let (said, notices) = channel();
    let (placed, rounds) = channel();
    let (notices, rounds) = (Mutex::new(notices), Mutex::new(rounds));
    let siege = Siege { address, pki: &pki, recorder, notices, rounds };
    let vm = running_guest(1000);
    vm.guest.wait_for_work();
    let scenario = &scenario;
    let (outcome, received) = std::thread::scope(|scope| {
        let receiving = scope.spawn(move || {
            let mut watch = |notice: &Notice| drop(said.send(notice.clone()));
            let vm = DestinationGuest::default();
            receive(listener, vm, &scenario.destination, &scenario.stop, &mut watch)
        });
        let attacking = scope.spawn(|| {
            // An attack that fails must end the test and not only its own thread.
            let _ended = EndOfAttack(scenario);
            siege.goes_on();
            attack(&siege);
            siege.goes_on();
        });
        let outcome =
            migrate(vm, &dialer, scenario.source.clone(), &scenario.orders, &mut |report| {
                if matches!(report, Report::RoundDone(_)) {
                    let _ = placed.send(());
                }
            });
        // Wakes an attacker that waits for it.
        drop(placed);
        attacking.join().unwrap();
        (outcome, receiving.join().unwrap())
    });
    let (_, stats) = given(outcome);
    assert_eq!((stats.digest_match, stats.verify_match), (Some(true), Some(true)));
    let received = owned(received);
    let guest = received.vm.guest.as_ref().unwrap();
    guest.wait_for_work();
    guest.pause();
    stats
}

struct EndOfAttack<'a>(&'a Scenario);

impl Drop for EndOfAttack<'_> {
    fn drop(&mut self) {
        self.0.orders.change(Change { max_bandwidth: Some(None), ..Change::default() });
    }
}

fn socket(address: &Address) -> SocketAddr {
    let (Address::Tls { port, .. } | Address::Grpc { port, .. } | Address::Tcp { port, .. }) =
        address
    else {
        panic!("no TCP")
    };
    SocketAddr::from((Ipv4Addr::LOCALHOST, *port))
}

/// The address by which `address` is reached through the recorder.
fn through(recorder: &Recorder, address: &Address) -> Address {
    let (host, port) = ("127.0.0.1".to_owned(), recorder.address.port());
    match address {
        Address::Tls { .. } => Address::Tls { host, port },
        Address::Grpc { mode, .. } => Address::Grpc { host, port, mode: *mode },
        _ => Address::Tcp { host, port },
    }
}
