//! The authority's record of issued certificates, and its revocation list.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use rcgen::{
    Certificate, CertificateRevocationListParams, KeyIdMethod, RevokedCertParams, SerialNumber,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use time::OffsetDateTime;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::ParsedExtension;

use super::{Validity, is_name, issuer, make_directory, open, problem, read, set_dates, write};
use crate::error::TransportError;

/// The directory for copies of issued certificates, inside the authority's directory.
const ISSUED: &str = "issued";

/// The revocation list, in the authority's directory.
const LIST: &str = "crl.pem";

/// A new revocation list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevocationList {
    /// The file: `crl.pem` in the authority's directory, to be copied to each host.
    pub path: PathBuf,
    /// The list's number. Each list has a higher number than the one before.
    pub number: u64,
    /// Number of newly revoked certificates.
    pub added: usize,
    /// Total number of revoked certificates.
    pub revoked: usize,
}

/// Creates or renews the revocation list of the authority in `directory`. Earlier revocations are
/// kept. Each of `hosts` is added: either a certificate file, or the name of a host, which revokes
/// all certificates that the authority has copies of. The list is valid until the end of
/// `validity`. After that, hosts reject all certificates of this authority.
///
/// # Errors
/// [`TransportError::File`] if the authority cannot be read, a host is unknown, a certificate was
/// issued by another authority, or the list cannot be written. The old list stays unchanged then.
pub fn revoke(
    directory: &Path,
    hosts: &[String],
    validity: Validity,
) -> Result<RevocationList, TransportError> {
    let (authority, signing) = open(directory)?;
    let issuer = issuer(directory, &authority, &signing)?;
    let path = directory.join(LIST);
    let (number, mut revoked) = if path.exists() { parse(&path)? } else { (0, Vec::new()) };
    let before = revoked.len();
    let now = OffsetDateTime::now_utc();
    for host in hosts {
        for serial in serials(directory, host, &authority)? {
            if revoked.iter().all(|known| known.serial_number != serial) {
                revoked.push(RevokedCertParams {
                    serial_number: serial,
                    revocation_time: now,
                    reason_code: None,
                    invalidity_date: None,
                });
            }
        }
    }
    let number = number + 1;
    let mut params = CertificateRevocationListParams {
        this_update: now,
        next_update: now,
        crl_number: SerialNumber::from(number),
        issuing_distribution_point: None,
        revoked_certs: revoked,
        key_identifier_method: KeyIdMethod::Sha256,
    };
    set_dates(&mut params.this_update, &mut params.next_update, validity)
        .map_err(|error| problem(&path, error))?;
    let pem = params
        .signed_by(&issuer)
        .and_then(|list| list.pem())
        .map_err(|error| problem(&path, format!("can't be created: {error}")))?;
    replace(&path, &pem)?;
    let revoked = params.revoked_certs.len();
    Ok(RevocationList { path, number, added: revoked - before, revoked })
}

/// Keeps a copy of a certificate.
pub(super) fn remember(
    directory: &Path,
    name: &str,
    certificate: &Certificate,
) -> Result<(), TransportError> {
    let copies = directory.join(ISSUED);
    make_directory(&copies)?;
    let file = copies.join(name);
    let serial = x509(certificate.der(), &file)?.raw_serial_as_string().replace(':', "");
    // A name may contain dots, a serial number cannot.
    write(&copies.join(format!("{name}.{serial}.pem")), &certificate.pem(), 0o644)
}

/// The serial numbers of the certificates to revoke.
fn serials(
    directory: &Path,
    host: &str,
    authority: &str,
) -> Result<Vec<SerialNumber>, TransportError> {
    let file = Path::new(host);
    if file.is_file() {
        return Ok(vec![serial(file, authority)?]);
    }
    let copies = directory.join(ISSUED);
    let mut found = Vec::new();
    if is_name(host)
        && let Ok(entries) = std::fs::read_dir(&copies)
    {
        for entry in entries.flatten() {
            let name = entry.file_name();
            let issued_to = name.to_str().and_then(|name| name.strip_suffix(".pem"));
            if issued_to
                .and_then(|name| name.rsplit_once('.'))
                .is_some_and(|(name, _)| name == host)
            {
                found.push(serial(&entry.path(), authority)?);
            }
        }
    }
    if found.is_empty() {
        let text = format!(
            "has no certificate that was issued to `{host}`: give the file of the certificate"
        );
        return Err(problem(&copies, text));
    }
    Ok(found)
}

/// The serial number of the first certificate in a file. The authority must have issued it.
fn serial(path: &Path, authority: &str) -> Result<SerialNumber, TransportError> {
    let certificate = first(read(path)?.as_bytes(), path)?;
    let authority = first(authority.as_bytes(), path)?;
    let (certificate, authority) = (x509(&certificate, path)?, x509(&authority, path)?);
    if certificate.issuer() != authority.subject() || !is_signed_with(&certificate, &authority) {
        return Err(problem(path, "was not issued by this authority".into()));
    }
    Ok(SerialNumber::from_slice(certificate.raw_serial()))
}

/// Whether the certificate's authority key identifier is this authority's key. Different
/// authorities often have the same name.
fn is_signed_with(certificate: &X509Certificate<'_>, authority: &X509Certificate<'_>) -> bool {
    let named =
        certificate.extensions().iter().find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::AuthorityKeyIdentifier(key) => key.key_identifier.as_ref(),
            _ => None,
        });
    let own =
        authority.extensions().iter().find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::SubjectKeyIdentifier(key) => Some(key),
            _ => None,
        });
    named == own
}

fn first(pem: &[u8], path: &Path) -> Result<CertificateDer<'static>, TransportError> {
    CertificateDer::from_pem_slice(pem)
        .map_err(|error| problem(path, format!("holds no certificate in PEM form: {error}")))
}

fn x509<'a>(der: &'a [u8], path: &Path) -> Result<X509Certificate<'a>, TransportError> {
    x509_parser::parse_x509_certificate(der)
        .map(|(_, certificate)| certificate)
        .map_err(|error| problem(path, format!("holds a damaged certificate: {error}")))
}

/// The number of a list, and the certificates that it revokes.
fn parse(path: &Path) -> Result<(u64, Vec<RevokedCertParams>), TransportError> {
    let damaged = |error: &dyn std::fmt::Display| {
        problem(path, format!("is not a revocation list that can be renewed: {error}"))
    };
    let list = CertificateRevocationListDer::from_pem_slice(read(path)?.as_bytes())
        .map_err(|error| damaged(&error))?;
    let (_, list) = x509_parser::parse_x509_crl(&list).map_err(|error| damaged(&error))?;
    let number = list.crl_number().and_then(|number| u64::try_from(number).ok());
    let number = number.ok_or_else(|| damaged(&"it has no number"))?;
    let entries = list.iter_revoked_certificates().map(|entry| RevokedCertParams {
        serial_number: SerialNumber::from_slice(entry.raw_serial()),
        revocation_time: entry.revocation_date.to_datetime(),
        reason_code: None,
        invalidity_date: None,
    });
    Ok((number, entries.collect()))
}

/// Replaces the list atomically: a host that reads it meanwhile sees the old or the new list.
fn replace(path: &Path, text: &str) -> Result<(), TransportError> {
    let fresh = path.with_extension("pem.new");
    let written = File::create(&fresh)
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&fresh, path));
    written.map_err(|error| problem(path, format!("can't be written: {error}")))
}
