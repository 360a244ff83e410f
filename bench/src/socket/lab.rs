//! Where the channels are, and connections there.

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

use super::PATIENCE;
use super::way::Tuning;

/// Where the two sides are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Both on the loopback interface.
    Loopback,
    /// Two network namespaces, joined by a pair of virtual Ethernet interfaces.
    Namespaces,
}

impl Place {
    /// How tables call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::Namespaces => "namespaces",
        }
    }
}

/// The places that there are.
pub struct Lab(Option<Namespaces>);

impl Lab {
    /// With namespaces, if that is possible.
    pub fn new() -> Self {
        let namespaces = Namespaces::make().inspect_err(|error| {
            eprintln!("socket: no network namespaces, so loopback only (are you root?): {error:#}");
        });
        Self(namespaces.ok())
    }

    /// All of them.
    pub fn places(&self) -> Vec<Place> {
        match self.0 {
            Some(_) => vec![Place::Loopback, Place::Namespaces],
            None => vec![Place::Loopback],
        }
    }

    /// Both ends of so many connections, with these options: the sender's first. A socket stays in the namespace
    /// in which it was made, whichever threads use it.
    ///
    /// # Errors
    /// The system's.
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
            // They wait in the listener's queue in the order in which they were made.
            let (into, _) = listener.accept()?;
            for stream in [&out, &into] {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_write_timeout(Some(PATIENCE))?;
            }
            Ok((out, into))
        };
        Vec::into_iter(out).map(pair).collect()
    }
}

/// Does it in this namespace, or here.
fn inside<T: Send>(
    namespace: Option<PathBuf>,
    work: impl FnOnce() -> anyhow::Result<T> + Send,
) -> anyhow::Result<T> {
    let Some(namespace) = namespace else { return work() };
    let work = || {
        enter(File::open(namespace)?.as_fd())?;
        work()
    };
    // Only this thread goes there.
    std::thread::scope(|scope| scope.spawn(work).join())
        .map_err(|_| anyhow!("a thread has failed"))?
}

/// What comes in has the listener's options.
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
        SockRef::from(&socket).set_tcp_notsent_lowat(bytes).context("no TCP_NOTSENT_LOWAT")?;
    }
    connect(&socket, &address).with_context(|| format!("no way to {address}"))?;
    Ok(socket.into())
}
