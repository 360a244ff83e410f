//! Channels that are gRPC calls: HTTP/2 over mutual TLS 1.3, which passes proxies and load
//! balancers. `docs/vmferry.proto` is the service; a channel is one connection with one call.
//!
//! *Streamed*, a writer goes on until the HTTP/2 window and the short queues before it are full.
//! *Acknowledged*, each message waits until the peer's reader has taken the one before.
//!
//! The threads of a channel meet its tasks in a [`flow::Flow`]:
//!
//! ```text
//! CallWriter -> Flow -> Sending -> hyper -> TlsSocket ~~> TlsSocket -> hyper -> pump -> Flow -> CallReader
//! thread        queue   task                                                    task    queue   thread
//! ```
//!
//! hyper has the connection only after the TLS handshake, which the channel's thread makes as for
//! `tls:`: nothing is allocated for a peer that is not authenticated.

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

use crate::address::GrpcWay;
use crate::stream::Stream;

pub use client::call;
#[cfg(test)]
pub use halves::Call;
pub use server::answer;

/// The application protocol of HTTP/2.
pub const ALPN: &[u8] = b"h2";

const CONTENT_TYPE: &str = "application/grpc";

/// What a peer may send before the reader takes it, beyond a [`flow::Flow`]'s queue. Not less than
/// Linux lets a TCP connection have in flight (`tcp_rmem`, 6 MiB), so that a long way is not slower
/// than over `tls:`.
const WINDOW_BYTES: u32 = 8 << 20;

/// The longest HTTP/2 frame. Between 16 and 512 KiB no size took less CPU time than another, beyond
/// the noise (on a busy machine, a fifth); nor did one worker thread instead of two, or 64 KiB at the
/// socket. A frame of this size holds most of a message.
const FRAME_BYTES: u32 = 256 << 10;

fn path(way: GrpcWay) -> &'static str {
    match way {
        GrpcWay::Streamed => "/vmferry.v1.Transport/Stream",
        GrpcWay::Acknowledged => "/vmferry.v1.Transport/Acknowledged",
    }
}

/// Whom a call names as its server.
pub fn authority(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The process's runtime, made when it is first needed.
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

/// The socket for tasks. Both stand for the same connection: closing one closes it.
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
