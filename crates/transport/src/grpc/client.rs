//! The calling side.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use http::{Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use rustls::Connection;
use tonic::{Code, Status};

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

/// Calls the peer over an established TLS session and waits for its answer.
///
/// # Errors
/// The peer's status if it does not serve such calls, or the reason why the connection ended.
pub fn call(
    stream: Arc<Stream>,
    connection: Connection,
    mode: GrpcMode,
    authority: &str,
    peer: &str,
    deadline: Instant,
) -> Result<Call, TransportError> {
    let failed = |source: io::Error| TransportError::from_io(source, peer);
    let runtime = runtime().map_err(failed)?;
    let socket = to_tokio(runtime, &stream).map_err(failed)?;
    let flow = Arc::new(Flow::default());
    if mode == GrpcMode::Acknowledged {
        flow.acknowledge_chunks();
    }
    let socket = TlsSocket::new(socket, connection, Arc::clone(&flow));
    let request = Request::builder()
        .method(Method::POST)
        .uri(format!("https://{authority}{}", path(mode)))
        .header(header::TE, "trailers")
        .header(header::CONTENT_TYPE, CONTENT_TYPE)
        .header(header::USER_AGENT, concat!("vmferry/", env!("CARGO_PKG_VERSION")))
        .body(Sending::request(Arc::clone(&flow)))
        .map_err(|error| failed(io::Error::other(error)))?;
    let (answer, answered) = mpsc::sync_channel(1);
    let channel = Call::new(Arc::clone(&flow), Arc::clone(&stream));
    runtime.spawn(async move {
        // The receiver is gone after a timeout.
        let _ = answer.send(open(socket, request, flow, stream).await);
    });
    let left = deadline.saturating_duration_since(Instant::now());
    match answered.recv_timeout(left) {
        Ok(Ok(())) => Ok(channel),
        Ok(Err(Failure::Status(status))) => {
            Err(TransportError::CallRefused { peer: peer.into(), why: in_words(&status) })
        }
        Ok(Err(failure)) => Err(failed(failure.to_read_error())),
        Err(_) => {
            channel.closer().close();
            Err(TransportError::TimedOut { peer: peer.into(), what: "the call" })
        }
    }
}

fn in_words(status: &Status) -> String {
    match (status.code(), status.message()) {
        (code, "") => format!("{code:?}"),
        (code, message) => format!("{code:?}: {message}"),
    }
}

/// Opens the call on its own connection. The call's tasks continue after this returns.
async fn open(
    socket: TlsSocket,
    request: Request<Sending>,
    flow: Arc<Flow>,
    stream: Arc<Stream>,
) -> Result<(), Failure> {
    let opened = async {
        let (mut calls, connection) = hyper::client::conn::http2::Builder::new(Spawner)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES)
            .max_send_buf_size(CHUNK_BYTES)
            .handshake(socket)
            .await?;
        let connection = tokio::spawn(async {
            // The socket and the call report its error to the flow.
            let _ = connection.await;
        });
        let response = calls.send_request(request).await?;
        Ok((calls, connection, response))
    };
    let (calls, connection, response) =
        opened.await.map_err(|error: hyper::Error| flow.cause(Failure::of_call(&error)))?;
    tokio::spawn(close_when_unused(calls, connection, Arc::clone(&flow), stream));
    check(&response).inspect_err(|failure| flow.fail(failure.clone()))?;
    tokio::spawn(pump(response.into_body(), flow));
    Ok(())
}

fn check(response: &Response<Incoming>) -> Result<(), Failure> {
    let refused = |text: String| Err(Failure::Status(Status::unimplemented(text)));
    if let Some(status) = Status::from_header_map(response.headers())
        && status.code() != Code::Ok
    {
        return Err(Failure::Status(status));
    }
    if response.status() != StatusCode::OK {
        return refused(format!("HTTP status {}", response.status()));
    }
    let kind = response.headers().get(header::CONTENT_TYPE);
    if !kind.is_some_and(|kind| kind.as_bytes().starts_with(CONTENT_TYPE.as_bytes())) {
        return refused("its answer is not gRPC".into());
    }
    Ok(())
}
