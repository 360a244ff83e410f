//! The side that receives calls.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::time::Instant;

use http::{HeaderValue, Request, Response, header};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use parking_lot::Mutex;
use rustls::Connection;
use tonic::Status;

use super::failure::Failure;
use super::flow::{CHUNK_BYTES, Flow};
use super::halves::Call;
use super::socket::TlsSocket;
use super::tasks::{Sending, close_when_unused, pump};
use super::{CONTENT_TYPE, FRAME_BYTES, Spawner, WINDOW_BYTES, path, runtime, to_tokio};
use crate::address::GrpcMode;
use crate::error::TransportError;
use crate::stream::Stream;
use crate::transport::Transport as _;

/// Waits for the call of a peer with an established TLS session.
///
/// # Errors
/// What the peer requested instead.
pub fn answer(
    stream: Arc<Stream>,
    connection: Connection,
    peer: &str,
    deadline: Instant,
) -> Result<Call, TransportError> {
    let failed = |source: io::Error| TransportError::from_io(source, peer);
    let runtime = runtime().map_err(failed)?;
    let socket = to_tokio(runtime, &stream).map_err(failed)?;
    let flow = Arc::new(Flow::default());
    let socket = TlsSocket::new(socket, connection, Arc::clone(&flow));
    let (called, calls) = mpsc::sync_channel(1);
    let connection = runtime.spawn(serve(socket, Arc::clone(&flow), called));
    runtime.spawn(close_when_unused((), connection, Arc::clone(&flow), Arc::clone(&stream)));
    let left = deadline.saturating_duration_since(Instant::now());
    let error = match calls.recv_timeout(left) {
        Ok(Ok(())) => return Ok(Call::new(flow, stream)),
        Ok(Err(what)) => return Err(TransportError::NotOurCall { peer: peer.into(), what }),
        Err(RecvTimeoutError::Timeout) => {
            TransportError::TimedOut { peer: peer.into(), what: "calling" }
        }
        Err(RecvTimeoutError::Disconnected) => match flow.cause(Failure::Ended) {
            Failure::Protocol(why) => TransportError::NotOurCall {
                peer: peer.into(),
                what: format!("a protocol that is not HTTP/2 ({why})"),
            },
            failure => failed(failure.to_read_error()),
        },
    };
    Call::new(flow, stream).closer().close();
    Err(error)
}

/// Reports that the one call of a connection has arrived, or what arrived instead.
type Called = SyncSender<Result<(), String>>;

async fn serve(socket: TlsSocket, flow: Arc<Flow>, called: Called) {
    let called = Mutex::new(Some(called));
    let service = service_fn(|request: Request<Incoming>| {
        let response = match called.lock().take() {
            Some(called) => accept(request, &flow, &called),
            None => Status::resource_exhausted("a connection carries one call").into_http(),
        };
        std::future::ready(Ok::<_, Infallible>(response))
    });
    let connection = http2::Builder::new(Spawner)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .max_send_buf_size(CHUNK_BYTES)
        .max_concurrent_streams(1)
        .max_header_list_size(16 << 10)
        .serve_connection(socket, service);
    if let Err(error) = connection.await
        && called.lock().is_some()
    {
        // The thread that waits for the call gets the reason. Once a call exists, the socket
        // reports errors to the writer, and the call's body reports them to the reader after the
        // received data.
        flow.fail_call(Failure::of_call(&error));
    }
}

fn accept(request: Request<Incoming>, flow: &Arc<Flow>, called: &Called) -> Response<Sending> {
    let asked = request.uri().path();
    let mode =
        [GrpcMode::Streamed, GrpcMode::Acknowledged].into_iter().find(|mode| path(*mode) == asked);
    let kind = request.headers().get(header::CONTENT_TYPE);
    let is_grpc = kind.is_some_and(|kind| kind.as_bytes().starts_with(CONTENT_TYPE.as_bytes()));
    let (Some(mode), true) = (mode, is_grpc) else {
        let protocol = if is_grpc { "gRPC" } else { "HTTP/2" };
        let what = format!("{protocol} for {}", asked.escape_debug());
        let _ = called.send(Err(what));
        // The connection stays open for a while, so that the peer can read the answer.
        flow.fail(Failure::Closed);
        return Status::unimplemented("only vmferry.v1.Transport is served here").into_http();
    };
    if mode == GrpcMode::Acknowledged {
        flow.acknowledge_chunks();
    }
    // The waiting thread may have timed out and closed the connection.
    if called.send(Ok(())).is_err() {
        return Status::deadline_exceeded("the call came too late").into_http();
    }
    tokio::spawn(pump(request.into_body(), Arc::clone(flow)));
    let mut response = Response::new(Sending::response(Arc::clone(flow)));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
    response
}
