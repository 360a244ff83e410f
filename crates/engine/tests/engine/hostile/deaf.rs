//! A gRPC client that never reads its responses: its HTTP/2 window stays 0.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};

use super::by_hand::Pki;

/// A call on which the client has sent data.
pub struct DeafCall(rustls::StreamOwned<rustls::ClientConnection, TcpStream>);

impl DeafCall {
    /// Calls with a host's certificate, and sends these bytes on the channel.
    pub fn open(socket: TcpStream, pki: &Pki, name: &str, said: &[u8]) -> Self {
        pki.identity(name);
        let file = |file: &str| pki.path(name).join(file);
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(file("ca.pem")).unwrap()).unwrap();
        let certificate = CertificateDer::from_pem_file(file("host.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_file(file("host.key")).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate], key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let server = ServerName::try_from("127.0.0.1").unwrap();
        let client = rustls::ClientConnection::new(Arc::new(config), server).unwrap();
        let mut stream = rustls::StreamOwned::new(client, socket);
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        // SETTINGS: INITIAL_WINDOW_SIZE is 0.
        bytes.extend(frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]));
        bytes.extend(frame(1, 4, 1, &headers()));
        // One message: a data field of fewer than 128 bytes.
        let field = [&[0x0a, said.len() as u8], said].concat();
        let message = [&[0, 0, 0, 0, field.len() as u8], &field[..]].concat();
        bytes.extend(frame(0, 0, 1, &message));
        stream.write_all(&bytes).unwrap();
        stream.flush().unwrap();
        Self(stream)
    }

    /// Whether the peer has not closed the connection.
    pub fn is_open(&mut self) -> bool {
        self.0.sock.set_nonblocking(true).unwrap();
        loop {
            match self.0.read(&mut [0; 4096]) {
                Ok(0) => return false,
                // SETTINGS and other frames that need no window.
                Ok(_) => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
    }
}

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let head = [0, 0, payload.len() as u8, kind, flags, 0, 0, 0, stream];
    [&head[..], payload].concat()
}

/// HPACK without a dynamic table.
fn headers() -> Vec<u8> {
    let path = "/vmferry.v1.Transport/Stream";
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    [
        // POST, https.
        vec![0x83, 0x87, 0x04],
        text(path),
        vec![0x01],
        text("127.0.0.1"),
        // content-type
        vec![0x0f, 0x10],
        text("application/grpc"),
        vec![0x00],
        text("te"),
        text("trailers"),
    ]
    .concat()
}
