//! The yardsticks: memory to memory over a socket, and nothing else.
//!
//! Why `unsafe`: the copy goes from the mapping to the socket and from the socket to the mapping,
//! without a buffer between. Why sound: each thread has a part of its own, and nothing else
//! touches the two memories meanwhile.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use anyhow::anyhow;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};
use vmferry_memory::GuestMemory;

use super::guest::Links;
use super::{Sample, process_cpu_s};

/// As much as the engine puts into a frame.
const PIECE_BYTES: usize = 256 << 10;

/// Over plain TCP.
pub fn socket(
    source: &GuestMemory,
    destination: &GuestMemory,
    channels: u8,
) -> anyhow::Result<Sample> {
    copy(source, destination, channels, Ok, Ok)
}

/// Over rustls, with the engine's versions, ciphers and certificates on both sides.
pub fn rustls(
    source: &GuestMemory,
    destination: &GuestMemory,
    channels: u8,
    links: &Links,
) -> anyhow::Result<Sample> {
    let (client, server) = configurations(links)?;
    let name = ServerName::try_from("127.0.0.1")?;
    copy(
        source,
        destination,
        channels,
        |stream| {
            let mut connection = ClientConnection::new(Arc::clone(&client), name.clone())?;
            connection.set_buffer_limit(None);
            Ok(rustls::StreamOwned::new(connection, stream))
        },
        |stream| {
            let connection = ServerConnection::new(Arc::clone(&server))?;
            Ok(rustls::StreamOwned::new(connection, stream))
        },
    )
}

/// Copies with one thread per channel and side. Connections and handshakes are made before the
/// clock starts, as the engine's are.
fn copy<W: Write + Send, R: Read + Send>(
    source: &GuestMemory,
    destination: &GuestMemory,
    channels: u8,
    sending: impl Fn(TcpStream) -> anyhow::Result<W>,
    receiving: impl Fn(TcpStream) -> anyhow::Result<R>,
) -> anyhow::Result<Sample> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let mut pairs = Vec::new();
    for _ in 0..channels {
        let out = TcpStream::connect(address)?;
        let (into, _) = listener.accept()?;
        out.set_nodelay(true)?;
        into.set_nodelay(true)?;
        let (mut out, mut into) = (sending(out)?, receiving(into)?);
        // A byte each: whatever has to be agreed on is agreed on now.
        std::thread::scope(|scope| {
            let greeted = scope.spawn(|| out.write_all(&[1]).and_then(|()| out.flush()));
            into.read_exact(&mut [0])?;
            greeted.join().map_err(|_| anyhow!("a thread has failed"))??;
            anyhow::Ok(())
        })?;
        pairs.push((out, into));
    }
    let (cpu_before, begun) = (process_cpu_s(), Instant::now());
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (index, (mut out, mut into)) in pairs.into_iter().enumerate() {
            let from = part(source, index, channels);
            threads.push(scope.spawn(move || {
                for piece in from.as_slice().chunks(PIECE_BYTES) {
                    out.write_all(piece)?;
                }
                out.flush()
            }));
            let to = part(destination, index, channels);
            threads.push(scope.spawn(move || {
                for piece in to.as_mut_slice().chunks_mut(PIECE_BYTES) {
                    into.read_exact(piece)?;
                }
                Ok(())
            }));
        }
        for thread in threads {
            thread.join().map_err(|_| anyhow!("a thread has failed"))??;
        }
        anyhow::Ok(())
    })?;
    Ok(Sample {
        total_s: begun.elapsed().as_secs_f64(),
        cpu_s: process_cpu_s() - cpu_before,
        sides_cpu_s: None,
    })
}

/// A channel's share of a memory.
struct Part {
    address: usize,
    bytes: usize,
}

fn part(memory: &GuestMemory, index: usize, channels: u8) -> Part {
    let slot = &memory.slots()[0];
    let bytes = slot.len_bytes() / usize::from(channels);
    Part { address: slot.host_address() as usize + index * bytes, bytes }
}

impl Part {
    fn as_slice(&self) -> &[u8] {
        // SAFETY: the range is a part of a mapped slot, whose memory the caller holds; during the
        // copy nobody writes the source.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }
    }

    #[expect(clippy::mut_from_ref, reason = "the slice is of the mapping, not of `self`")]
    fn as_mut_slice(&self) -> &mut [u8] {
        // SAFETY: as above; parts are disjoint, each belongs to one thread, which calls this once.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) }
    }
}

fn configurations(links: &Links) -> anyhow::Result<(Arc<ClientConfig>, Arc<ServerConfig>)> {
    let host = links.directory.path().join("host");
    let chain = vec![CertificateDer::from_pem_file(host.join("host.pem"))?];
    let key = PrivateKeyDer::from_pem_file(host.join("host.key"))?;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(host.join("ca.pem"))?)?;
    let roots = Arc::new(roots);
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let versions = [&rustls::version::TLS13];
    let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&versions)?
        .with_root_certificates(Arc::clone(&roots))
        .with_client_auth_cert(chain.clone(), key.clone_key())?;
    let verifier =
        rustls::server::WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()?;
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    // As in the engine; and a sender that closes with tickets unread would reset the connection.
    server.send_tls13_tickets = 0;
    Ok((Arc::new(client), Arc::new(server)))
}
