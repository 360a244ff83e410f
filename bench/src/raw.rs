//! The yardsticks of transports: memory to memory over a socket, and nothing else. One thread per
//! channel and side; no copy of a page, no zero test, no hash, no frame. With rustls, it encrypts and
//! decrypts in addition.
//!
//! Why `unsafe`: the copy goes from the mapping to the socket and from the socket to the mapping,
//! without a buffer between. Why sound: each thread has a part of its own, and nothing else
//! touches the two memories meanwhile.

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

/// As much as the engine puts into a frame. With sockets as the system has them, writes of 16 KiB to 1 MiB are at most
/// 4 % faster.
const PIECE_BYTES: usize = 256 << 10;

/// The same with rustls, where of 16, 48, 60, 256 and 1024 KiB this is the fastest.
const TLS_PIECE_BYTES: usize = 48 << 10;

/// What the engine hands over in one call, and what it lets wait in a socket beyond what is on its way.
const TUNED_PIECE_BYTES: usize = 60 << 10;
const TUNED_UNSENT_BYTES: u32 = 256 << 10;

/// What a copy took at one side, from the moment that all channels were ready.
#[derive(Clone, Copy, Debug)]
pub struct Copied {
    /// Until the receiver had everything, in seconds.
    pub total_s: f64,
    /// CPU time of this process in seconds.
    pub cpu_s: f64,
}

/// How rustls is set up: with the engine's versions, ciphers and certificates on both sides.
pub struct Tls {
    /// Who connects.
    pub client: Arc<ClientConfig>,
    /// Who is connected to.
    pub server: Arc<ServerConfig>,
}

impl Tls {
    /// From a directory of `vmferry pki issue`.
    ///
    /// # Errors
    /// Files that are not there, or not what they should be.
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
        // As in the engine; and a sender that closes with tickets unread would reset the connection.
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

/// Makes so many connections. They wait in the listener's queue until they are accepted.
pub fn connect(address: SocketAddr, channels: u8) -> anyhow::Result<Vec<TcpStream>> {
    let connect = |_| {
        let stream = TcpStream::connect(address).with_context(|| format!("no way to {address}"))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    (0..channels).map(connect).collect()
}

/// Accepts so many connections, and no more.
pub fn accept(listener: &TcpListener, channels: u8) -> anyhow::Result<Vec<TcpStream>> {
    let accept = |_| {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    (0..channels).map(accept).collect()
}

/// Copies a memory into another one over so many channels, between two threads of this process, whose CPU time is that of
/// both sides.
///
/// # Errors
/// The sockets'.
pub fn copy_here(
    source: &GuestMemory,
    destination: &GuestMemory,
    channels: u8,
    tls: Option<&Tls>,
    tuned: bool,
) -> anyhow::Result<Copied> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let out = connect(listener.local_addr()?, channels)?;
    let into = accept(&listener, channels)?;
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(destination, into, tls));
        let copied = send(source, out, tls, tuned);
        receiving.join().map_err(|_| anyhow!("a thread has failed"))??;
        copied
    })
}

/// Sends a memory, a part on each channel, and waits until the other side says that it has it. The sockets are as the
/// system has them, or `tuned` as the engine's are.
///
/// # Errors
/// The sockets'.
pub fn send(
    memory: &GuestMemory,
    streams: Vec<TcpStream>,
    tls: Option<&Tls>,
    tuned: bool,
) -> anyhow::Result<Copied> {
    let mut piece_bytes = PIECE_BYTES;
    if tuned {
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
/// The sockets'.
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
    // A byte each way: whatever has to be agreed on is agreed on before the clock starts, as with the engine.
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

/// Does it on each channel with its part of the memory, in a thread each.
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
            thread.join().map_err(|_| anyhow!("a thread has failed"))??;
        }
        anyhow::Ok(())
    })?;
    Ok(Copied { total_s: begun.elapsed().as_secs_f64(), cpu_s: process_cpu_s() - cpu_before })
}

/// A channel's share of a memory.
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
