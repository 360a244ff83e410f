//! A guest's names.

use uuid::Uuid;

use crate::error::RpcError;

/// The longest guest name. libvirt has no limit of its own, but it names files after guests, and
/// Linux limits these to 255 bytes.
pub const MAX_NAME_BYTES: usize = 200;

/// A guest as the destination's libvirt will know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    /// The domain's name at the destination.
    pub name: String,
    /// The domain's UUID.
    pub uuid: Uuid,
}

/// Demands a name that is usable as a file name, because libvirt makes paths of it. It refuses a
/// slash in the name of a definition, but replaces that name by the parameter `destination_name`
/// without a check (`qemuMigrationAnyPrepareDef` in `src/qemu/qemu_migration.c`).
pub(crate) fn check_name(name: &str) -> Result<(), RpcError> {
    let detail = match name {
        "" => "it is empty",
        "." | ".." => "it is no file name",
        _ if name.len() > MAX_NAME_BYTES => "it is longer than 200 bytes",
        _ if name.contains('/') => "it contains a slash",
        _ if name.contains(char::is_control) => "it contains a control character",
        _ => return Ok(()),
    };
    Err(RpcError::BadName { name: name.chars().take(MAX_NAME_BYTES).collect(), detail })
}

/// Parses a UUID in the form that libvirt writes: 32 digits and 4 hyphens (`virUUIDFormat` in
/// `src/util/viruuid.c`). libvirt reads other forms, too, but never writes them in a definition.
pub(crate) fn parse_uuid(text: &str, document: &'static str) -> Result<Uuid, RpcError> {
    let parsed = if text.len() == 36 { Uuid::try_parse(text).ok() } else { None };
    parsed.ok_or_else(|| RpcError::BadXml {
        document,
        detail: format!("the UUID {:?} is not in the usual form", cut(text)),
    })
}

/// A text's beginning, for messages.
pub(crate) fn cut(text: &str) -> &str {
    let end = text.floor_char_boundary(MAX_NAME_BYTES);
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_name_refuses_what_is_no_file_name() {
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for name in ["", ".", "..", "../etc/cron.d/x", "a/b", "a\nb", "a\u{85}b", &long] {
            assert!(matches!(check_name(name), Err(RpcError::BadName { .. })), "{name:?}");
        }
        for name in ["web", "web 1", "..web", "wéb", &long[1..]] {
            assert_eq!(check_name(name), Ok(()), "{name:?}");
        }
    }

    #[test]
    fn parse_uuid_accepts_only_the_usual_form() {
        let text = "c7a5fdbd-cdaf-9455-926a-d65c16db1809";
        assert_eq!(parse_uuid(text, "x").unwrap().to_string(), text);
        assert!(parse_uuid(&text.to_uppercase(), "x").is_ok());
        let forms = [
            text.replace('-', ""),
            format!(" {text}"),
            format!("{{{}}}", &text[1..35]),
            text.replace("-9455-926a", "9455--926a"),
            String::new(),
        ];
        for form in forms {
            assert!(parse_uuid(&form, "x").is_err(), "{form:?}");
        }
    }

    #[test]
    fn cut_ends_between_characters() {
        let text = format!("{}é", "x".repeat(MAX_NAME_BYTES - 1));
        assert_eq!(cut(&text).len(), MAX_NAME_BYTES - 1);
        assert_eq!(cut("é"), "é");
    }
}
