//! The Open call, whose URI selects the driver at the destination.

use crate::error::RpcError;
use crate::guest::cut;
use crate::xdr::Reader;

/// The only URI that may be opened. It is what the source's libvirt sends for
/// `qemu+unix:///system?socket=PATH`: `remoteConnectFormatURI` in `src/remote/remote_driver.c`
/// leaves transport and socket out.
///
/// A daemon opens other URIs as any client does (`remoteConnectOpen`): a `qemu+ext` URI names a
/// command that is run, and `qemu+ssh://host/system` connects to another host.
pub const OPEN_URI: &str = "qemu:///system";

/// Reads `remote_connect_open_args`, an optional name and flags, and demands [`OPEN_URI`].
///
/// # Errors
/// [`RpcError::OtherUri`], and errors of XDR.
pub(crate) fn check(payload: &[u8]) -> Result<(), RpcError> {
    let mut reader = Reader::new(payload);
    let uri = match reader.flag("whether a URI follows")? {
        true => Some(reader.string(u32::MAX, "the URI")?),
        false => None,
    };
    reader.u32("the flags")?;
    reader.end()?;
    match uri {
        Some(OPEN_URI) => Ok(()),
        uri => Err(RpcError::OtherUri { uri: uri.map(|uri| cut(uri).to_owned()) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packets::open;

    #[test]
    fn open_of_the_system_is_accepted() {
        assert_eq!(check(&open(Some(OPEN_URI))), Ok(()));
    }

    #[test]
    fn open_of_another_uri_is_refused() {
        for uri in [
            None,
            Some(""),
            Some("qemu:///session"),
            Some("qemu:///system?a=b"),
            Some("qemu+ext:///system?command=/tmp/x"),
            Some("qemu+ssh://host/system"),
            Some("test:///default"),
        ] {
            let error = RpcError::OtherUri { uri: uri.map(str::to_owned) };
            assert_eq!(check(&open(uri)), Err(error));
        }
    }

    #[test]
    fn open_with_bad_arguments_is_refused() {
        let whole = open(Some(OPEN_URI));
        for length in 0..whole.len() {
            assert!(matches!(check(&whole[..length]), Err(RpcError::Truncated { .. })));
        }
        let longer = [whole, vec![0]].concat();
        assert_eq!(check(&longer), Err(RpcError::Leftover { bytes: 1 }));
    }
}
