//! Hostile peers during a migration: they are refused and reported with the reason, and the
//! migration continues and ends as if they were not there.

pub mod by_hand;
mod deaf;
mod phases;
mod recorder;
mod siege;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::time::Duration;

use crate::support::{self, Scenario};
use by_hand::{Pki, SESSION, announcement, greet, hello, load, message};
use deaf::DeafCall;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use siege::{ELSEWHERE, Siege, withstand};
use vmferry_transport::pki::Validity;
use vmferry_transport::{Address, Dialer, IdentityFiles, TlsIdentity, TransportError};
use vmferry_wire::{
    ControlMessage, HELLO_REPLY_BYTES, HelloReply, HelloStatus, PROTOCOL_VERSION_MAX, ReasonCode,
    Role, Token,
};

/// A scenario for each type of channel that authenticates peers.
fn authenticated() -> impl Iterator<Item = Scenario> {
    ["tls:127.0.0.1:0", "grpc:127.0.0.1:0"].into_iter().map(over)
}

fn over(address: &str) -> Scenario {
    let mut scenario = Scenario::new();
    scenario.listen_at = address.parse().unwrap();
    scenario
}

/// The error of a source that dials with this identity and greets.
fn refusal(dialer: &Dialer) -> TransportError {
    let channel = match dialer.connect() {
        Ok(channel) => channel,
        Err(error) => return error,
    };
    // In TLS 1.3 a client learns that it is refused when it first reads.
    let (mut reader, mut writer) = channel.split();
    let _ = writer.write_all(&hello(Role::Control, 0, Token([0; 16])).encode());
    let read = reader.read_exact(&mut [0; HELLO_REPLY_BYTES]);
    TransportError::from_io(read.unwrap_err(), "the destination")
}

/// Each attack is refused with the reason on both sides, and the migration continues.
fn refused(siege: &Siege, identity: Arc<TlsIdentity>, there: &str, here: &str) {
    let error = refusal(&siege.dialer(identity));
    assert!(error.is_authentication(), "{error:?}");
    assert!(error.to_string().contains(here), "{error}");
    siege.turned_away(there);
    siege.goes_on();
}

/// A self-signed certificate.
fn self_signed(pki: &Pki) -> IdentityFiles {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let (certificate, key) = (pki.path("self.pem"), pki.path("self.key"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(&key).unwrap();
    file.write_all(made.signing_key.serialize_pem().as_bytes()).unwrap();
    IdentityFiles::new(&pki.path("ca/ca.pem"), &certificate, &key)
}

#[test]
fn wrong_certificates_are_refused() {
    for scenario in authenticated() {
        withstand(scenario, |siege| {
            let pki = siege.pki;
            let other = Pki::new();
            let mut stranger = other.files("source", Validity::days(1));
            stranger.ca = pki.path("ca/ca.pem");
            refused(siege, load(stranger), "that this host does not trust", "does not accept");
            refused(
                siege,
                load(self_signed(pki)),
                "that this host does not trust",
                "does not accept",
            );
            let expired = pki.files("expired", Validity { from_days: -9, until_days: -2 });
            refused(siege, load(expired), "expired on 20", "it has expired");
            refused(
                siege,
                pki.identity("revoked"),
                "was revoked by its authority",
                "it was revoked",
            );
        });
    }
}

#[test]
fn certificate_with_a_wrong_name_is_refused_on_either_side() {
    for scenario in authenticated() {
        withstand(scenario, |siege| {
            // The destination is not the host that the source expects.
            let mut dialer = siege.dialer(siege.pki.identity("source"));
            dialer.destination_id = Some("spiffe://vmferry/host/another".into());
            let error = refusal(&dialer);
            assert!(error.to_string().contains("not for spiffe://vmferry/host/another"), "{error}");
            siege.turned_away("does not accept this host's certificate");
            dialer.destination_id = None;
            dialer.server_name = Some("another".into());
            let error = refusal(&dialer);
            assert!(matches!(error, TransportError::NameMismatch { .. }), "{error:?}");
            siege.turned_away("does not accept this host's certificate");
            siege.goes_on();

            // The source is not permitted to send anything: it announces its guest and receives the
            // reason.
            let (mut reader, mut writer) =
                siege.dialer(siege.pki.identity("another")).connect().unwrap().split();
            reader.set_timeout(Some(Duration::from_secs(60))).unwrap();
            let control = hello(Role::Control, 0, Token([0; 16]));
            assert_eq!(greet(&mut reader, &mut writer, control), HelloStatus::Ok);
            writer.write_all(&announcement(SESSION)).unwrap();
            let ControlMessage::Refuse { reason, .. } = message(&mut reader) else {
                panic!("no refusal")
            };
            assert_eq!(reason.code, ReasonCode::Unauthorized);
            let words = "spiffe://vmferry/host/another may not send guests here";
            assert!(reason.text.contains(words), "{}", reason.text);
            drop((reader, writer));
            siege.turned_away(words);
        });
    }
}

#[test]
fn missing_certificate_and_missing_tls_are_refused() {
    for scenario in authenticated() {
        withstand(scenario, |siege| {
            let mut roots = rustls::RootCertStore::empty();
            let path = siege.pki.path("ca/ca.pem");
            roots.add(CertificateDer::from_pem_file(path).unwrap()).unwrap();
            let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
            let mut bare = rustls::ClientConfig::builder_with_provider(provider)
                .with_protocol_versions(&[&rustls::version::TLS13])
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
            let grpc = matches!(siege.address, Address::Grpc { .. });
            bare.alpn_protocols = vec![if grpc { b"h2".to_vec() } else { b"vmferry/1".to_vec() }];
            let name = ServerName::try_from("127.0.0.1").unwrap();
            let client = rustls::ClientConnection::new(Arc::new(bare), name).unwrap();
            let mut stream =
                rustls::StreamOwned::new(client, TcpStream::connect(siege.socket()).unwrap());
            stream.write_all(b"let me in").unwrap();
            let error = stream.read(&mut [0; 1]).unwrap_err();
            assert!(error.to_string().contains("CertificateRequired"), "{error}");
            siege.turned_away("has sent no certificate");

            // A session's token is useless without a certificate.
            let mut thief = TcpStream::connect(siege.socket()).unwrap();
            thief.write_all(&hello(Role::Data, 0, Token([1; 16])).encode()).unwrap();
            siege.turned_away("speaks plain vmferry");
        });
    }
}

#[test]
fn unfinished_handshakes_block_no_other_peer() {
    for mut scenario in authenticated() {
        scenario.destination.greeting_timeout = Duration::from_secs(5);
        withstand(scenario, |siege| {
            // More connections than are greeted at a time: some are closed to make room for others,
            // the rest after a timeout.
            let slow: Vec<TcpStream> = (0..40)
                .map(|_| {
                    let mut stream = siege.connect_from(ELSEWHERE);
                    // The header of a handshake record of 16 KiB, without the rest.
                    stream.write_all(&[0x16, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc]).unwrap();
                    stream
                })
                .collect();
            siege.is_served(siege.pki.identity("source"));
            siege.goes_on();
            siege.turned_away("its handshake and greeting took long");
            for mut stream in slow {
                // Closed, with or without a reset.
                let _ = stream.read_to_end(&mut Vec::new());
            }
        });
    }
}

#[test]
fn silent_connections_block_no_other_peer() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    for scenario in authenticated() {
        withstand(scenario, |siege| {
            let idle: Vec<TcpStream> = (0..1000).map(|_| siege.connect_from(ELSEWHERE)).collect();
            siege.is_served(siege.pki.identity("source"));
            siege.goes_on();
            let said = siege.turned_away("more connections from 127.0.0.2");
            assert!(said.contains("it said nothing, and 128 connections wait already"), "{said}");
            // Likewise from the source's own address: a peer that sends data is served.
            let near: Vec<TcpStream> =
                (0..1000).map(|_| siege.connect_from(Ipv4Addr::LOCALHOST)).collect();
            siege.is_served(siege.pki.identity("source"));
            siege.goes_on();
            drop((idle, near));
        });
    }
}

#[test]
fn replayed_channel_is_refused() {
    // Without TLS, where only the session's own rules protect it.
    withstand(Scenario::new().over_tcp(), |siege| {
        let recordings = siege.recorder.recordings();
        assert_eq!(recordings.len(), 3, "a control channel and two lanes");
        for recording in &recordings[1..] {
            let mut thief = TcpStream::connect(siege.socket()).unwrap();
            let said = recording.said();
            assert!(said.len() > 100_000, "frames were recorded");
            // The destination may close the connection at any byte, and reset what it has answered.
            let _ = thief.write_all(&said);
            let mut reply = [0; HELLO_REPLY_BYTES];
            if thief.read_exact(&mut reply).is_ok() {
                let reply = HelloReply::parse(&reply).unwrap();
                assert_eq!(reply.status, HelloStatus::BadLane);
            }
            siege.goes_on();
        }
    });
}

#[test]
fn replayed_tls_channel_is_refused() {
    for scenario in authenticated() {
        withstand(scenario, |siege| {
            for recording in &siege.recorder.recordings()[1..] {
                let mut thief = TcpStream::connect(siege.socket()).unwrap();
                let _ = thief.write_all(&recording.said());
                let _ = thief.read_to_end(&mut Vec::new());
                // The recorded keys belong to the random values of that handshake, and the
                // destination uses new ones each time.
                siege.turned_away("TLS with 127.0.0.1");
                siege.goes_on();
            }
        });
    }
}

/// A peer that does not read blocks only itself.
#[test]
fn grpc_callers_that_do_not_read_block_no_other_peer() {
    let mut scenario = over("grpc:127.0.0.1:0");
    // Longer than the test: this timeout must not be what ends them.
    scenario.destination.greeting_timeout = by_hand::PATIENCE * 2;
    withstand(scenario, |siege| {
        let said = hello(Role::Data, 0, Token([7; 16])).encode();
        let call = || DeafCall::open(siege.connect_from(ELSEWHERE), siege.pki, "source", &said);
        let mut deaf: Vec<DeafCall> = (0..12).map(|_| call()).collect();
        siege.turned_away("its token is not this session's");
        siege.is_served(siege.pki.identity("source"));
        siege.goes_on();
        assert!(
            deaf.iter_mut().all(DeafCall::is_open),
            "the other connections did not wait for them"
        );
    });
}

#[test]
fn stolen_token_with_another_certificate_is_refused() {
    authenticated().for_each(steal_a_token);
}

fn steal_a_token(scenario: Scenario) {
    let pki = Pki::new();
    let listener =
        vmferry_transport::Listener::bind(&scenario.listen_at, Some(pki.identity("destination")))
            .unwrap();
    let address = listener.local_address().clone();
    let (said, notices) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let vm = support::DestinationGuest::default();
            let mut watch = |notice: &vmferry::destination::Notice| {
                let _ = said.send(notice.clone());
            };
            vmferry::destination::receive(
                listener,
                vm,
                &scenario.destination,
                &scenario.stop,
                &mut watch,
            )
        });
        let dial = |name: &str| {
            let dialer = Dialer::new(address.clone(), Some(pki.identity(name)));
            let (mut reader, writer) = dialer.connect().unwrap().split();
            reader.set_timeout(Some(Duration::from_secs(60))).unwrap();
            (reader, writer)
        };
        // A manual source, so that its token is known.
        let (mut reader, mut writer) = dial("source");
        let control = hello(Role::Control, 0, Token([0; 16]));
        assert_eq!(greet(&mut reader, &mut writer, control), HelloStatus::Ok);
        writer.write_all(&announcement(SESSION)).unwrap();
        let ControlMessage::Accept { token, .. } = message(&mut reader) else { panic!("refused") };

        let (mut thief_reads, mut thief_writes) = dial("thief");
        let lane = hello(Role::Data, 0, token);
        assert_eq!(greet(&mut thief_reads, &mut thief_writes, lane), HelloStatus::BadToken);
        loop {
            use vmferry::destination::Notice;
            if let Notice::TurnedAway { reason, .. } = by_hand::hear(&notices) {
                assert!(reason.contains("spiffe://vmferry/host/thief"), "{reason}");
                assert!(reason.contains("spiffe://vmferry/host/source"), "{reason}");
                break;
            }
        }
        // Nor may the thief query, and then end or commit the session on the query channel.
        let (mut thief_reads, mut thief_writes) = dial("thief");
        let query = hello(Role::Query, 0, Token([0; 16]));
        assert_eq!(greet(&mut thief_reads, &mut thief_writes, query), HelloStatus::Ok);
        let mut question = Vec::new();
        ControlMessage::Query { session: SESSION, offer: None }
            .encode(PROTOCOL_VERSION_MAX, &mut question);
        thief_writes.write_all(&question).unwrap();
        assert!(thief_reads.read_exact(&mut [0; 1]).is_err(), "no answer");

        // The lane still belongs to the source.
        let (mut reads, mut writes) = dial("source");
        assert_eq!(greet(&mut reads, &mut writes, lane), HelloStatus::Ok);
        scenario.stop.stop();
        support::nothing(receiving.join().unwrap());
    });

    // Nor later, when the session is only in the journal.
    let identity = pki.identity("destination");
    let listener = vmferry_transport::Listener::bind(&scenario.listen_at, Some(identity)).unwrap();
    let address = listener.local_address().clone();
    let stop = vmferry::destination::Stop::default();
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let vm = support::DestinationGuest::default();
            vmferry::destination::receive(listener, vm, &scenario.destination, &stop, &mut |_| {})
        });
        let ask = |name: &str| {
            let dialer = Dialer::new(address.clone(), Some(pki.identity(name)));
            let (mut reader, mut writer) = dialer.connect().unwrap().split();
            reader.set_timeout(Some(Duration::from_secs(60))).unwrap();
            let query = hello(Role::Query, 0, Token([0; 16]));
            assert_eq!(greet(&mut reader, &mut writer, query), HelloStatus::Ok);
            let mut question = Vec::new();
            ControlMessage::Query { session: SESSION, offer: None }
                .encode(PROTOCOL_VERSION_MAX, &mut question);
            writer.write_all(&question).unwrap();
            reader.read_exact(&mut [0; 1])
        };
        assert!(ask("thief").is_err(), "no answer");
        ask("source").unwrap();
        stop.stop();
        support::nothing(receiving.join().unwrap());
    });
}
