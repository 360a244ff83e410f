//! A small certificate authority for mutual TLS between hosts.
//!
//! Keys are ECDSA P-256. A host's certificate has a SPIFFE URI, DNS names and IP addresses, and is
//! valid for clients and servers. The authority keeps a copy of each certificate that it issues,
//! which revocation needs. Existing files are never overwritten, except the revocation list.

mod revoke;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use time::OffsetDateTime;
use zeroize::Zeroizing;

pub use self::revoke::{RevocationList, revoke};
use crate::error::TransportError;
use crate::secret;

/// Maximum size of a key file. An RSA key of 16,384 bits takes a fifth of this.
const MAX_KEY_BYTES: u64 = 64 << 10;

/// The validity of a certificate, in days from now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// Days until the validity begins; negative for the past.
    pub from_days: i64,
    /// Days until the validity ends; negative for the past.
    pub until_days: i64,
}

impl Validity {
    /// Valid for `days` days, and from yesterday, to allow for clock differences.
    #[must_use]
    pub fn days(days: u32) -> Self {
        Self { from_days: -1, until_days: days.into() }
    }
}

/// The content of a host's certificate.
#[derive(Clone, Debug)]
pub struct IssueRequest {
    /// The host's name, made of ASCII letters, digits, `-`, `_` and `.`. It is the last part of
    /// `spiffe://vmferry/host/NAME`.
    pub name: String,
    /// The host's DNS names and IP addresses; the host's name if empty.
    pub addresses: Vec<String>,
    /// The validity.
    pub validity: Validity,
}

impl IssueRequest {
    /// A certificate for a host whose DNS name is `name`.
    #[must_use]
    pub fn new(name: &str, validity: Validity) -> Self {
        Self { name: name.to_owned(), addresses: Vec::new(), validity }
    }
}

/// Creates an authority: `ca.pem` and `ca.key` in `directory`, which is created if it is missing.
///
/// # Errors
/// [`TransportError::File`] if a file exists or cannot be written.
pub fn init(directory: &Path, name: &str, validity: Validity) -> Result<(), TransportError> {
    let paths = [directory.join("ca.key"), directory.join("ca.pem")];
    refuse_existing(&paths)?;
    let failed = |error: rcgen::Error| problem(&paths[1], format!("can't be created: {error}"));
    let mut params = CertificateParams::default();
    set_validity(&mut params, validity).map_err(|error| problem(&paths[1], error))?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = Zeroizing::new(KeyPair::generate().map_err(failed)?);
    // Revocation lists are matched by the authority's name, so names of authorities must be unique.
    // The end of the public key serves as a random suffix.
    let public = key.public_key_raw();
    let unique: String =
        public[public.len() - 4..].iter().map(|byte| format!("{byte:02x}")).collect();
    params.distinguished_name.push(DnType::CommonName, format!("{name} authority {unique}"));
    let certificate = params.self_signed(&*key).map_err(failed)?;
    make_directory(directory)?;
    write(&paths[0], &secret::to_pem(key.serialized_der()), 0o600)?;
    write(&paths[1], &certificate.pem(), 0o644)
}

/// Issues a host's certificate with the authority in `directory`: `host.pem`, `host.key` and a copy
/// of `ca.pem` in `out`, which is created if it is missing.
///
/// # Errors
/// [`TransportError::File`] if the authority cannot be read, or a file exists or cannot be written.
pub fn issue(directory: &Path, out: &Path, request: &IssueRequest) -> Result<(), TransportError> {
    let paths = [out.join("host.key"), out.join("host.pem"), out.join("ca.pem")];
    refuse_existing(&paths)?;
    if !is_name(&request.name) {
        let text = format!(
            "`{}` is not a valid name: use ASCII letters, digits, -, _ and .",
            request.name
        );
        return Err(problem(&paths[1], text));
    }
    let (authority, signing) = open(directory)?;
    let issuer = issuer(directory, &authority, &signing)?;
    let failed = |error: rcgen::Error| problem(&paths[1], format!("can't be created: {error}"));
    let default = [request.name.clone()];
    let addresses =
        if request.addresses.is_empty() { &default[..] } else { &request.addresses[..] };
    let mut params = CertificateParams::new(addresses.to_vec())
        .map_err(|error| problem(&paths[1], format!("an address is not a valid name: {error}")))?;
    let uri = format!("spiffe://vmferry/host/{}", request.name);
    let uri = uri.as_str().try_into().map_err(failed)?;
    params.subject_alt_names.push(SanType::URI(uri));
    params.distinguished_name.push(DnType::CommonName, request.name.clone());
    // TLS 1.3 only signs with the key. QEMU's `tls-creds-x509` also requires key encipherment
    // (`crypto/tlscredsx509.c`), and one certificate should work for both.
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    set_validity(&mut params, request.validity).map_err(|error| problem(&paths[1], error))?;
    let key = Zeroizing::new(KeyPair::generate().map_err(failed)?);
    let certificate = params.signed_by(&*key, &issuer).map_err(failed)?;
    revoke::remember(directory, &request.name, &certificate)?;
    make_directory(out)?;
    write(&paths[0], &secret::to_pem(key.serialized_der()), 0o600)?;
    write(&paths[1], &certificate.pem(), 0o644)?;
    write(&paths[2], &authority, 0o644)
}

/// Reads the certificate (PEM) and the key of the authority in a directory.
fn open(directory: &Path) -> Result<(String, Zeroizing<KeyPair>), TransportError> {
    let ca_key = directory.join("ca.key");
    let authority = read(&directory.join("ca.pem"))?;
    let unreadable = |error| unreadable(&ca_key, &error);
    let file = File::open(&ca_key).map_err(unreadable)?;
    let pem = secret::read(file, MAX_KEY_BYTES).map_err(unreadable)?;
    let no_key = |why: String| problem(&ca_key, format!("holds no private key{why}"));
    let key = secret::from_pem(&pem).ok_or_else(|| no_key(String::new()))?;
    let signing = KeyPair::try_from(&*key).map_err(|error| no_key(format!(": {error}")))?;
    Ok((authority, Zeroizing::new(signing)))
}

/// The issuer that signs for the authority in a directory.
fn issuer<'a>(
    directory: &Path,
    authority: &str,
    signing: &'a KeyPair,
) -> Result<Issuer<'static, &'a KeyPair>, TransportError> {
    Issuer::from_ca_cert_pem(authority, signing)
        .map_err(|error| problem(&directory.join("ca.pem"), format!("holds no authority: {error}")))
}

/// Whether the name is safe in a URI's path and cannot be mistaken for another name.
fn is_name(name: &str) -> bool {
    (1..=253).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && name.bytes().any(|byte| byte.is_ascii_alphanumeric())
}

fn set_validity(params: &mut CertificateParams, validity: Validity) -> Result<(), String> {
    set_dates(&mut params.not_before, &mut params.not_after, validity)
}

fn set_dates(
    begin: &mut OffsetDateTime,
    end: &mut OffsetDateTime,
    validity: Validity,
) -> Result<(), String> {
    let now = OffsetDateTime::now_utc();
    let day = |days: i64| {
        let seconds = days.checked_mul(86_400)?;
        now.checked_add(time::Duration::seconds(seconds))
    };
    let (Some(from), Some(until)) = (day(validity.from_days), day(validity.until_days)) else {
        return Err("can't be valid beyond the year 9999: ask for fewer days".into());
    };
    if until <= from {
        return Err("would end before it begins: ask for more days".into());
    }
    (*begin, *end) = (from, until);
    Ok(())
}

fn problem(path: &Path, problem: String) -> TransportError {
    TransportError::File { path: path.to_owned(), problem }
}

fn refuse_existing(paths: &[PathBuf]) -> Result<(), TransportError> {
    match paths.iter().find(|path| path.exists()) {
        Some(path) => Err(problem(
            path,
            "already exists and is not overwritten: choose another directory".into(),
        )),
        None => Ok(()),
    }
}

fn make_directory(path: &Path) -> Result<(), TransportError> {
    std::fs::create_dir_all(path)
        .map_err(|error| problem(path, format!("can't be created: {error}")))
}

fn read(path: &Path) -> Result<String, TransportError> {
    std::fs::read_to_string(path).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &std::io::Error) -> TransportError {
    problem(path, format!("can't be read ({error}): make an authority with `vmferry pki init`"))
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), TransportError> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|error| problem(path, format!("can't be written: {error}")))
}
