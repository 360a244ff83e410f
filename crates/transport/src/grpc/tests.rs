//! A listener against another gRPC library, and against peers that do not speak gRPC. The client is
//! tonic's, with its own framing.

use std::future::poll_fn;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use http::{Request, Response, uri::PathAndQuery};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper::rt::Write as _;
use rustix::net::sockopt::set_socket_linger;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Code, Status};

use super::*;
use crate::handshake::shake_hands;
use crate::tests::{Pki, listen};
use crate::{Address, Channel, Listener, TlsIdentity, TransportError};

const TIMEOUT: Duration = Duration::from_secs(10);

/// A codec that passes messages through as bytes.
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

struct Calls(SendRequest<Body>);

impl tower_service::Service<Request<Body>> for Calls {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// Establishes TLS with a listener as an HTTP/2 client.
fn connect(listener: &Listener, identity: &TlsIdentity) -> (Arc<Stream>, Connection) {
    let Address::Grpc { host, port, .. } = listener.local_address().clone() else { panic!() };
    let socket = std::net::TcpStream::connect((host.as_str(), port)).unwrap();
    let stream = Arc::new(Stream::Tcp(socket));
    let name = ServerName::try_from(host).unwrap();
    let connection = ClientConnection::new(identity.client_config(ALPN, None), name).unwrap();
    let connection = Connection::Client(connection);
    let connection = shake_hands(&stream, connection, ALPN, "it", TIMEOUT).unwrap();
    (stream, connection)
}

async fn open((stream, connection): (Arc<Stream>, Connection)) -> SendRequest<Body> {
    let socket = to_tokio(runtime().unwrap(), &stream).unwrap();
    let socket = socket::TlsSocket::new(socket, connection, Arc::default());
    let (calls, connection) =
        hyper::client::conn::http2::Builder::new(Spawner).handshake(socket).await.unwrap();
    tokio::spawn(connection);
    calls
}

/// Makes a call with tonic's client, and returns the messages of the answer.
async fn call(
    connection: (Arc<Stream>, Connection),
    path: &'static str,
    messages: Vec<Vec<u8>>,
) -> Result<Vec<Bytes>, Status> {
    let calls = Calls(open(connection).await);
    let mut client = tonic::client::Grpc::with_origin(calls, "https://vmferry".parse().unwrap());
    client.ready().await.unwrap();
    let messages = tonic::Request::new(tokio_stream::iter(messages));
    let path = PathAndQuery::from_static(path);
    let mut answer = client.streaming(messages, path, Raw).await?.into_inner();
    let mut received = Vec::new();
    while let Some(message) = answer.message().await? {
        received.push(message);
    }
    Ok(received)
}

fn world() -> (Listener, Arc<TlsIdentity>) {
    let pki = Pki::new();
    (listen("grpc:127.0.0.1:0", Some(pki.local("a"))), pki.local("b"))
}

fn accept(listener: &Listener) -> Result<Channel, TransportError> {
    listener.accept().unwrap().unwrap().handshake(TIMEOUT)
}

#[test]
fn call_of_another_grpc_library_works() {
    let (listener, identity) = world();
    std::thread::scope(|scope| {
        let served = scope.spawn(|| {
            let (mut reader, mut writer) = accept(&listener).unwrap().split();
            let mut question = String::new();
            reader.read_to_string(&mut question).unwrap();
            writer.write_all(b"forty-two").unwrap();
            writer.finish().unwrap();
            question
        });
        // In protobuf: data = "6 by ", data = "7", end = true.
        let messages = vec![b"\x0a\x056 by ".to_vec(), b"\x0a\x017".to_vec(), b"\x18\x01".to_vec()];
        let connection = connect(&listener, &identity);
        let answer = call(connection, path(GrpcMode::Streamed), messages);
        let answer = runtime().unwrap().block_on(answer).unwrap();
        assert_eq!(answer, [&b"\x0a\x09forty-two"[..], b"\x18\x01"]);
        assert_eq!(served.join().unwrap(), "6 by 7");
    });
}

#[test]
fn protocol_violation_is_reported_to_both_sides_and_never_looks_like_an_end() {
    let (listener, identity) = world();
    for (message, expected) in [
        (&b"\x22\x01x"[..], "unknown field"),
        (b"\x10\x05", "an acknowledgement of data that was not sent"),
        (b"", "it is empty"),
    ] {
        std::thread::scope(|scope| {
            let served = scope.spawn(|| {
                let (mut reader, _writer) = accept(&listener).unwrap().split();
                reader.read_to_end(&mut Vec::new()).unwrap_err().to_string()
            });
            let connection = connect(&listener, &identity);
            let answer = call(connection, path(GrpcMode::Acknowledged), vec![message.to_vec()]);
            let status = runtime().unwrap().block_on(answer).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
            assert!(status.message().contains(expected), "{status:?}");
            assert!(served.join().unwrap().contains(expected));
        });
    }
}

#[test]
fn other_service_is_unimplemented_and_reported_to_the_operator() {
    let (listener, identity) = world();
    std::thread::scope(|scope| {
        let served = scope.spawn(|| accept(&listener).unwrap_err().to_string());
        let connection = connect(&listener, &identity);
        let answer = call(connection, "/grpc.health.v1.Health/Check", vec![vec![]]);
        let status = runtime().unwrap().block_on(answer).unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented, "{status:?}");
        let error = served.join().unwrap();
        assert!(error.contains("speaks gRPC for /grpc.health.v1.Health/Check"), "{error}");
    });
}

#[test]
fn peer_without_grpc_is_refused_with_a_reason() {
    let (listener, identity) = world();
    std::thread::scope(|scope| {
        let served = scope.spawn(|| accept(&listener).unwrap_err().to_string());
        let connection = connect(&listener, &identity);
        let asked = async {
            let request = Request::get("https://vmferry/index.html").body(Body::empty()).unwrap();
            open(connection).await.send_request(request).await.unwrap()
        };
        let response = runtime().unwrap().block_on(asked);
        assert_eq!(
            Status::from_header_map(response.headers()).unwrap().code(),
            Code::Unimplemented
        );
        let error = served.join().unwrap();
        assert!(error.contains("speaks HTTP/2 for /index.html"), "{error}");
    });
    std::thread::scope(|scope| {
        let served = scope.spawn(|| accept(&listener).unwrap_err());
        let (stream, mut connection) = connect(&listener, &identity);
        connection.writer().write_all(b"GET / HTTP/1.1\r\nHost: it\r\n\r\n").unwrap();
        connection.write_tls(&mut &*stream).unwrap();
        let error = served.join().unwrap();
        assert!(matches!(error, TransportError::NotOurCall { .. }), "{error:?}");
        assert!(error.to_string().contains("not HTTP/2"), "{error}");
    });
}

/// The peer's alert arrives, and then a reset. A write that fails before the alert is read reports
/// the alert.
#[test]
fn failed_write_reports_what_the_peer_said_before_it_closed_the_connection() {
    let pki = Pki::new();
    let identity = pki.local("a");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let refusing = std::thread::spawn(move || {
        let stream = Stream::Tcp(listener.accept().unwrap().0);
        let connection = ServerConnection::new(identity.server_config(ALPN)).unwrap();
        let refused = shake_hands(&stream, Connection::Server(connection), ALPN, "it", TIMEOUT);
        assert!(refused.unwrap_err().is_authentication());
        // The system resets the connection when it is closed, as if unread data were left.
        let Stream::Tcp(socket) = stream else { unreachable!() };
        set_socket_linger(&socket, Some(Duration::ZERO)).unwrap();
    });
    let stream = Stream::Tcp(socket);
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let connection = ClientConnection::new(pki.stranger().client_config(ALPN, None), name).unwrap();
    let connection = Connection::Client(connection);
    let connection = shake_hands(&stream, connection, ALPN, "it", TIMEOUT).unwrap();
    refusing.join().unwrap();
    let flow = Arc::new(flow::Flow::default());
    let socket = to_tokio(runtime().unwrap(), &stream).unwrap();
    let mut socket = socket::TlsSocket::new(socket, connection, Arc::clone(&flow));
    let error = runtime().unwrap().block_on(async {
        let mut written = async |bytes: &[u8]| {
            poll_fn(|context| Pin::new(&mut socket).poll_write(context, bytes)).await?;
            poll_fn(|context| Pin::new(&mut socket).poll_flush(context)).await
        };
        written(b"PRI * HTTP/2.0").await.unwrap_err()
    });
    assert!(TransportError::from_io(error, "it").is_authentication());
}
