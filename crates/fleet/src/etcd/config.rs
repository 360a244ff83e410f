//! How etcd is reached.

use std::path::Path;

use vmferry_transport::{certificates_of, common_name_of};

use super::EtcdError;

/// How etcd is reached.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// The members' addresses, such as `https://etcd-1.example:2379`.
    pub endpoints: Vec<String>,
    /// The client's certificate; `None` for etcd without TLS.
    pub tls: Option<EtcdTls>,
}

/// PEM texts of a client that etcd authenticates.
#[derive(Clone)]
pub struct EtcdTls {
    pub(super) authority: Vec<u8>,
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
    /// The common name of the certificate.
    pub(super) user: Option<String>,
}

impl EtcdTls {
    /// Reads `ca.pem`, which etcd's certificates are checked with, and the client's `host.pem` and
    /// `host.key`.
    ///
    /// # Errors
    /// [`EtcdError::File`].
    pub fn read(directory: &Path) -> Result<Self, EtcdError> {
        let read = |name: &str| {
            let path = directory.join(name);
            std::fs::read(&path).map_err(|source| EtcdError::File { path, source })
        };
        let (authority, certificate) = (read("ca.pem")?, read("host.pem")?);
        // A file without a certificate is reported by the TLS library.
        let certificates = certificates_of(&certificate).unwrap_or_default();
        let user = certificates.first().and_then(|own| common_name_of(own));
        Ok(Self { authority, certificate, key: read("host.key")?, user })
    }
}

impl std::fmt::Debug for EtcdTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdTls")
            .field("user", &self.user)
            .field("key", &"(secret)")
            .finish_non_exhaustive()
    }
}
