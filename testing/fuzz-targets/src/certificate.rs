//! Any bytes, read as a certificate (DER), or as a file of certificates or of revocation lists
//! (PEM).

use std::net::IpAddr;

use vmferry_transport::{certificates_of, names_of, revocation_lists_of};

use super::input::Input;

/// The first byte selects the format. Names must be safe for a policy and a terminal.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.byte() % 3 {
        0 => check(&names_of(input.0)),
        1 => {
            if let Ok(found) = certificates_of(input.0) {
                assert!(!found.is_empty());
                found.iter().for_each(|one| check(&names_of(one)));
            }
        }
        _ => {
            if let Ok(found) = revocation_lists_of(input.0) {
                assert!(!found.is_empty());
            }
        }
    }
}

/// URIs come first, and no name can be mistaken for one of another kind.
fn check(names: &[String]) {
    let is_address = |name: &String| name.parse::<IpAddr>().is_ok();
    let is_uri = |name: &&String| name.contains(':') && !is_address(name);
    let uris = names.iter().take_while(is_uri).count();
    for (at, name) in names.iter().enumerate() {
        assert!(!name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic()), "{name:?}");
        if at >= uris {
            assert!(is_address(name) || !name.contains([':', '/']), "{names:?}");
        }
        // A name that a pattern of IPv6 addresses could match is an address.
        let group = name.split(':').next().unwrap_or_default();
        let like_ipv6 = name.contains(':')
            && group.len() <= 4
            && group.bytes().all(|byte| byte.is_ascii_hexdigit());
        let last = name.trim_end_matches('.').rsplit('.').next().unwrap_or_default();
        let like_ipv4 = !name.contains([':', '/'])
            && !last.is_empty()
            && last.bytes().all(|byte| byte.is_ascii_digit());
        assert!(is_address(name) || !(like_ipv6 || like_ipv4), "{name:?}");
    }
}
