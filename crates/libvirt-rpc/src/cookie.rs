//! The migration cookie: XML in which one libvirt tells the other about a migration.

use crate::error::RpcError;
use crate::guest::{cut, parse_uuid};
use crate::xdr::text;
use crate::xml;

const DOCUMENT: &str = "migration cookie";

/// Demands that a cookie is of the guest with this name and UUID, and returns its text. An empty
/// cookie is none.
///
/// `qemuMigrationCookieXMLParse` in `src/qemu/qemu_migration_cookie.c` demands it, too. It defines
/// the persistent guest from the cookie's `<domain>`, whose UUID it does not compare; here it must
/// be the same. The name of that definition has no effect, libvirt replaces it.
///
/// # Errors
/// [`RpcError::NotText`], [`RpcError::BadXml`], [`RpcError::OtherGuest`].
pub(crate) fn check<'a>(
    cookie: &'a [u8],
    name: &str,
    uuid: uuid::Uuid,
) -> Result<Option<&'a str>, RpcError> {
    if cookie.is_empty() {
        return Ok(None);
    }
    // The NUL at the end is a part of the cookie (`qemuMigrationCookieParse`).
    let Some(cookie) = cookie.strip_suffix(b"\0") else {
        let detail = "it does not end with NUL".to_owned();
        return Err(RpcError::BadXml { document: DOCUMENT, detail });
    };
    let cookie = text(cookie, DOCUMENT)?;
    let parsed = xml::parse(cookie, "qemu-migration", DOCUMENT)?;
    let root = parsed.root_element();
    let found = xml::identity(root, DOCUMENT)?;
    if found.uuid != uuid {
        return Err(other("UUID", &found.uuid.to_string(), &uuid.to_string()));
    }
    if found.name != name {
        return Err(other("name", &found.name, name));
    }
    for domain in root.children().filter(|child| child.tag_name().name() == "domain") {
        let persistent = xml::child_text(domain, "uuid", DOCUMENT)?;
        let persistent = parse_uuid(persistent, DOCUMENT)?;
        if persistent != uuid {
            let (found, expected) = (persistent.to_string(), uuid.to_string());
            return Err(other("persistent definition's UUID", &found, &expected));
        }
    }
    Ok(Some(cookie))
}

fn other(what: &'static str, found: &str, expected: &str) -> RpcError {
    RpcError::OtherGuest { what, found: cut(found).to_owned(), expected: cut(expected).to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packets::{OTHER_UUID, UUID, cookie};

    fn read(bytes: &[u8]) -> Result<(), RpcError> {
        check(bytes, "web", UUID.parse().unwrap()).map(drop)
    }

    fn with(more: &str) -> Vec<u8> {
        let text = String::from_utf8(cookie("web", UUID)).unwrap();
        text.replace("</qemu-migration>", &format!("{more}</qemu-migration>")).into_bytes()
    }

    #[test]
    fn cookie_of_the_guest_is_accepted() {
        assert_eq!(read(b""), Ok(()));
        assert_eq!(read(&cookie("web", UUID)), Ok(()));
        let domain = format!("<domain type='kvm'><name>web2</name><uuid>{UUID}</uuid></domain>");
        assert_eq!(read(&with(&domain)), Ok(()));
    }

    #[test]
    fn cookie_of_another_guest_is_refused() {
        let other = read(&cookie("web", OTHER_UUID)).unwrap_err();
        assert!(matches!(other, RpcError::OtherGuest { what: "UUID", .. }), "{other}");
        let other = read(&cookie("db", UUID)).unwrap_err();
        assert!(matches!(other, RpcError::OtherGuest { what: "name", .. }), "{other}");
    }

    #[test]
    fn persistent_definition_of_another_guest_is_refused() {
        let domain = format!("<domain><name>web</name><uuid>{OTHER_UUID}</uuid></domain>");
        assert!(matches!(read(&with(&domain)), Err(RpcError::OtherGuest { .. })));
        let same = domain.replace(OTHER_UUID, UUID);
        assert!(read(&with(&format!("{same}{domain}"))).is_err());
        assert!(matches!(read(&with("<domain/>")), Err(RpcError::BadXml { .. })));
    }

    #[test]
    fn cookie_that_is_no_xml_is_refused() {
        let whole = cookie("web", UUID);
        for bytes in [&whole[..whole.len() - 1], b"\0", b"x\0", b"<qemu-migration/>\0"] {
            assert!(matches!(read(bytes), Err(RpcError::BadXml { .. })), "{bytes:?}");
        }
        let mut nul = whole.clone();
        nul[20] = 0;
        assert!(matches!(read(&nul), Err(RpcError::NotText { found: "NUL", .. })));
    }
}
