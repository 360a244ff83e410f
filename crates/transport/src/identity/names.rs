//! The names in a certificate.

use std::time::{Duration, SystemTime};

use x509_parser::extensions::GeneralName;

/// The names in a certificate (X.509, DER): SPIFFE and other URIs first, then DNS names and IP
/// addresses. Empty if the bytes are not a certificate. Policies and people rely on these names, so
/// a name is omitted if it could be mistaken for another kind, or if a terminal would not show it
/// as it is.
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

/// The common name of a certificate's subject (X.509, DER); the last one if it has several, as Go's
/// TLS library reads it. `None` if it has none, or if the bytes are not a certificate.
#[must_use]
pub fn common_name_of(certificate: &[u8]) -> Option<String> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    let name = parsed.subject().iter_common_name().last()?.as_str().ok()?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// The start and end of a certificate's validity (X.509, DER); `None` if the bytes are not a
/// certificate.
#[must_use]
pub fn validity_of(certificate: &[u8]) -> Option<(SystemTime, SystemTime)> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    // Times before 1970 are reported as 1970.
    let at = |seconds: i64| {
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds.max(0).unsigned_abs()))
    };
    let validity = parsed.validity();
    Some((at(validity.not_before.timestamp())?, at(validity.not_after.timestamp())?))
}

/// The next update of a revocation list (DER); `None` if it has none, or if the bytes are not a
/// list.
#[must_use]
pub fn next_update_of(list: &[u8]) -> Option<SystemTime> {
    let (_, parsed) = x509_parser::parse_x509_crl(list).ok()?;
    let seconds = parsed.next_update()?.timestamp().max(0).unsigned_abs();
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

/// The names of a peer with this certificate. If it has no usable name, the name is `key:sha256:`
/// and the SHA-256 of its SubjectPublicKeyInfo in hexadecimal. So peers without names are
/// distinguishable, and a peer stays the same when its certificate is renewed for the same key.
pub fn names_or_key_of(certificate: &[u8]) -> Vec<String> {
    let names = names_of(certificate);
    if !names.is_empty() {
        return names;
    }
    let key = x509_parser::parse_x509_certificate(certificate).map_or_else(
        // rustls has verified the certificate. If this parser cannot read it, its hash still
        // identifies it.
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

/// The scheme of such a name. Names in certificates never have this scheme.
const KEY_SCHEME: &str = "key";

/// Whether a text is a URI that cannot be mistaken for an IPv6 address or a pattern of addresses:
/// the part before the first colon must not be a group of an address. The scheme of key names is
/// excluded too.
fn is_no_address(uri: &str) -> bool {
    let Some((scheme, _)) = uri.split_once(':') else { return false };
    let is_hexadecimal = scheme.len() <= 4 && scheme.bytes().all(|byte| byte.is_ascii_hexdigit());
    !is_hexadecimal && !scheme.eq_ignore_ascii_case(KEY_SCHEME)
}

/// Whether a text looks like an IPv4 address. No top-level domain is a number.
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

    /// A certificate with exactly these names.
    fn certificate(names: Vec<rcgen::SanType>) -> Vec<u8> {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = names;
        let key = rcgen::KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn certificate_without_names_is_named_by_its_key() {
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
        assert_ne!(names_or_key_of(&certificate(Vec::new())), names, "a different key");
    }

    #[test]
    fn common_name_is_the_last_one() {
        let mut params = rcgen::CertificateParams::new(vec!["host.example".to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        let key = rcgen::KeyPair::generate().unwrap();
        let nameless = params.clone().self_signed(&key).unwrap();
        assert_eq!(common_name_of(nameless.der()), None);
        params.distinguished_name.push(rcgen::DnType::OrganizationName, "vmferry");
        params.distinguished_name.push(rcgen::DnType::CommonName, "host-a");
        let named = params.self_signed(&key).unwrap();
        assert_eq!(common_name_of(named.der()).as_deref(), Some("host-a"));
        assert_eq!(common_name_of(b"no certificate"), None);
    }

    #[test]
    fn names_of_omits_names_that_look_like_another_kind() {
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
