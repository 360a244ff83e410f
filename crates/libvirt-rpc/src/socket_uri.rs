//! URIs of Unix sockets.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::error::RpcError;
use crate::guest::cut;

/// The longest path of a Unix socket: `sun_path` of `sockaddr_un` has 108 bytes, one of them NUL
/// (unix(7)).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// A migration's Unix socket: `unix:///PATH`.
///
/// libvirt takes the path of such a URI for its socket (`qemuMigrationDstPrepareDirect` in
/// `src/qemu/qemu_migration.c`) and ignores host, query and fragment. Here they are errors, as is
/// every path that could mean another file than it seems to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketUri {
    path: PathBuf,
}

impl SocketUri {
    /// The socket's path: absolute, without empty, `.` and `..` components.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Parses a URI. `%XX` is decoded, as by libxml2's `xmlParseURI`, which libvirt uses
    /// (`virURIParse` in `src/util/viruri.c`).
    ///
    /// # Errors
    /// [`RpcError::NotASocket`].
    pub fn parse(uri: &str) -> Result<Self, RpcError> {
        let path = decode(uri)
            .map_err(|detail| RpcError::NotASocket { uri: cut(uri).to_owned(), detail })?;
        Ok(Self { path: PathBuf::from(OsString::from_vec(path)) })
    }
}

fn decode(uri: &str) -> Result<Vec<u8>, &'static str> {
    let Some(rest) = uri.strip_prefix("unix://") else {
        return Err("the scheme is not unix");
    };
    if !rest.starts_with('/') {
        return Err("the path is not absolute");
    }
    let mut path = Vec::new();
    let mut bytes = rest.bytes();
    while let Some(byte) = bytes.next() {
        let byte = match byte {
            b'%' => {
                let digits = [bytes.next(), bytes.next()].map(|digit| digit.and_then(hex_digit));
                let [Some(high), Some(low)] = digits else { return Err("bad percent-encoding") };
                high << 4 | low
            }
            b'?' => return Err("it has a query"),
            b'#' => return Err("it has a fragment"),
            // The characters of a path segment (RFC 3986, pchar).
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' => byte,
            _ if b"-._~!$&'()*+,;=:@".contains(&byte) => byte,
            _ => return Err("it has a character that a URI cannot contain"),
        };
        if byte.is_ascii_control() {
            return Err("the path has a control character");
        }
        path.push(byte);
    }
    if path.len() > MAX_SOCKET_PATH_BYTES {
        return Err("the path is longer than 107 bytes");
    }
    match path.split(|byte| *byte == b'/').skip(1).find(|part| matches!(*part, b"" | b"." | b".."))
    {
        Some(b"") => Err("the path has an empty component"),
        Some(_) => Err("the path has the component . or .."),
        None => Ok(path),
    }
}

fn hex_digit(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|digit| digit as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(uri: &str) -> String {
        SocketUri::parse(uri).unwrap().path().to_str().unwrap().to_owned()
    }

    #[test]
    fn parse_accepts_sockets() {
        assert_eq!(path("unix:///run/vmferry/a.sock"), "/run/vmferry/a.sock");
        assert_eq!(path("unix:///a%20b/%2541/c,d=1"), "/a b/%41/c,d=1");
        assert_eq!(path("unix:///%C3%A9/..."), "/é/...");
        let longest = format!("/{}", "x".repeat(MAX_SOCKET_PATH_BYTES - 1));
        assert_eq!(path(&format!("unix://{longest}")), longest);
    }

    #[test]
    fn parse_refuses_everything_else() {
        let long = format!("unix:///{}", "x".repeat(MAX_SOCKET_PATH_BYTES));
        for (uri, expected) in [
            ("", "scheme"),
            ("tcp:host:49152", "scheme"),
            ("tcp://host", "scheme"),
            ("rdma://host", "scheme"),
            ("UNIX:///a", "scheme"),
            ("unix:/a", "scheme"),
            ("/a", "scheme"),
            ("unix://a", "absolute"),
            ("unix://host/a", "absolute"),
            ("unix://", "absolute"),
            ("unix:///", "empty component"),
            ("unix:////a", "empty component"),
            ("unix:///a//b", "empty component"),
            ("unix:///a/", "empty component"),
            ("unix:///a%2f", "empty component"),
            ("unix:///a/../b", ".."),
            ("unix:///a/%2e%2E", ".."),
            ("unix:///./a", ".."),
            ("unix:///a?socket=b", "query"),
            ("unix:///a#b", "fragment"),
            ("unix:///a%00", "control"),
            ("unix:///a%0a", "control"),
            ("unix:///a b", "character"),
            ("unix:///a\0", "character"),
            ("unix:///é", "character"),
            ("unix:///a%", "percent"),
            ("unix:///a%2", "percent"),
            ("unix:///a%+1", "percent"),
            (&long, "longer"),
        ] {
            let error = SocketUri::parse(uri).unwrap_err().to_string();
            assert!(error.contains(expected), "{uri}: {error}");
        }
    }
}
