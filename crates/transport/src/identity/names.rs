//! The names in a certificate.

use std::time::{Duration, SystemTime};

use x509_parser::extensions::GeneralName;

/// The names in a certificate (X.509, DER), none in what is not one: URIs (SPIFFE) first, then DNS names and IP addresses. Policies and people go by
/// them, so a name that could be taken for one of another kind, or that a terminal would not show as it is, is
/// left out.
#[must_use]
pub fn names_of(certificate: &[u8]) -> Vec<String> {
    let Ok((_, parsed)) = x509_parser::parse_x509_certificate(certificate) else {
        return Vec::new();
    };
    let Ok(Some(names)) = parsed.subject_alternative_name() else { return Vec::new() };
    let (mut uris, mut others) = (Vec::new(), Vec::new());
    for name in &names.value.general_names {
        match name {
            GeneralName::URI(uri) if is_no_address(uri) && is_plain(uri) => {
                uris.push((*uri).to_owned());
            }
            GeneralName::DNSName(name)
                if !name.contains([':', '/']) && !ends_in_a_number(name) && is_plain(name) =>
            {
                others.push((*name).to_owned());
            }
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

/// From when until when a certificate (X.509, DER) is valid; none for what is not one.
#[must_use]
pub fn validity_of(certificate: &[u8]) -> Option<(SystemTime, SystemTime)> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    // One from before 1970 is as good as of then.
    let at = |seconds: i64| {
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds.max(0).unsigned_abs()))
    };
    let validity = parsed.validity();
    Some((at(validity.not_before.timestamp())?, at(validity.not_after.timestamp())?))
}

/// Until when a revocation list (DER) counts; `None` if it does not say, or is none.
#[must_use]
pub fn next_update_of(list: &[u8]) -> Option<SystemTime> {
    let (_, parsed) = x509_parser::parse_x509_crl(list).ok()?;
    let seconds = parsed.next_update()?.timestamp().max(0).unsigned_abs();
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

/// The names of a peer that has shown this certificate: those in it, or, where none can be used,
/// the key that it is for, as `key:sha256:` and the hexadecimal SHA-256 of its
/// SubjectPublicKeyInfo. So two peers whose certificates name nobody are two, and one of them is
/// the same when its certificate is renewed for its key.
pub fn names_or_key_of(certificate: &[u8]) -> Vec<String> {
    let names = names_of(certificate);
    if !names.is_empty() {
        return names;
    }
    let key = x509_parser::parse_x509_certificate(certificate).map_or_else(
        // rustls has verified it; what this parser does not read is still one certificate and no
        // other.
        |_| sha256(certificate),
        |(_, parsed)| sha256(parsed.tbs_certificate.subject_pki.raw),
    );
    vec![format!("{KEY_SCHEME}:sha256:{key}")]
}

fn sha256(bytes: &[u8]) -> String {
    let suite = rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256;
    let Some(suite) = suite.tls13() else { unreachable!("it is a suite of TLS 1.3") };
    let hash = suite.common.hash_provider.hash(bytes);
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What the name of a peer without names begins with. No certificate gives a name of this scheme.
const KEY_SCHEME: &str = "key";

/// Whether a text is a URI, and neither an IPv6 address nor meant by a pattern of some: what stands before the first
/// colon could not be the beginning of one. Nor the name that a key gives.
fn is_no_address(uri: &str) -> bool {
    let Some((scheme, _)) = uri.split_once(':') else { return false };
    let is_hexadecimal = scheme.len() <= 4 && scheme.bytes().all(|byte| byte.is_ascii_hexdigit());
    !is_hexadecimal && !scheme.eq_ignore_ascii_case(KEY_SCHEME)
}

/// Whether a text looks like an IPv4 address: no domain is a number.
fn ends_in_a_number(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    name.rsplit('.').next().is_some_and(|last| last.bytes().all(|byte| byte.is_ascii_digit()))
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A certificate with these names that are given as they are, of whatever kind they look.
    fn certificate(names: Vec<rcgen::SanType>) -> Vec<u8> {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = names;
        let key = rcgen::KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn a_certificate_without_names_is_named_by_its_key() {
        let key = rcgen::KeyPair::generate().unwrap();
        let signed = |common_name: &str| {
            let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
            params.distinguished_name.push(rcgen::DnType::CommonName, common_name);
            params.self_signed(&key).unwrap().der().to_vec()
        };
        let (first, renewed) = (signed("a"), signed("b"));
        assert_ne!(first, renewed);
        let names = names_or_key_of(&first);
        assert_eq!(names.len(), 1);
        assert_eq!(names[0].len(), "key:sha256:".len() + 64, "{names:?}");
        assert_eq!(names_or_key_of(&renewed), names, "the key is the same");
        assert_ne!(names_or_key_of(&certificate(Vec::new())), names, "that is another one");
    }

    #[test]
    fn a_name_is_not_taken_for_one_of_another_kind() {
        let uri = |text: &str| rcgen::SanType::URI(text.try_into().unwrap());
        let dns = |text: &str| rcgen::SanType::DnsName(text.try_into().unwrap());
        let address = |text: &str| rcgen::SanType::IpAddress(text.parse().unwrap());
        let found = names_of(&certificate(vec![
            dns("a.example.org"),
            dns("10.0.0.7"),
            dns("10.0.0.7."),
            dns("spiffe://vmferry/host/a"),
            address("10.0.0.8"),
            address("2001:db8::8"),
            uri("2001:db8::7"),
            uri("::7"),
            uri("key:sha256:00"),
            uri("fe80:anything"),
            uri("urn:uuid:7"),
            uri("spiffe://vmferry/host/b"),
        ]));
        let right =
            ["urn:uuid:7", "spiffe://vmferry/host/b", "a.example.org", "10.0.0.8", "2001:db8::8"];
        assert_eq!(found, right);
        assert!(names_of(b"no certificate").is_empty());
    }
}
