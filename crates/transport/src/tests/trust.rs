//! Which peers are trusted, and the errors for the others.

use std::io::Read;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection};

use super::{Pki, TIMEOUT, authenticated, join, listen, load, pair};
use crate::handshake::shake_hands;
use crate::identity::ALPN;
use crate::pki::{self, IssueRequest, Validity};
use crate::stream::Stream;
use crate::tls::{Tls, TlsSession};
use crate::{Address, Channel, Dialer, Listener, TlsIdentity, TransportError};

#[test]
fn untrusted_and_expired_certificates_are_refused_with_reasons() {
    let (pki, other) = (Pki::new(), Pki::new());
    let expired = Validity { from_days: -10, until_days: -2 };
    let early = Validity { from_days: 2, until_days: 10 };
    let names: &[&str] = &["127.0.0.1"];
    let good = pki.local("good");

    // (server, client, error at the server, error at the client)
    let cases = [
        (good.clone(), other.local("x"), "does not accept", "does not trust"),
        (good.clone(), pki.host("old", names, expired), "expired on 20", "it has expired"),
        (pki.host("old-server", names, expired), good.clone(), "it has expired", "expired on 20"),
        (good.clone(), pki.host("early", names, early), "is not valid before 20", "it has expired"),
        (
            pki.host("elsewhere", &["192.0.2.9"], Validity::days(1)),
            good.clone(),
            "does not accept",
            "not for 127.0.0.1",
        ),
    ];
    for (server, client, server_says, client_says) in cases {
        for address in authenticated() {
            let listener = listen(address, Some(server.clone()));
            let dialer = Dialer::new(listener.local_address().clone(), Some(client.clone()));
            let (accepted, dialed) = join(&listener, &dialer);
            let (accepted, dialed) = (accepted.unwrap_err(), dialed.unwrap_err());
            assert!(accepted.to_string().contains(server_says), "{address} server: {accepted:?}");
            assert!(dialed.to_string().contains(client_says), "{address} client: {dialed:?}");
            assert!(dialed.is_authentication(), "{dialed:?}");
        }
    }
}

#[test]
fn server_name_can_be_chosen_and_may_be_an_address() {
    let pki = Pki::new();
    let (server, client) = (pki.host("far", &["far", "::1"], Validity::days(1)), pki.local("b"));
    let listener = listen("tls:127.0.0.1:0", Some(server.clone()));
    let mut dialer = Dialer::new(listener.local_address().clone(), Some(client.clone()));
    dialer.server_name = Some("far".into());
    pair(&listener, &dialer);
    dialer.server_name = Some("::1".into());
    let (accepted, dialed) = pair(&listener, &dialer);
    assert_eq!(dialed.peer().names, ["spiffe://vmferry/host/far", "far", "::1"]);
    assert!(accepted.peer().tls);
    dialer.server_name = Some("no name".into());
    let error = dialer.connect().unwrap_err();
    assert!(matches!(error, TransportError::ServerName { .. }), "{error:?}");
}

/// Link-local addresses need a zone. Linux takes one with any IPv6 address.
#[test]
fn zone_of_an_address_is_not_expected_in_the_certificate() {
    let pki = Pki::new();
    let server = pki.host("far", &["::1"], Validity::days(1));
    let listener = listen("tls:[::1]:0", Some(server));
    let Address::Tls { port, .. } = listener.local_address().clone() else { unreachable!() };
    let address = format!("tls:[::1%1]:{port}").parse().unwrap();
    pair(&listener, &Dialer::new(address, Some(pki.local("b"))));
}

#[test]
fn peers_without_names_are_compared_by_key() {
    let pki = Pki::new();
    let server = pki.local("server");
    for address in authenticated() {
        let listener = listen(address, Some(server.clone()));
        let seen = |name: &str| {
            let identity = pki.nameless(name);
            let dialer = Dialer::new(listener.local_address().clone(), Some(identity));
            pair(&listener, &dialer).0.peer().clone()
        };
        let (a, again, b) = (seen("a"), seen("a"), seen("b"));
        assert!(a.tls && a.is_same_as(&again), "{address}: {a} {again}");
        assert!(!a.is_same_as(&b), "{address}: {a} {b}");
        assert!(a.names[0].starts_with("key:sha256:"), "{a}");
    }
}

/// Connects a client with its own TLS configuration, and returns the errors of both sides.
fn meet(listener: &Listener, client: ClientConfig) -> (TransportError, TransportError) {
    let Address::Tls { port, .. } = listener.local_address().clone() else { unreachable!() };
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept().unwrap().unwrap().handshake(TIMEOUT));
        let stream = Arc::new(Stream::Tcp(TcpStream::connect(("127.0.0.1", port)).unwrap()));
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let connection = ClientConnection::new(Arc::new(client), name).unwrap().into();
        let dialed = shake_hands(&stream, connection, ALPN, "the server", TIMEOUT);
        // In TLS 1.3, a client learns that it was rejected only when it first reads.
        let dialed = dialed.and_then(|connection| {
            let session = TlsSession::new(stream, connection);
            let peer = session.peer("the server".into());
            let (mut reader, _writer) = Channel::new(Tls(Arc::new(session)), peer).split();
            let read = reader.read_exact(&mut [0; 5]);
            read.map_err(|error| TransportError::from_io(error, "the server"))
        });
        (accepted.join().unwrap().unwrap_err(), dialed.unwrap_err())
    })
}

#[test]
fn other_protocol_inside_tls_is_refused() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let good = pki.local("b");
    for (protocols, client_says) in
        [(vec![b"h2".to_vec()], "not vmferry's protocol inside"), (vec![], "")]
    {
        let mut config = (*good.client_config(b"h2", None)).clone();
        config.alpn_protocols = protocols;
        let (accepted, dialed) = meet(&listener, config);
        assert!(accepted.to_string().contains("not vmferry's protocol inside"), "{accepted:?}");
        assert!(dialed.to_string().contains(client_says), "{dialed:?}");
    }
}

#[test]
fn client_without_certificate_is_refused() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let mut bare = ClientConfig::builder_with_provider(Arc::new(
        rustls::crypto::aws_lc_rs::default_provider(),
    ))
    .with_protocol_versions(&[&rustls::version::TLS13])
    .unwrap()
    .with_root_certificates({
        let mut roots = rustls::RootCertStore::empty();
        let path = pki.directory.path().join("ca/ca.pem");
        roots.add(CertificateDer::from_pem_file(path).unwrap()).unwrap();
        roots
    })
    .with_no_client_auth();
    bare.alpn_protocols = vec![ALPN.to_vec()];
    let (accepted, dialed) = meet(&listener, bare);
    assert!(matches!(accepted, TransportError::NoCertificate { .. }), "{accepted:?}");
    assert!(dialed.to_string().contains("none was sent"), "{dialed:?}");
}

#[test]
fn files_are_checked_and_never_overwritten() {
    let pki = Pki::new();
    pki.local("a");
    let host = pki.directory.path().join("a");
    let ca = pki.directory.path().join("ca");
    let request = IssueRequest::new("a", Validity::days(1));
    let error = pki::issue(&ca, &host, &request).unwrap_err().to_string();
    assert!(error.contains("host.key: already exists"), "{error}");
    let error = pki::init(&ca, "x", Validity::days(1)).unwrap_err().to_string();
    assert!(error.contains("ca.key: already exists"), "{error}");

    let key = host.join("host.key");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o640)).unwrap();
    let error = load(&host).unwrap_err().to_string();
    assert!(error.contains("chmod 600"), "{error}");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    load(&host).unwrap();
    let other = Pki::new();
    other.local("a");
    let strange = other.directory.path().join("a/host.pem");
    let error = TlsIdentity::load(&host.join("ca.pem"), &strange, &key).unwrap_err().to_string();
    assert!(error.contains("does not fit the key"), "{error}");
    let plain = std::fs::read(&key).unwrap();
    for (kind, header) in
        [("ENCRYPTED PRIVATE KEY", ""), ("RSA PRIVATE KEY", "Proc-Type: 4,ENCRYPTED\n")]
    {
        let text = format!("-----BEGIN {kind}-----\n{header}AAECAw==\n-----END {kind}-----\n");
        std::fs::write(&key, text).unwrap();
        let error = load(&host).unwrap_err().to_string();
        assert!(error.contains("openssl pkey -in"), "{error}");
    }
    std::fs::write(&key, plain).unwrap();
    std::fs::write(host.join("host.pem"), "garbage").unwrap();
    let error = load(&host).unwrap_err().to_string();
    assert!(error.contains("host.pem: holds no certificate"), "{error}");
    std::fs::remove_file(host.join("ca.pem")).unwrap();
    let error = load(&host).unwrap_err().to_string();
    assert!(error.contains("ca.pem: can't be read"), "{error}");
}

#[test]
fn issue_refuses_invalid_requests() {
    let pki = Pki::new();
    let ca = pki.directory.path().join("ca");
    let out = pki.directory.path().join("out");
    for (name, validity, expected) in [
        ("", Validity::days(1), "is not a valid name"),
        ("..", Validity::days(1), "is not a valid name"),
        ("a/b", Validity::days(1), "is not a valid name"),
        ("a", Validity::days(u32::MAX), "fewer days"),
        ("a", Validity { from_days: i64::MIN, until_days: 1 }, "fewer days"),
        ("a", Validity { from_days: 2, until_days: 1 }, "before it begins"),
    ] {
        let request = IssueRequest::new(name, validity);
        let error = pki::issue(&ca, &out, &request).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!out.exists(), "no file may remain");
    }
}

/// Made by `openssl x509 -req` without extensions.
#[test]
fn certificate_of_version_1_is_named_as_such() {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("ca.pem", include_str!("version-1/ca.pem")),
        ("host.pem", include_str!("version-1/host.pem")),
        ("host.key", include_str!("version-1/host.key")),
    ] {
        std::fs::write(directory.path().join(name), text).unwrap();
    }
    let key = directory.path().join("host.key");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    let error = load(directory.path()).unwrap_err().to_string();
    assert!(error.contains("X.509 certificate of version 1"), "{error}");
}
