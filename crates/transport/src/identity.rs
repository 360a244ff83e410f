//! This host's identity and the authorities that it trusts. The certificate files are checked for
//! changes at each connection.
//!
//! A renewed certificate, a new authority or a new revocation list applies to the next channel,
//! without a restart. If the changed files do not work together (a renewal is half done, or a file
//! has a mistake), that is reported once, and the last working set stays in use until the files are
//! right.

mod files;
mod names;
mod verify;

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, InconsistentKeys, ServerConfig};

use self::files::Contents;
pub use self::files::IdentityFiles;
pub use self::files::{certificates_of, revocation_lists_of};
pub(crate) use self::names::names_or_key_of;
pub use self::names::{common_name_of, names_of, next_update_of, validity_of};
use self::verify::{SkewTolerantVerifier, UriVerifier};
use crate::error::TransportError;
use crate::file_version::FileVersion;

/// The application protocol that both sides must name, so that a TLS port of another service is
/// detected.
pub(crate) const ALPN: &[u8] = b"vmferry/1";

/// Receives a line when changed files are in use, or why they are not.
type ChangeObserver = Box<dyn Fn(&str) + Send + Sync>;

/// This host's certificate and key, the trusted authorities and their revocation lists.
///
/// TLS 1.3 only, with certificates on both sides. X25519MLKEM768 is the preferred key exchange.
/// Sessions are never resumed: both sides present their certificates on each channel.
pub struct TlsIdentity {
    files: IdentityFiles,
    state: Mutex<State>,
    observer: Mutex<Option<ChangeObserver>>,
}

struct State {
    /// The versions of the files when they were last read.
    seen: Vec<Option<FileVersion>>,
    /// Built from the last working set of files.
    configurations: Configurations,
}

#[derive(Clone)]
struct Configurations {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    verifier: Arc<dyn ServerCertVerifier>,
    has_revocations: bool,
}

impl fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The paths of the files. Never print the key.
        f.debug_struct("TlsIdentity").field("files", &self.files).finish_non_exhaustive()
    }
}

impl TlsIdentity {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TransportError::File`] with the file, the problem and what to do.
    pub fn new(files: IdentityFiles) -> Result<Self, TransportError> {
        Self::new_opened(files, &[])
    }

    /// Like [`new`](Self::new), for a process that may not open the files itself: each file is read
    /// from the descriptor given for its path. Files that are not in `opened` are opened by path,
    /// and so is every file after a change.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn new_opened(
        files: IdentityFiles,
        opened: &[(PathBuf, File)],
    ) -> Result<Self, TransportError> {
        // Taken before the files are read, so that a change in between is noticed next time.
        let seen = files.versions();
        let configurations = configurations(&files.read(false, opened)?, &files)?;
        let state = State { seen, configurations };
        Ok(Self { files, state: Mutex::new(state), observer: Mutex::new(None) })
    }

    /// Like [`new`](Self::new), without revocation lists and with the default clock skew.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn load(ca: &Path, certificate: &Path, key: &Path) -> Result<Self, TransportError> {
        Self::new(IdentityFiles::new(ca, certificate, key))
    }

    /// Calls `observer` with a line of text when files have changed: that they are in use, or why
    /// not. The call happens on the thread that connects or accepts, and must not block.
    pub fn on_change(&self, observer: impl Fn(&str) + Send + Sync + 'static) {
        *self.observer.lock() = Some(Box::new(observer));
    }

    /// The configuration for the next client connection of `protocol` (an ALPN name), from the
    /// current files. With `destination`, the server's certificate must have that URI and needs no
    /// other name.
    ///
    /// Costs a `stat` of each file, and reads the files if one has changed.
    #[must_use]
    pub fn client_config(&self, protocol: &[u8], destination: Option<&str>) -> Arc<ClientConfig> {
        let current = self.current();
        let mut config = (*current.client).clone();
        config.alpn_protocols = vec![protocol.to_vec()];
        if let Some(uri) = destination {
            let verifier = UriVerifier::new(current.verifier, uri);
            config.dangerous().set_certificate_verifier(Arc::new(verifier));
        }
        Arc::new(config)
    }

    /// The configuration for a server connection of `protocol` (an ALPN name) that was just
    /// accepted; see [`client_config`](Self::client_config).
    #[must_use]
    pub fn server_config(&self, protocol: &[u8]) -> Arc<ServerConfig> {
        let current = self.current();
        let mut config = (*current.server).clone();
        config.alpn_protocols = vec![protocol.to_vec()];
        Arc::new(config)
    }

    fn current(&self) -> Configurations {
        let mut state = self.state.lock();
        let report = self.renew(&mut state);
        let current = state.configurations.clone();
        drop(state);
        if let Some(report) = report
            && let Some(observer) = &*self.observer.lock()
        {
            observer(&report);
        }
        current
    }

    /// Uses changed files if they work. Returns the report for the observer.
    fn renew(&self, state: &mut State) -> Option<String> {
        let seen = self.files.versions();
        if seen == state.seen {
            return None;
        }
        // Each set of files is tried once, whatever the result.
        state.seen = seen;
        if !self.files.can_be_read_again() {
            return None;
        }
        let fresh = self
            .files
            .read(state.configurations.has_revocations, &[])
            .and_then(|contents| configurations(&contents, &self.files));
        match fresh {
            Ok(fresh) => {
                state.configurations = fresh;
                Some("the certificates have changed, and new channels use the new ones".into())
            }
            Err(error) => Some(format!(
                "the certificates have changed and are not usable, so the old ones stay in use: \
                {error}"
            )),
        }
    }
}

/// Whether a certificate was refused because of its version. rustls passes the reason on as that of
/// webpki, which has no public type.
fn is_of_version_1(error: &rustls::Error) -> bool {
    error.to_string().contains("UnsupportedCertVersion")
}

fn configurations(
    contents: &Contents,
    files: &IdentityFiles,
) -> Result<Configurations, TransportError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    // The first random number of a process costs 20 ms, because AWS-LC collects jitter entropy.
    // Spend them now and not in the first handshake, which a migration waits for. An error here
    // will occur again in the handshake and be reported there.
    let _ = provider.secure_random.fill(&mut [0]);
    let versions = [&rustls::version::TLS13];
    let unusable = |error: rustls::Error| {
        let text = if is_of_version_1(&error) {
            "is an X.509 certificate of version 1, which has no names that a peer could check: \
             issue one of version 3, for `openssl x509 -req` with `-extfile` and a subjectAltName"
                .to_owned()
        } else {
            format!("does not fit the key {}: {error}", files.key.display())
        };
        IdentityFiles::problem(&files.certificate, text)
    };
    let bad_trust = |error: rustls::server::VerifierBuilderError| files.bad_trust(&error);

    // A list covers only its own authority's certificates, so the status of other authorities'
    // certificates is unknown. An outdated list is an error: it must not admit anyone.
    let servers = WebPkiServerVerifier::builder_with_provider(
        Arc::clone(&contents.authorities),
        Arc::clone(&provider),
    )
    .with_crls(contents.revocations.iter().cloned())
    .allow_unknown_revocation_status()
    .enforce_revocation_expiration()
    .build()
    .map_err(bad_trust)?;
    let clients = WebPkiClientVerifier::builder_with_provider(
        Arc::clone(&contents.authorities),
        Arc::clone(&provider),
    )
    .with_crls(contents.revocations.iter().cloned())
    .allow_unknown_revocation_status()
    .enforce_revocation_expiration()
    .build()
    .map_err(bad_trust)?;
    let servers: Arc<dyn ServerCertVerifier> =
        Arc::new(SkewTolerantVerifier::new(servers, files.clock_skew));
    let clients = Arc::new(SkewTolerantVerifier::new(clients, files.clock_skew));

    // Built by hand from the key file's own buffer, because the builders of rustls copy the key and
    // do not overwrite the copy.
    let key = any_supported_type(&contents.key).map_err(unusable)?;
    let own = CertifiedKey::new(contents.chain.clone(), key);
    match own.keys_match() {
        // `Unknown` means that the library cannot compute the public key.
        Ok(()) | Err(rustls::Error::InconsistentKeys(InconsistentKeys::Unknown)) => {}
        Err(error) => return Err(unusable(error)),
    }
    let own = Arc::new(SingleCertAndKey::from(own));

    let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&versions)
        .map_err(unusable)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(&servers))
        .with_client_cert_resolver(own.clone());
    client.alpn_protocols = vec![ALPN.to_vec()];
    client.resumption = rustls::client::Resumption::disabled();
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions)
        .map_err(unusable)?
        .with_client_cert_verifier(clients)
        .with_cert_resolver(own);
    server.alpn_protocols = vec![ALPN.to_vec()];
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    Ok(Configurations {
        client: Arc::new(client),
        server: Arc::new(server),
        verifier: servers,
        has_revocations: !contents.revocations.is_empty(),
    })
}
