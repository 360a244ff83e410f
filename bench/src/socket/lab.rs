//! The places of the two sides, and connections between them.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::{Context, anyhow};
use rustix::net::sockopt::{
    set_socket_recv_buffer_size, set_socket_reuseaddr, set_socket_send_buffer_size,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, listen, socket_with};
use socket2::SockRef;
use vmferry_net_lab::{DESTINATION_ADDRESS, Namespaces, enter};

use super::TIMEOUT;
use super::way::Tuning;

/// The place of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Both sides use the loopback interface.
    Loopback,
    /// Each side is in its own network namespace; a pair of virtual Ethernet interfaces joins them.
    Namespaces,
}

impl Place {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::Namespaces => "namespaces",
        }
    }
}

/// The available places.
pub struct Lab(Option<Namespaces>);

impl Lab {
    /// Creates the namespaces if the process is allowed to.
    pub fn new() -> Self {
        let namespaces = Namespaces::make().inspect_err(|error| {
            eprintln!("socket: no network namespaces, so loopback only (are you root?): {error:#}");
        });
        Self(namespaces.ok())
    }

    /// The available places.
    pub fn places(&self) -> Vec<Place> {
        match self.0 {
            Some(_) => vec![Place::Loopback, Place::Namespaces],
            None => vec![Place::Loopback],
        }
    }

    /// Opens `channels` connections with these options and returns both ends, the sender's first. A
    /// socket stays in the namespace in which it was created, whichever thread uses it.
    ///
    /// # Errors
    /// A system call failed.
    pub fn connect(
        &self,
        place: Place,
        tuning: Tuning,
        channels: u64,
    ) -> anyhow::Result<Vec<(TcpStream, TcpStream)>> {
        let namespaces = self.0.as_ref().filter(|_| place == Place::Namespaces);
        let host = namespaces.map_or(Ipv4Addr::LOCALHOST, |_| DESTINATION_ADDRESS);
        let there = namespaces.map(Namespaces::destination_path);
        let listener = inside(there, || listener(host.into(), tuning))?;
        let address = listener.local_addr()?;
        let here = namespaces.map(Namespaces::source_path);
        let out = inside(here, || (0..channels).map(|_| dial(address, tuning)).collect())?;
        let pair = |out: TcpStream| {
            // Connections wait in the listener's queue in the order in which they were made.
            let (into, _) = listener.accept()?;
            for stream in [&out, &into] {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
                stream.set_write_timeout(Some(TIMEOUT))?;
            }
            Ok((out, into))
        };
        Vec::into_iter(out).map(pair).collect()
    }
}

/// Runs `work` in this namespace, or in the current one.
pub fn inside<T: Send>(
    namespace: Option<PathBuf>,
    work: impl FnOnce() -> anyhow::Result<T> + Send,
) -> anyhow::Result<T> {
    let Some(namespace) = namespace else { return work() };
    let work = || {
        enter(File::open(namespace)?.as_fd())?;
        work()
    };
    // Only this new thread enters the namespace.
    std::thread::scope(|scope| scope.spawn(work).join())
        .map_err(|_| anyhow!("a thread panicked"))?
}

/// Accepted sockets inherit the listener's options.
fn listener(host: IpAddr, tuning: Tuning) -> anyhow::Result<TcpListener> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_reuseaddr(&socket, true)?;
    if let Some(bytes) = tuning.receive_bytes {
        set_socket_recv_buffer_size(&socket, bytes)?;
    }
    bind(&socket, &SocketAddr::new(host, 0))?;
    listen(&socket, 16)?;
    Ok(socket.into())
}

fn dial(address: SocketAddr, tuning: Tuning) -> anyhow::Result<TcpStream> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if let Some(bytes) = tuning.send_bytes {
        set_socket_send_buffer_size(&socket, bytes)?;
    }
    if let Some(bytes) = tuning.unsent_bytes {
        SockRef::from(&socket)
            .set_tcp_notsent_lowat(bytes)
            .context("could not set TCP_NOTSENT_LOWAT")?;
    }
    connect(&socket, &address).with_context(|| format!("could not connect to {address}"))?;
    Ok(socket.into())
}
