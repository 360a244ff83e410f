//! Who this host is, and whom it trusts: certificates that are looked at anew for each connection.
//!
//! A certificate that is renewed, an authority that is added and a revocation list that is published count
//! for the next channel, without a restart. A set of files that does not work (half of a renewal, a typing
//! error) is told once and changes nothing: the set that worked stays in use until the files are right.

mod files;
mod names;
mod verify;

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

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
pub use self::names::{names_of, next_update_of, validity_of};
use self::verify::{ExpectedUri, Tolerant};
use crate::error::TransportError;
use crate::stamp::FileStamp;

/// The application protocol that both sides must name: a TLS port of something else is noticed.
pub(crate) const ALPN: &[u8] = b"vmferry/1";

/// Whoever is told that changed files were not taken, and when they are again.
type Teller = Box<dyn Fn(&str) + Send + Sync>;

/// A certificate with its key, the authorities that peers must have theirs from, and what those have revoked.
///
/// TLS 1.3 only, both sides with certificates, X25519MLKEM768 preferred for the exchange of keys. A session is
/// never resumed: each channel shows its certificate.
pub struct TlsIdentity {
    files: IdentityFiles,
    state: Mutex<State>,
    teller: Mutex<Option<Teller>>,
}

struct State {
    /// The files as they were when they were last read.
    seen: Vec<Option<FileStamp>>,
    /// Made of the last set that works.
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
        // Where the key is, and nothing of it.
        f.debug_struct("TlsIdentity").field("files", &self.files).finish_non_exhaustive()
    }
}

impl TlsIdentity {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TransportError::File`] with the file, what is wrong with it and what to do.
    pub fn new(files: IdentityFiles) -> Result<Self, TransportError> {
        Self::new_opened(files, &[])
    }

    /// [`new`](Self::new) for a process that may not open the files itself: each is read from the descriptor that came
    /// with its path. What is not among them is opened, as every file is once it has changed.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn new_opened(
        files: IdentityFiles,
        opened: &[(PathBuf, File)],
    ) -> Result<Self, TransportError> {
        // Looked at before it is read: a change in between is seen the next time.
        let seen = files.stamps();
        let configurations = configurations(&files.read(false, opened)?, &files)?;
        let state = State { seen, configurations };
        Ok(Self { files, state: Mutex::new(state), teller: Mutex::new(None) })
    }

    /// [`new`](Self::new) without revocation lists and with the usual clock skew.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn load(ca: &Path, certificate: &Path, key: &Path) -> Result<Self, TransportError> {
        Self::new(IdentityFiles::new(ca, certificate, key))
    }

    /// Tells `teller` from now on, in a line each, when files have changed: that they are in use, or why they
    /// are not. It is called on the thread that connects or accepts, and must not wait.
    pub fn tell(&self, teller: impl Fn(&str) + Send + Sync + 'static) {
        *self.teller.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(teller));
    }

    /// What a client of `protocol` (an ALPN name) uses for its next connection: the files as they are now. With
    /// `destination` the server must have that URI in its certificate, and then needs no other name.
    ///
    /// Costs a `stat` of each file, and reads them when one has changed.
    #[must_use]
    pub fn client_config(&self, protocol: &[u8], destination: Option<&str>) -> Arc<ClientConfig> {
        let current = self.current();
        let mut config = (*current.client).clone();
        config.alpn_protocols = vec![protocol.to_vec()];
        if let Some(uri) = destination {
            let verifier = ExpectedUri::new(current.verifier, uri);
            config.dangerous().set_certificate_verifier(Arc::new(verifier));
        }
        Arc::new(config)
    }

    /// What a server of `protocol` (an ALPN name) uses for the connection that has just been accepted; as
    /// [`client_config`](Self::client_config).
    #[must_use]
    pub fn server_config(&self, protocol: &[u8]) -> Arc<ServerConfig> {
        let current = self.current();
        let mut config = (*current.server).clone();
        config.alpn_protocols = vec![protocol.to_vec()];
        Arc::new(config)
    }

    fn current(&self) -> Configurations {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let said = self.renew(&mut state);
        let current = state.configurations.clone();
        drop(state);
        if let Some(said) = said
            && let Some(teller) = &*self.teller.lock().unwrap_or_else(PoisonError::into_inner)
        {
            teller(&said);
        }
        current
    }

    /// Takes changed files if they work; what there is to say about it.
    fn renew(&self, state: &mut State) -> Option<String> {
        let seen = self.files.stamps();
        if seen == state.seen {
            return None;
        }
        // The same set is judged once, whatever comes of it.
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
                "the certificates have changed and are not usable, so the old ones stay in use: {error}"
            )),
        }
    }
}

fn configurations(
    contents: &Contents,
    files: &IdentityFiles,
) -> Result<Configurations, TransportError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    // The first random number of a process costs 20 ms (it collects the processor's jitter): better now than in the first
    // handshake, for which a guest's source waits. One that fails, fails there too, and is told then.
    let _ = provider.secure_random.fill(&mut [0]);
    let versions = [&rustls::version::TLS13];
    let unusable = |error: rustls::Error| {
        IdentityFiles::problem(
            &files.certificate,
            format!("does not fit the key {}: {error}", files.key.display()),
        )
    };
    let bad_trust = |error: rustls::server::VerifierBuilderError| files.bad_trust(&error);

    // A list says something about its own authority's certificates only, so the status of another authority's
    // is unknown by right. One that is out of date says nothing, and nobody gets in on it.
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
    let servers: Arc<dyn ServerCertVerifier> = Arc::new(Tolerant::new(servers, files.clock_skew));
    let clients = Arc::new(Tolerant::new(clients, files.clock_skew));

    // By hand, since rustls keeps no key longer than it needs it, and overwrites none.
    let key = any_supported_type(&contents.key).map_err(unusable)?;
    let own = CertifiedKey::new(contents.chain.clone(), key);
    match own.keys_match() {
        // That a library can't tell its public key is no difference.
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
