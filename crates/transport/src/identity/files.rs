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
use crate::secret::{self, SecretKey};
use crate::stamp::FileStamp;

/// Longest file that is read: thousands of certificates, or a list of a hundred thousand revoked ones.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// How far two hosts' clocks may differ by default. Kerberos tolerates as much between hosts, and Kubernetes'
/// signers backdate what they issue by as much; what TLS libraries do by themselves, nothing, refuses
/// a certificate that was issued a second ago by a clock that goes ahead.
const CLOCK_SKEW: Duration = Duration::from_secs(300);

/// Where a host's certificate is, its key, and whom it trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityFiles {
    /// Certificates of the authorities that peers must have theirs from (PEM).
    pub ca: PathBuf,
    /// This host's chain, its own certificate first (PEM).
    pub certificate: PathBuf,
    /// Its key (PEM), which nobody but its owner may read. From a pipe it is read once, and then nothing is renewed.
    pub key: PathBuf,
    /// Revocation lists of the authorities (PEM). Of an authority that has none, every certificate counts that
    /// is in date; of one that has some the newest counts, and one that is out of date refuses everybody.
    pub revocations: Vec<PathBuf>,
    /// Another revocation list, which need not be there; once it was, it must be.
    pub revocations_if_present: Option<PathBuf>,
    /// How far out of date a certificate or revocation list may be, for clocks that differ. Default 5 min.
    pub clock_skew: Duration,
}

/// What the files say.
pub struct Contents {
    pub authorities: Arc<RootCertStore>,
    pub chain: Vec<CertificateDer<'static>>,
    pub key: SecretKey,
    /// Newest first, since the first one of an authority is the one that counts.
    pub revocations: Vec<CertificateRevocationListDer<'static>>,
}

impl IdentityFiles {
    /// No revocation lists, and the usual clock skew.
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

    /// `ca.pem`, `host.pem` and `host.key` of a directory as [`pki`](crate::pki) makes it, and `crl.pem` if it
    /// is there.
    #[must_use]
    pub fn in_directory(directory: &Path) -> Self {
        let file = |name| directory.join(name);
        let mut files = Self::new(&file("ca.pem"), &file("host.pem"), &file("host.key"));
        files.revocations_if_present = Some(file("crl.pem"));
        files
    }

    /// How each file is now; none if it can't be looked at.
    pub fn stamps(&self) -> Vec<Option<FileStamp>> {
        self.paths().map(FileStamp::of).collect()
    }

    /// Whether they can be read once more. A pipe has nothing more to say, and would be waited for.
    pub fn can_be_read_again(&self) -> bool {
        let is_other = |path| std::fs::metadata(path).is_ok_and(|found| !found.is_file());
        !self.paths().any(is_other)
    }

    /// All of them, in the order in which [`TlsIdentity::new_opened`](crate::TlsIdentity::new_opened) may be given them;
    /// the one that need not be there comes last.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        [&self.ca, &self.certificate, &self.key]
            .into_iter()
            .chain(&self.revocations)
            .chain(&self.revocations_if_present)
            .map(PathBuf::as_path)
    }

    /// Reads and checks everything. `revoked_before`: there was a revocation list already, so the one that
    /// need not be there must. Files that are `opened` already are not opened.
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
                let text = format!("holds a certificate that is no authority's: {error}");
                Self::problem(&self.ca, text)
            })?;
        }
        let mut lists = Vec::new();
        for path in &self.revocations {
            lists.append(&mut revocation_lists(path, opened)?);
        }
        if let Some(path) = &self.revocations_if_present {
            // What must be there is in the other list; a list never goes away by itself.
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
        // What is checked is what is read.
        let path = &self.key;
        let file = open(path, opened).map_err(|error| unreadable(path, &error))?;
        let mode = file.metadata().map_err(|error| unreadable(path, &error))?.mode();
        if mode & 0o077 != 0 {
            let text = format!("others can read this private key: chmod 600 {}", path.display());
            return Err(Self::problem(path, text));
        }
        let pem = secret::read(file, MAX_FILE_BYTES).map_err(|error| unreadable(path, &error))?;
        secret::from_pem(&pem)
            .ok_or_else(|| Self::problem(path, "holds no private key in PEM form".into()))
    }

    /// An authority or a list that can't be used.
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

/// The certificates in a file's text (PEM).
///
/// # Errors
/// What is wrong with the file, as the end of a sentence about it.
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

/// The revocation lists in a file's text (PEM), each with the second of its issue.
///
/// # Errors
/// What is wrong with the file, as the end of a sentence about it.
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

/// Opens a file, or begins at the beginning of one that somebody has opened.
fn open(path: &Path, opened: &[(PathBuf, File)]) -> io::Result<File> {
    match opened.iter().find(|(name, _)| name == path) {
        Some((_, file)) => {
            let mut file = file.try_clone()?;
            // A pipe has no beginning to go back to, and gives what it has once.
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
