//! Tests with real sockets and real TLS.

mod certificates;
mod flow;
mod given;
#[cfg(feature = "grpc")]
mod grpc;
mod reach;
mod trust;

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;

use crate::pki::{self, IssueRequest, Validity};
use crate::{Channel, Dialer, Listener, TlsIdentity, TransportError};

const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Pki {
    directory: TempDir,
}

impl Pki {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        pki::init(&directory.path().join("ca"), "test", Validity::days(10)).unwrap();
        Self { directory }
    }

    fn host(&self, name: &str, addresses: &[&str], validity: Validity) -> Arc<TlsIdentity> {
        let out = self.directory.path().join(name);
        let request = IssueRequest {
            name: name.into(),
            addresses: addresses.iter().map(|address| (*address).to_owned()).collect(),
            validity,
        };
        pki::issue(&self.directory.path().join("ca"), &out, &request).unwrap();
        Arc::new(load(&out).unwrap())
    }

    /// A host whose certificate has only a common name.
    fn nameless(&self, name: &str) -> Arc<TlsIdentity> {
        let out = self.directory.path().join(format!("nameless-{name}"));
        if !out.exists() {
            let ca = self.directory.path().join("ca");
            let read = |name: &str| std::fs::read_to_string(ca.join(name)).unwrap();
            let authority = rcgen::KeyPair::from_pem(&read("ca.key")).unwrap();
            let issuer = rcgen::Issuer::from_ca_cert_pem(&read("ca.pem"), authority).unwrap();
            let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
            params.distinguished_name.push(rcgen::DnType::CommonName, name);
            params.extended_key_usages = vec![
                rcgen::ExtendedKeyUsagePurpose::ClientAuth,
                rcgen::ExtendedKeyUsagePurpose::ServerAuth,
            ];
            let key = rcgen::KeyPair::generate().unwrap();
            let certificate = params.signed_by(&key, &issuer).unwrap();
            std::fs::create_dir(&out).unwrap();
            std::fs::write(out.join("ca.pem"), read("ca.pem")).unwrap();
            std::fs::write(out.join("host.pem"), certificate.pem()).unwrap();
            let mut options = std::fs::OpenOptions::new();
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            let mut file = options.write(true).create_new(true).open(out.join("host.key")).unwrap();
            file.write_all(key.serialize_pem().as_bytes()).unwrap();
        }
        Arc::new(load(&out).unwrap())
    }

    pub(crate) fn local(&self, name: &str) -> Arc<TlsIdentity> {
        self.host(name, &["127.0.0.1", "localhost"], Validity::days(1))
    }

    /// A host that trusts this authority and has a certificate of another one.
    #[cfg(feature = "grpc")]
    pub(crate) fn stranger(&self) -> TlsIdentity {
        let other = Self::new();
        other.local("stranger");
        let theirs = other.directory.path().join("stranger");
        let ca = self.directory.path().join("ca/ca.pem");
        TlsIdentity::load(&ca, &theirs.join("host.pem"), &theirs.join("host.key")).unwrap()
    }
}

fn load(directory: &Path) -> Result<TlsIdentity, TransportError> {
    TlsIdentity::load(
        &directory.join("ca.pem"),
        &directory.join("host.pem"),
        &directory.join("host.key"),
    )
}

/// The schemes with authenticated peers.
fn authenticated() -> &'static [&'static str] {
    if cfg!(feature = "grpc") {
        &["tls:127.0.0.1:0", "grpc:127.0.0.1:0", "grpc-ack:127.0.0.1:0"]
    } else {
        &["tls:127.0.0.1:0"]
    }
}

pub(crate) fn listen(address: &str, tls: Option<Arc<TlsIdentity>>) -> Listener {
    Listener::bind(&address.parse().unwrap(), tls).unwrap()
}

/// A listener of host `a` and a dialer of host `b`, which share a CA if the scheme authenticates.
fn ends(address: &str) -> (Listener, Dialer) {
    let pki = authenticated().contains(&address).then(Pki::new);
    let identity = |name| pki.as_ref().map(|pki| pki.local(name));
    let listener = listen(address, identity("a"));
    let dialer = Dialer::new(listener.local_address().clone(), identity("b"));
    (listener, dialer)
}

/// Connects both ends, and returns each side's result.
fn join(
    listener: &Listener,
    dialer: &Dialer,
) -> (Result<Channel, TransportError>, Result<Channel, TransportError>) {
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept().unwrap().unwrap().handshake(TIMEOUT));
        let dialed = dialer.connect();
        // In TLS 1.3, a client learns of its rejected certificate only when it first reads.
        let dialed = dialed.and_then(|channel| {
            let peer = channel.peer().address.clone();
            let (mut reader, mut writer) = channel.split();
            let greeted = writer.write_all(b"hello").and_then(|()| reader.read_exact(&mut [0; 5]));
            drop((reader, writer));
            greeted.map_err(|error| TransportError::from_io(error, &peer))?;
            dialer.connect()
        });
        let accepted = accepted.join().unwrap().and_then(|channel| {
            let (mut reader, mut writer) = channel.split();
            let _ = reader.read_exact(&mut [0; 5]).and_then(|()| writer.write_all(b"hello"));
            listener.accept().unwrap().unwrap().handshake(TIMEOUT)
        });
        (accepted, dialed)
    })
}

/// A connected pair: the accepted and the dialed channel.
fn pair(listener: &Listener, dialer: &Dialer) -> (Channel, Channel) {
    std::thread::scope(|scope| {
        let accepted =
            scope.spawn(|| listener.accept().unwrap().unwrap().handshake(TIMEOUT).unwrap());
        let dialed = dialer.connect().unwrap();
        (accepted.join().unwrap(), dialed)
    })
}

fn bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}
