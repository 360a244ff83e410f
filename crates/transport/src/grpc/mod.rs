//! Channels as gRPC calls: HTTP/2 over mutual TLS 1.3, which passes through proxies and load
//! balancers. `docs/vmferry.proto` defines the service. A channel is one connection with one call.
//!
//! In *streamed* mode, a writer continues until the HTTP/2 window and the short queues before it
//! are full. In *acknowledged* mode, each message waits until the peer's reader has consumed the
//! previous one.
//!
//! The threads and the tasks of a channel communicate through a [`flow::Flow`]:
//!
//! ```text
//! CallWriter -> Flow -> Sending -> hyper -> TlsSocket ~~> peer
//! thread        queue   task
//!
//! peer ~~> TlsSocket -> hyper -> pump -> Flow -> CallReader
//!                                task    queue   thread
//! ```
//!
//! The channel's thread performs the TLS handshake as for `tls:`, and only then gives the
//! connection to hyper. So no memory is allocated for a peer that is not authenticated.

mod client;
mod failure;
mod flow;
mod halves;
mod message;
mod server;
mod socket;
mod tasks;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::LazyLock;

use tokio::net::TcpStream;
use tokio::runtime::Runtime;

use crate::address::GrpcMode;
use crate::stream::Stream;

pub use client::call;
#[cfg(test)]
pub use halves::Call;
pub use server::answer;

/// The application protocol of HTTP/2.
pub const ALPN: &[u8] = b"h2";

const CONTENT_TYPE: &str = "application/grpc";

/// Data that a peer may send before the reader consumes it, in addition to a [`flow::Flow`]'s
/// queue. At least as much as Linux allows in flight on a TCP connection (`tcp_rmem`, 6 MiB), so
/// that long links are not slower than with `tls:`.
const WINDOW_BYTES: u32 = 8 << 20;

/// Maximum length of an HTTP/2 frame: most of a message. Sizes from 16 to 512 KiB made no
/// measurable difference in CPU time.
const FRAME_BYTES: u32 = 256 << 10;

fn path(mode: GrpcMode) -> &'static str {
    match mode {
        GrpcMode::Streamed => "/vmferry.v1.Transport/Stream",
        GrpcMode::Acknowledged => "/vmferry.v1.Transport/Acknowledged",
    }
}

/// The `:authority` of a call.
pub fn authority(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The process's runtime, created on first use.
fn runtime() -> io::Result<&'static Runtime> {
    static RUNTIME: LazyLock<io::Result<Runtime>> = LazyLock::new(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("grpc")
            .enable_io()
            .enable_time()
            .build()
    });
    RUNTIME.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))
}

/// A duplicate of the socket for tasks. Both are the same connection: shutting one down ends it.
fn to_tokio(runtime: &Runtime, stream: &Stream) -> io::Result<TcpStream> {
    let Stream::Tcp(socket) = stream else { return Err(io::ErrorKind::Unsupported.into()) };
    let socket = socket.try_clone()?;
    socket.set_nonblocking(true)?;
    let _inside = runtime.enter();
    TcpStream::from_std(socket)
}

/// Runs hyper's tasks.
#[derive(Clone, Copy, Debug)]
struct Spawner;

impl<F> hyper::rt::Executor<F> for Spawner
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, task: F) {
        tokio::spawn(task);
    }
}
