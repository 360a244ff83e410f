//! Who this host is, and whom it trusts.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::error::TransportError;

/// The application protocol that both sides must name: a TLS port of something else is noticed.
pub(crate) const ALPN: &[u8] = b"vmferry/1";

/// A certificate with its key, and the authorities that peers must have theirs from.
#[derive(Clone)]
pub struct TlsIdentity {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

impl fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsIdentity")
    }
}

impl TlsIdentity {
    /// Reads PEM files: the authorities' certificates, this host's chain, and its key, which
    /// nobody but its owner may read.
    ///
    /// # Errors
    /// [`TransportError::File`] with the file and what is wrong with it.
    pub fn load(ca: &Path, certificate: &Path, key: &Path) -> Result<Self, TransportError> {
        let problem =
            |path: &Path, problem: String| TransportError::File { path: path.to_owned(), problem };
        let authorities = certificates(ca)?;
        let chain = certificates(certificate)?;
        // What is checked is what is read.
        let mut file = File::open(key).map_err(|error| unreadable(key, &error))?;
        let mode = file.metadata().map_err(|error| unreadable(key, &error))?.mode();
        if mode & 0o077 != 0 {
            let text = format!("others can read this private key: chmod 600 {}", key.display());
            return Err(problem(key, text));
        }
        let private = PrivateKeyDer::from_pem_reader(&mut file)
            .map_err(|error| problem(key, format!("holds no private key in PEM form: {error}")))?;
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority).map_err(|error| {
                problem(ca, format!("holds a certificate that is no authority's: {error}"))
            })?;
        }
        let roots = Arc::new(roots);
        let unusable = |error: rustls::Error| {
            problem(certificate, format!("does not fit the key {}: {error}", key.display()))
        };
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let versions = [&rustls::version::TLS13];
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&versions)
            .map_err(unusable)?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), private.clone_key())
            .map_err(unusable)?;
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.resumption = rustls::client::Resumption::disabled();
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|error| problem(ca, format!("holds no usable authority: {error}")))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)
            .map_err(unusable)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, private)
            .map_err(unusable)?;
        server.alpn_protocols = vec![ALPN.to_vec()];
        // A session is never resumed: each channel shows its certificate.
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TransportError> {
    let bytes = std::fs::read(path).map_err(|error| unreadable(path, &error))?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|error| TransportError::File {
        path: path.to_owned(),
        problem: format!("is damaged: {error}"),
    })?;
    if found.is_empty() {
        let problem = "holds no certificate in PEM form: make one with `vmferry pki`".into();
        return Err(TransportError::File { path: path.to_owned(), problem });
    }
    Ok(found)
}

fn unreadable(path: &Path, error: &io::Error) -> TransportError {
    TransportError::File { path: path.to_owned(), problem: format!("can't be read: {error}") }
}

/// The names in a certificate: URIs (SPIFFE) first, then DNS names and IP addresses.
pub(crate) fn names_of(certificate: &CertificateDer<'_>) -> Vec<String> {
    use x509_parser::extensions::GeneralName;
    let Ok((_, parsed)) = x509_parser::parse_x509_certificate(certificate) else {
        return Vec::new();
    };
    let Ok(Some(names)) = parsed.subject_alternative_name() else { return Vec::new() };
    let (mut uris, mut others) = (Vec::new(), Vec::new());
    for name in &names.value.general_names {
        match name {
            GeneralName::URI(uri) => uris.push((*uri).to_owned()),
            GeneralName::DNSName(name) => others.push((*name).to_owned()),
            GeneralName::IPAddress([a, b, c, d]) => others.push(format!("{a}.{b}.{c}.{d}")),
            GeneralName::IPAddress(bytes) => {
                if let Ok(octets) = <[u8; 16]>::try_from(*bytes) {
                    others.push(std::net::Ipv6Addr::from(octets).to_string());
                }
            }
            _ => {}
        }
    }
    uris.append(&mut others);
    uris
}
