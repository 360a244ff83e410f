//! The names in a certificate.

use rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;

/// The names in a certificate: URIs (SPIFFE) first, then DNS names and IP addresses. Policies and people go by
/// them, so a name that could be taken for one of another kind, or that a terminal would not show as it is, is
/// left out.
pub(crate) fn names_of(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, parsed)) = x509_parser::parse_x509_certificate(certificate) else {
        return Vec::new();
    };
    let Ok(Some(names)) = parsed.subject_alternative_name() else { return Vec::new() };
    let (mut uris, mut others) = (Vec::new(), Vec::new());
    for name in &names.value.general_names {
        match name {
            GeneralName::URI(uri) if uri.contains(':') && is_plain(uri) => {
                uris.push((*uri).to_owned());
            }
            GeneralName::DNSName(name) if !name.contains([':', '/']) && is_plain(name) => {
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

fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic())
}
