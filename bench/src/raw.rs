//! The yardsticks of the transports: memory is copied over a socket, with one thread per channel
//! and side. Pages are not copied, tested or hashed, and there are no frames. With rustls, the data
//! is also encrypted and decrypted.
//!
//! Why `unsafe`: the data goes directly between the mapping and the socket, without a buffer. Why
//! sound: each thread has its own part, and nothing else accesses the two memories during the copy.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, anyhow};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};
use socket2::SockRef;
use vmferry_memory::GuestMemory;

use crate::machine::process_cpu_s;

/// Bytes per write: the engine's frame size. With default sockets, writes of 16 KiB to 1 MiB are at
/// most 4 % faster.
const PIECE_BYTES: usize = 256 << 10;

/// Bytes per write with rustls: the fastest of 16, 48, 60, 256 and 1024 KiB.
const TLS_PIECE_BYTES: usize = 48 << 10;

/// The engine's write size, and its limit of unsent bytes in a socket.
const TUNED_PIECE_BYTES: usize = 60 << 10;
const TUNED_UNSENT_BYTES: u32 = 256 << 10;

/// The cost of a copy on one side, measured from when all channels were ready.
#[derive(Clone, Copy, Debug)]
pub struct Copied {
    /// Seconds until the receiver had everything.
    pub total_s: f64,
    /// CPU time of this process in seconds.
    pub cpu_s: f64,
}

/// The rustls configuration: the engine's versions, ciphers and certificates on both sides.
pub struct Tls {
    /// The connecting side.
    pub client: Arc<ClientConfig>,
    /// The listening side.
    pub server: Arc<ServerConfig>,
}

impl Tls {
    /// Loads the certificates from a directory made by `vmferry pki issue`.
    ///
    /// # Errors
    /// The files are missing or invalid.
    pub fn load(host: &Path) -> anyhow::Result<Self> {
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
        let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
            roots,
            Arc::clone(&provider),
        )
        .build()?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)?;
        // The engine sends no tickets either. A sender that closes with unread tickets would reset
        // the connection.
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

/// Opens `channels` connections. They wait in the listener's queue until they are accepted.
pub fn connect(address: SocketAddr, channels: u8) -> anyhow::Result<Vec<TcpStream>> {
    let connect = |_| {
        let stream = TcpStream::connect(address)
            .with_context(|| format!("could not connect to {address}"))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    (0..channels).map(connect).collect()
}

/// Accepts exactly `channels` connections.
pub fn accept(listener: &TcpListener, channels: u8) -> anyhow::Result<Vec<TcpStream>> {
    let accept = |_| {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    (0..channels).map(accept).collect()
}

/// The socket options of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sockets {
    /// The system's defaults.
    Default,
    /// The engine's write size and limit of unsent bytes.
    Tuned,
}

/// Copies a memory over `channels` channels between two threads of this process. The CPU time is
/// that of both sides.
///
/// # Errors
/// A socket failed.
pub fn copy_here(
    source: &GuestMemory,
    destination: &GuestMemory,
    channels: u8,
    tls: Option<&Tls>,
    sockets: Sockets,
) -> anyhow::Result<Copied> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let out = connect(listener.local_addr()?, channels)?;
    let into = accept(&listener, channels)?;
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(destination, into, tls));
        let copied = send(source, out, tls, sockets);
        receiving.join().map_err(|_| anyhow!("a thread panicked"))??;
        copied
    })
}

/// Sends a memory, one part per channel, and waits until the receiver confirms it.
///
/// # Errors
/// A socket failed.
pub fn send(
    memory: &GuestMemory,
    streams: Vec<TcpStream>,
    tls: Option<&Tls>,
    sockets: Sockets,
) -> anyhow::Result<Copied> {
    let mut piece_bytes = PIECE_BYTES;
    if sockets == Sockets::Tuned {
        piece_bytes = TUNED_PIECE_BYTES;
        for stream in &streams {
            SockRef::from(stream).set_tcp_notsent_lowat(TUNED_UNSENT_BYTES)?;
        }
    }
    let Some(tls) = tls else { return send_over(memory, streams, piece_bytes) };
    let client = |stream: TcpStream| {
        let name = ServerName::IpAddress(stream.peer_addr()?.ip().into());
        let mut connection = ClientConnection::new(Arc::clone(&tls.client), name)?;
        connection.set_buffer_limit(None);
        anyhow::Ok(rustls::StreamOwned::new(connection, stream))
    };
    let streams = streams.into_iter().map(client).collect::<Result<_, _>>()?;
    send_over(memory, streams, TLS_PIECE_BYTES)
}

/// Receives a memory.
///
/// # Errors
/// A socket failed.
pub fn receive(
    memory: &GuestMemory,
    streams: Vec<TcpStream>,
    tls: Option<&Tls>,
) -> anyhow::Result<Copied> {
    let Some(tls) = tls else { return receive_over(memory, streams, PIECE_BYTES) };
    let server = |stream| {
        let connection = ServerConnection::new(Arc::clone(&tls.server))?;
        anyhow::Ok(rustls::StreamOwned::new(connection, stream))
    };
    let streams = streams.into_iter().map(server).collect::<Result<_, _>>()?;
    receive_over(memory, streams, TLS_PIECE_BYTES)
}

fn send_over<S: Read + Write + Send>(
    memory: &GuestMemory,
    mut streams: Vec<S>,
    piece_bytes: usize,
) -> anyhow::Result<Copied> {
    // One byte in each direction completes the handshake before the clock starts, as in the engine.
    for stream in &mut streams {
        stream.write_all(&[1])?;
        stream.flush()?;
        stream.read_exact(&mut [0])?;
    }
    on_each(memory, streams, |part, stream| {
        for piece in part.as_slice().chunks(piece_bytes) {
            stream.write_all(piece)?;
        }
        stream.flush()?;
        stream.read_exact(&mut [0])
    })
}

fn receive_over<S: Read + Write + Send>(
    memory: &GuestMemory,
    mut streams: Vec<S>,
    piece_bytes: usize,
) -> anyhow::Result<Copied> {
    for stream in &mut streams {
        stream.read_exact(&mut [0])?;
        stream.write_all(&[1])?;
        stream.flush()?;
    }
    on_each(memory, streams, |part, stream| {
        for piece in part.as_mut_slice().chunks_mut(piece_bytes) {
            stream.read_exact(piece)?;
        }
        stream.write_all(&[1])?;
        stream.flush()
    })
}

/// Copies each channel's part of the memory in its own thread.
fn on_each<S: Send>(
    memory: &GuestMemory,
    streams: Vec<S>,
    copy: impl Fn(Part, &mut S) -> std::io::Result<()> + Sync,
) -> anyhow::Result<Copied> {
    let (cpu_before, begun) = (process_cpu_s(), Instant::now());
    let parts = streams.len();
    std::thread::scope(|scope| {
        let start = |(index, mut stream)| {
            let (part, copy) = (part(memory, index, parts), &copy);
            scope.spawn(move || copy(part, &mut stream))
        };
        let threads: Vec<_> = streams.into_iter().enumerate().map(start).collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        anyhow::Ok(())
    })?;
    Ok(Copied { total_s: begun.elapsed().as_secs_f64(), cpu_s: process_cpu_s() - cpu_before })
}

/// A channel's part of a memory.
struct Part {
    address: usize,
    bytes: usize,
}

fn part(memory: &GuestMemory, index: usize, parts: usize) -> Part {
    let slot = &memory.slots()[0];
    let bytes = slot.len_bytes() / parts;
    Part { address: slot.host_address() as usize + index * bytes, bytes }
}

impl Part {
    fn as_slice(&self) -> &[u8] {
        // SAFETY: the range is part of a mapped slot, whose memory the caller holds. Nothing writes
        // the source during the copy.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }
    }

    #[expect(clippy::mut_from_ref, reason = "the slice is of the mapping, not of `self`")]
    fn as_mut_slice(&self) -> &mut [u8] {
        // SAFETY: as above. The parts are disjoint, and each belongs to one thread, which calls
        // this once.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) }
    }
}
