//! Typed parameters of a migration call.

use std::collections::HashSet;

use crate::error::RpcError;
use crate::guest::cut;
use crate::xdr::Reader;

/// The most parameters of a call: `REMOTE_DOMAIN_MIGRATE_PARAM_LIST_MAX` in
/// `src/remote/remote_protocol.x`.
pub const MAX_PARAMS: u32 = 64;

/// The longest string: `REMOTE_STRING_MAX` and `REMOTE_MIGRATE_COOKIE_MAX` in
/// `src/remote/remote_protocol.x`.
pub const MAX_STRING_BYTES: u32 = 4 << 20;

/// The longest parameter name: `VIR_TYPED_PARAM_FIELD_LENGTH` in
/// `include/libvirt/libvirt-common.h.in`, without its NUL.
const MAX_FIELD_BYTES: u32 = 79;

/// Parameters that may occur more than once: `VIR_TYPED_PARAM_MULTIPLE` in
/// `QEMU_MIGRATION_PARAMETERS` of `src/qemu/qemu_migration.h`.
const REPEATABLE: [&str; 3] = ["compression", "migrate_disks", "migrate_disks_detect_zeroes"];

/// Strings that neither name a socket nor a guest, and pass unread.
const HARMLESS_STRINGS: [&str; 2] = ["compression", "migrate_disks_detect_zeroes"];

/// The parameters that matter, of `VIR_MIGRATE_PARAM_*` in `include/libvirt/libvirt-domain.h`.
///
/// libvirt refuses parameters that it does not know and parameters of another type
/// (`virTypedParamsValidate` in `src/util/virtypedparam.c`). Here an unknown string is refused
/// already, because it may name a socket, a file or a guest. Unknown numbers pass.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Params<'a> {
    pub destination_xml: Option<&'a str>,
    pub destination_name: Option<&'a str>,
    pub migrate_uri: Option<&'a str>,
    pub disks_uri: Option<&'a str>,
    pub listen_address: Option<&'a str>,
    pub graphics_uri: Option<&'a str>,
    pub tls_destination: Option<&'a str>,
    pub disks_port: Option<i32>,
    pub migrate_disks: Vec<&'a str>,
}

/// A value of `remote_typed_param_value` in `src/remote/remote_protocol.x`.
enum Value<'a> {
    Int(i32),
    Text(&'a str),
    Other,
}

impl<'a> Params<'a> {
    /// Reads the list of parameters that begins a call's arguments.
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, RpcError> {
        let what = "the list of parameters";
        let count = reader.u32(what)?;
        if count > MAX_PARAMS {
            let (found, limit) = (count.into(), MAX_PARAMS.into());
            return Err(RpcError::TooLong { what, found, limit });
        }
        let mut params = Self::default();
        let mut names = HashSet::new();
        for _ in 0..count {
            let name = reader.string(MAX_FIELD_BYTES, "a parameter's name")?;
            let value = Value::read(reader)?;
            if !names.insert(name) && !REPEATABLE.contains(&name) {
                return Err(RpcError::RepeatedParameter { name: name.to_owned() });
            }
            params.set(name, value)?;
        }
        Ok(params)
    }

    fn set(&mut self, name: &str, value: Value<'a>) -> Result<(), RpcError> {
        let wrong = |expected| RpcError::ParameterType { name: name.to_owned(), expected };
        if name == "disks_port" {
            let Value::Int(port) = value else { return Err(wrong("an int")) };
            self.disks_port = Some(port);
            return Ok(());
        }
        let field = match name {
            "destination_xml" => &mut self.destination_xml,
            "destination_name" => &mut self.destination_name,
            "migrate_uri" => &mut self.migrate_uri,
            "disks_uri" => &mut self.disks_uri,
            "listen_address" => &mut self.listen_address,
            "graphics_uri" => &mut self.graphics_uri,
            "tls.destination" => &mut self.tls_destination,
            "migrate_disks" => {
                let Value::Text(disk) = value else { return Err(wrong("a string")) };
                self.migrate_disks.push(disk);
                return Ok(());
            }
            _ => {
                return match value {
                    Value::Text(_) if !HARMLESS_STRINGS.contains(&name) => {
                        Err(RpcError::UnknownParameter { name: cut(name).to_owned() })
                    }
                    _ => Ok(()),
                };
            }
        };
        let Value::Text(text) = value else { return Err(wrong("a string")) };
        *field = Some(text);
        Ok(())
    }
}

impl<'a> Value<'a> {
    /// The type is `virTypedParameterType` in `include/libvirt/libvirt-common.h.in`.
    fn read(reader: &mut Reader<'a>) -> Result<Self, RpcError> {
        let what = "a parameter's value";
        let kind = reader.u32("a parameter's type")?;
        Ok(match kind {
            // Int.
            1 => Self::Int(reader.i32(what)?),
            // Unsigned int, boolean.
            2 | 6 => {
                reader.u32(what)?;
                Self::Other
            }
            // Long, unsigned long, double.
            3..=5 => {
                reader.skip_u64(what)?;
                Self::Other
            }
            // String.
            7 => Self::Text(reader.string(MAX_STRING_BYTES, what)?),
            found => {
                let what = "a parameter's type";
                return Err(RpcError::BadValue { what, found: found.into() });
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packets::{Value as V, params};

    fn read(list: &[(&str, V)]) -> Result<(), RpcError> {
        let bytes = params(list);
        let mut reader = Reader::new(&bytes);
        Params::read(&mut reader)?;
        reader.end()
    }

    #[test]
    fn params_of_each_type_are_read() {
        let bytes = params(&[
            ("destination_xml", V::Text("<domain/>")),
            ("migrate_uri", V::Text("unix:///m")),
            ("disks_port", V::Int(-1)),
            ("bandwidth", V::Long(9)),
            ("new.number", V::Int(2)),
            ("new.flag", V::Bool(true)),
            ("migrate_disks", V::Text("vda")),
            ("migrate_disks", V::Text("vdb")),
            ("compression", V::Text("zstd")),
        ]);
        let mut reader = Reader::new(&bytes);
        let expected = Params {
            destination_xml: Some("<domain/>"),
            migrate_uri: Some("unix:///m"),
            disks_port: Some(-1),
            migrate_disks: vec!["vda", "vdb"],
            ..Params::default()
        };
        assert_eq!(Params::read(&mut reader), Ok(expected));
        assert_eq!(reader.end(), Ok(()));
    }

    #[test]
    fn params_refuse_repeated_names() {
        let uri = ("migrate_uri", V::Text("unix:///m"));
        let error = RpcError::RepeatedParameter { name: "migrate_uri".into() };
        assert_eq!(read(&[uri, uri]), Err(error));
        let number = ("bandwidth", V::Long(1));
        let error = RpcError::RepeatedParameter { name: "bandwidth".into() };
        assert_eq!(read(&[number, uri, number]), Err(error));
    }

    #[test]
    fn params_refuse_unknown_strings() {
        for name in ["persistent_xml", "socket", "migrate_uri ", ""] {
            let error = RpcError::UnknownParameter { name: name.into() };
            assert_eq!(read(&[(name, V::Text("x"))]), Err(error));
        }
    }

    #[test]
    fn params_refuse_other_types() {
        for (name, value, expected) in [
            ("migrate_uri", V::Int(1), "a string"),
            ("destination_name", V::Long(1), "a string"),
            ("migrate_disks", V::Bool(true), "a string"),
            ("disks_port", V::Text("1"), "an int"),
            ("disks_port", V::Long(1), "an int"),
        ] {
            let error = RpcError::ParameterType { name: name.into(), expected };
            assert_eq!(read(&[(name, value)]), Err(error));
        }
    }

    #[test]
    fn params_refuse_unknown_types_and_long_lists() {
        for kind in [0, 8, u32::MAX] {
            let mut bytes = params(&[("x", V::Int(0))]);
            let at = bytes.len() - 8;
            bytes[at..at + 4].copy_from_slice(&kind.to_be_bytes());
            let what = "a parameter's type";
            let error = RpcError::BadValue { what, found: kind.into() };
            assert_eq!(Params::read(&mut Reader::new(&bytes)), Err(error));
        }
        let many = (MAX_PARAMS + 1).to_be_bytes();
        let what = "the list of parameters";
        let error = RpcError::TooLong { what, found: 65, limit: 64 };
        assert_eq!(Params::read(&mut Reader::new(&many)), Err(error));
        let long = "x".repeat(80);
        let what = "a parameter's name";
        let error = RpcError::TooLong { what, found: 80, limit: 79 };
        assert_eq!(read(&[(&long, V::Int(0))]), Err(error));
    }
}
