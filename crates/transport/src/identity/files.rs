//! The files of an identity.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use rustls::server::VerifierBuilderError;

use crate::error::TransportError;
use crate::file_version::FileVersion;
use crate::secret::{self, SecretKey};

/// Maximum file size: thousands of certificates, or a hundred thousand revoked ones.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Default tolerance for clock differences between hosts. Kerberos uses the same value, and so do
/// Kubernetes' signers when they backdate certificates. Without tolerance, a host whose clock is
/// behind rejects a certificate that was just issued.
const CLOCK_SKEW: Duration = Duration::from_secs(300);

/// The paths of a host's certificate and key, and of the authorities that it trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityFiles {
    /// Certificates of the trusted authorities (PEM).
    pub ca: PathBuf,
    /// This host's certificate chain, its own certificate first (PEM).
    pub certificate: PathBuf,
    /// This host's key (PEM), which only its owner may read. A key from a pipe is read once, and
    /// then no file is reloaded.
    pub key: PathBuf,
    /// Revocation lists of the authorities (PEM). If an authority has no list, all of its valid
    /// certificates are accepted. If it has several, the newest counts. An outdated list rejects
    /// every certificate of its authority.
    pub revocations: Vec<PathBuf>,
    /// Another revocation list, which may be missing until it has been read once.
    pub revocations_if_present: Option<PathBuf>,
    /// How long a certificate or list may be accepted before or after its validity, to allow for
    /// clock differences. Default 5 min.
    pub clock_skew: Duration,
}

/// The content of the files.
pub struct Contents {
    pub authorities: Arc<RootCertStore>,
    pub chain: Vec<CertificateDer<'static>>,
    pub key: SecretKey,
    /// Newest first, because the first list of an authority is used.
    pub revocations: Vec<CertificateRevocationListDer<'static>>,
}

impl IdentityFiles {
    /// Files without revocation lists, with the default clock skew.
    #[must_use]
    pub fn new(ca: &Path, certificate: &Path, key: &Path) -> Self {
        Self {
            ca: ca.to_owned(),
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            revocations: Vec::new(),
            revocations_if_present: None,
            clock_skew: CLOCK_SKEW,
        }
    }

    /// `ca.pem`, `host.pem` and `host.key` in a directory that [`pki`](crate::pki) has created, and
    /// `crl.pem` if it exists.
    #[must_use]
    pub fn in_directory(directory: &Path) -> Self {
        let file = |name| directory.join(name);
        let mut files = Self::new(&file("ca.pem"), &file("host.pem"), &file("host.key"));
        files.revocations_if_present = Some(file("crl.pem"));
        files
    }

    /// The current version of each file; `None` if it cannot be read.
    pub fn versions(&self) -> Vec<Option<FileVersion>> {
        self.paths().map(FileVersion::of).collect()
    }

    /// Whether the files can be read again. A pipe cannot, and reading it would block.
    pub fn can_be_read_again(&self) -> bool {
        let is_other = |path| std::fs::metadata(path).is_ok_and(|found| !found.is_file());
        !self.paths().any(is_other)
    }

    /// All paths, in the order for [`TlsIdentity::new_opened`](crate::TlsIdentity::new_opened). The
    /// optional file is last.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        [&self.ca, &self.certificate, &self.key]
            .into_iter()
            .chain(&self.revocations)
            .chain(&self.revocations_if_present)
            .map(PathBuf::as_path)
    }

    /// Reads and checks all files. If `revoked_before`, a revocation list was in use before, so the
    /// optional list must exist. Files in `opened` are read from their descriptors.
    pub fn read(
        &self,
        revoked_before: bool,
        opened: &[(PathBuf, File)],
    ) -> Result<Contents, TransportError> {
        let authorities = certificates(&self.ca, opened)?;
        let chain = certificates(&self.certificate, opened)?;
        let key = self.read_key(opened)?;
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority).map_err(|error| {
                let text = format!("holds a certificate that is not an authority's: {error}");
                Self::problem(&self.ca, text)
            })?;
        }
        let mut lists = Vec::new();
        for path in &self.revocations {
            lists.append(&mut revocation_lists(path, opened)?);
        }
        if let Some(path) = &self.revocations_if_present {
            // A list in use never disappears legitimately. If `revocations` is not empty, those
            // lists must exist.
            let needed = revoked_before && self.revocations.is_empty();
            match revocation_lists(path, opened) {
                Err(_) if !needed && !path.exists() => {}
                other => lists.append(&mut other?),
            }
        }
        lists.sort_by_key(|(issued, _)| std::cmp::Reverse(*issued));
        let revocations = lists.into_iter().map(|(_, list)| list).collect();
        Ok(Contents { authorities: Arc::new(roots), chain, key, revocations })
    }

    fn read_key(&self, opened: &[(PathBuf, File)]) -> Result<SecretKey, TransportError> {
        // The mode of the open file is checked, so that the checked file is the one that is read.
        let path = &self.key;
        let file = open(path, opened).map_err(|error| unreadable(path, &error))?;
        let mode = file.metadata().map_err(|error| unreadable(path, &error))?.mode();
        if mode & 0o077 != 0 {
            let text =
                format!("other users can read this private key: chmod 600 {}", path.display());
            return Err(Self::problem(path, text));
        }
        let pem = secret::read(file, MAX_FILE_BYTES).map_err(|error| unreadable(path, &error))?;
        secret::from_pem(&pem).ok_or_else(|| {
            let text = if secret::is_encrypted(&pem) {
                format!(
                    "holds a private key that is encrypted with a password, and nobody is there to \
                     enter it: write the plain key into another file, with \
                     `(umask 077; openssl pkey -in {0} -out {0}.plain)`, and use that one",
                    path.display()
                )
            } else {
                "holds no private key in PEM form".into()
            };
            Self::problem(path, text)
        })
    }

    /// The error for an authority or a list that cannot be used.
    pub fn bad_trust(&self, error: &VerifierBuilderError) -> TransportError {
        let lists = self.revocations.iter().chain(&self.revocations_if_present);
        match error {
            VerifierBuilderError::InvalidCrl(_) => {
                let path = lists.map(|path| path.display().to_string()).collect::<Vec<_>>();
                let text = format!("holds a revocation list that can't be used: {error}");
                Self::problem(Path::new(&path.join(", ")), text)
            }
            _ => Self::problem(&self.ca, format!("holds no usable authority: {error}")),
        }
    }

    /// An error about one of the files.
    pub fn problem(path: &Path, problem: String) -> TransportError {
        TransportError::File { path: path.to_owned(), problem }
    }
}

fn certificates(
    path: &Path,
    opened: &[(PathBuf, File)],
) -> Result<Vec<CertificateDer<'static>>, TransportError> {
    let parsed = certificates_of(&read(path, opened)?);
    parsed.map_err(|problem| IdentityFiles::problem(path, problem))
}

/// The certificates in a PEM file.
///
/// # Errors
/// The problem, as the predicate of a sentence about the file.
pub fn certificates_of(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| format!("is damaged: {error}"))?;
    if found.is_empty() {
        return Err("holds no certificate in PEM form: make one with `vmferry pki`".into());
    }
    Ok(found)
}

fn revocation_lists(
    path: &Path,
    opened: &[(PathBuf, File)],
) -> Result<Vec<(i64, CertificateRevocationListDer<'static>)>, TransportError> {
    let parsed = revocation_lists_of(&read(path, opened)?);
    parsed.map_err(|problem| IdentityFiles::problem(path, problem))
}

/// The revocation lists in a PEM file, each with its issue time in seconds since 1970.
///
/// # Errors
/// The problem, as the predicate of a sentence about the file.
pub fn revocation_lists_of(
    pem: &[u8],
) -> Result<Vec<(i64, CertificateRevocationListDer<'static>)>, String> {
    let mut lists = Vec::new();
    for list in CertificateRevocationListDer::pem_slice_iter(pem) {
        let list = list.map_err(|error| format!("is damaged: {error}"))?;
        let issued = x509_parser::parse_x509_crl(&list)
            .map_err(|error| format!("holds a damaged revocation list: {error}"))?
            .1
            .last_update()
            .timestamp();
        lists.push((issued, list));
    }
    if lists.is_empty() {
        return Err(
            "holds no revocation list in PEM form: make one with `vmferry pki revoke`".into()
        );
    }
    Ok(lists)
}

/// Opens a file, or rewinds one that is already open.
fn open(path: &Path, opened: &[(PathBuf, File)]) -> io::Result<File> {
    match opened.iter().find(|(name, _)| name == path) {
        Some((_, file)) => {
            let mut file = file.try_clone()?;
            // A pipe cannot be rewound, and can be read once.
            if file.metadata()?.is_file() {
                file.rewind()?;
            }
            Ok(file)
        }
        None => File::open(path),
    }
}

fn read(path: &Path, opened: &[(PathBuf, File)]) -> Result<Vec<u8>, TransportError> {
    let mut bytes = Vec::new();
    open(path, opened)
        .and_then(|file| file.take(MAX_FILE_BYTES).read_to_end(&mut bytes))
        .map_err(|error| unreadable(path, &error))?;
    Ok(bytes)
}

fn unreadable(path: &Path, error: &io::Error) -> TransportError {
    TransportError::File { path: path.to_owned(), problem: format!("can't be read: {error}") }
}
