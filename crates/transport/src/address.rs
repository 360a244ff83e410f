//! Addresses of destinations.

use std::fmt;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;

/// An address with its transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `tcp:HOST:PORT`: neither encrypted nor authenticated.
    Tcp {
        /// Host name or IP address.
        host: String,
        /// Port.
        port: u16,
    },
    /// `tls:HOST:PORT`: TLS 1.3 with both sides authenticated.
    Tls {
        /// Host name or IP address.
        host: String,
        /// Port.
        port: u16,
    },
    /// `grpc:HOST:PORT` and `grpc-ack:HOST:PORT`: gRPC over mutual TLS 1.3, for networks that pass
    /// only HTTP/2.
    Grpc {
        /// Host name or IP address.
        host: String,
        /// Port.
        port: u16,
        /// How a dialer sends and receives. A listener serves both modes.
        mode: GrpcMode,
    },
    /// `fd:N[,N...]`: connected stream sockets of this process, by descriptor number. The first is
    /// the control channel, the next ones are the data channels in order. The rest are spares for
    /// reestablished channels and query channels.
    Fd(Vec<RawFd>),
    /// `unix:PATH`: a Unix socket. The permissions of its directory protect it.
    Unix(PathBuf),
    /// `passed:PATH`: sockets that another process of this host has accepted and passes on, over
    /// the Unix socket that a listener makes at this path. There is TLS on them if the listener has
    /// an identity. It can't be dialed.
    Passed(PathBuf),
}

/// How data is sent over gRPC, in both directions of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrpcMode {
    /// `grpc:`: without waiting, up to the flow-control windows.
    Streamed,
    /// `grpc-ack:`: the next chunk is sent when the peer's reader has consumed the last one.
    Acknowledged,
}

/// A text that is not an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not an address ({reason}): use tls:HOST:PORT, grpc:HOST:PORT, \
    grpc-ack:HOST:PORT, tcp:HOST:PORT or unix:PATH"
)]
pub struct AddressError {
    text: String,
    reason: &'static str,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let bad = |reason| AddressError { text: text.to_owned(), reason };
        let (scheme, rest) = text.split_once(':').ok_or(bad("no scheme"))?;
        let rest = rest.strip_prefix("//").unwrap_or(rest);
        if let "unix" | "passed" = scheme {
            // `sun_path` has 108 bytes, including a final zero.
            return match rest.len() {
                0 => Err(bad("no path")),
                1..108 if scheme == "passed" => Ok(Self::Passed(rest.into())),
                1..108 => Ok(Self::Unix(rest.into())),
                _ => Err(bad("the path is longer than 107 bytes")),
            };
        }
        if scheme == "fd" {
            let number = |text: &str| text.parse().ok().filter(|number: &RawFd| *number >= 0);
            let numbers = rest.split(',').map(number).collect::<Option<Vec<_>>>();
            let numbers = numbers.ok_or(bad("descriptors are numbers, with commas between"))?;
            let twice = (1..numbers.len()).any(|at| numbers[..at].contains(&numbers[at]));
            return if twice {
                Err(bad("a descriptor is named twice"))
            } else {
                Ok(Self::Fd(numbers))
            };
        }
        let (host, port) = rest.rsplit_once(':').ok_or(bad("no port"))?;
        let port = port.parse().map_err(|_| bad("the port is not a number up to 65535"))?;
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match bracketed {
            Some(host) => host,
            None if host.contains(':') => return Err(bad("IPv6 addresses need brackets")),
            None => host,
        };
        if host.is_empty() {
            return Err(bad("no host"));
        }
        let host = host.to_owned();
        match scheme {
            "tcp" => Ok(Self::Tcp { host, port }),
            "tls" => Ok(Self::Tls { host, port }),
            "grpc" => Ok(Self::Grpc { host, port, mode: GrpcMode::Streamed }),
            "grpc-ack" => Ok(Self::Grpc { host, port, mode: GrpcMode::Acknowledged }),
            _ => Err(bad("unknown scheme")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, host, port) = match self {
            Self::Tcp { host, port } => ("tcp", host, port),
            Self::Tls { host, port } => ("tls", host, port),
            Self::Grpc { host, port, mode: GrpcMode::Streamed } => ("grpc", host, port),
            Self::Grpc { host, port, mode: GrpcMode::Acknowledged } => ("grpc-ack", host, port),
            Self::Unix(path) => return write!(f, "unix:{}", path.display()),
            Self::Passed(path) => return write!(f, "passed:{}", path.display()),
            Self::Fd(numbers) => {
                let numbers = numbers.iter().map(RawFd::to_string).collect::<Vec<_>>();
                return write!(f, "fd:{}", numbers.join(","));
            }
        };
        if host.contains(':') {
            write!(f, "{scheme}:[{host}]:{port}")
        } else {
            write!(f, "{scheme}:{host}:{port}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_round_trips() {
        for text in [
            "tls:host-b:7001",
            "tcp:192.0.2.1:1",
            "tls:[::1]:65535",
            "unix:/run/x.sock",
            "passed:/run/x.sock",
            "grpc:h:1",
            "grpc-ack:[::1]:2",
            "fd:3",
            "fd:3,14,5",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("tls://h:1".parse::<Address>().unwrap().to_string(), "tls:h:1");
    }

    #[test]
    fn address_error_names_the_problem() {
        for (text, reason) in [
            ("host", "no scheme"),
            ("tls:host", "no port"),
            ("tls:host:99999", "not a number"),
            ("tls:::1:5", "brackets"),
            ("ftp:host:1", "unknown scheme"),
            ("tls::1", "no host"),
            ("unix:", "no path"),
            ("fd:", "numbers"),
            ("fd:3,-1", "numbers"),
            ("fd:3,4,3", "twice"),
            ("grpc:h", "no port"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        let long = format!("unix:/{}", "x".repeat(120));
        assert!(long.parse::<Address>().is_err());
    }
}
