//! Two network namespaces connected by a virtual cable (a veth pair).
//!
//! They have no names: each exists as long as a process has it open. So the kernel removes them,
//! with their interfaces, however this process ends.
//!
//! Why `unsafe`: no safe function leaves a namespace. Why sound: a dedicated thread leaves only its
//! network namespace, and shares its descriptors as before.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, anyhow, ensure};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// The source's address. Nothing but the two hosts is on this network.
pub const SOURCE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 7, 1);
/// The destination's address. See [`SOURCE_ADDRESS`].
pub const DESTINATION_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 7, 2);

/// The name of a guest's tap, in each namespace.
pub const TAP: &str = "guest";

/// A guest on one of the taps of [`Namespaces::add_taps`].
#[derive(Clone, Copy, Debug)]
pub struct TapGuest {
    /// Its address.
    pub address: Ipv4Addr,
    /// The MAC address of its network device.
    pub mac: &'static str,
}

/// The direction in which packets are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Packets that the source sends.
    ToDestination,
    /// Packets that the destination sends.
    ToSource,
    /// Both directions.
    Both,
}

/// The two namespaces.
#[derive(Debug)]
pub struct Namespaces {
    source: File,
    destination: File,
}

impl Namespaces {
    /// Creates them, with interfaces that are up.
    ///
    /// # Errors
    /// If the caller is not root, or there is no `ip`.
    pub fn make() -> anyhow::Result<Self> {
        let namespaces = Self { source: unshared()?, destination: unshared()? };
        let there = namespaces.destination_path();
        let there = there.to_str().context("a path in /proc is text")?;
        ip(
            &namespaces.source,
            &format!("link add source type veth peer destination netns {there}"),
        )?;
        for (namespace, interface, address) in [
            (&namespaces.source, "source", SOURCE_ADDRESS),
            (&namespaces.destination, "destination", DESTINATION_ADDRESS),
        ] {
            ip(namespace, &format!("address add {address}/24 dev {interface}"))?;
            ip(namespace, &format!("link set {interface} up"))?;
            ip(namespace, "link set lo up")?;
        }
        Ok(namespaces)
    }

    /// Adds a bridge to each namespace, between its end of the cable and a tap for a guest there.
    /// Packets that a guest sends to either tap reach the source's address, and packets from there
    /// reach the guest, wherever it is.
    ///
    /// # Errors
    /// Errors of `ip`.
    pub fn add_taps(&self, guest: &TapGuest) -> anyhow::Result<()> {
        for (namespace, interface) in [(&self.source, "source"), (&self.destination, "destination")]
        {
            // Without a forward delay, during which nothing would pass.
            ip(namespace, "link add bridge type bridge forward_delay 0")?;
            ip(namespace, &format!("tuntap add dev {TAP} mode tap"))?;
            ip(namespace, &format!("address flush dev {interface}"))?;
            for port in [interface, TAP] {
                ip(namespace, &format!("link set {port} master bridge up"))?;
            }
            ip(namespace, "link set bridge up")?;
        }
        ip(&self.source, &format!("address add {SOURCE_ADDRESS}/24 dev bridge"))?;
        let TapGuest { address, mac } = guest;
        ip(&self.source, &format!("neigh add {address} lladdr {mac} dev bridge nud permanent"))
    }

    /// Plugs or unplugs the cable. Packets are lost while it is unplugged, and no connection is
    /// notified.
    ///
    /// # Errors
    /// Errors of `ip`.
    pub fn set_cable(&self, plugged: bool) -> anyhow::Result<()> {
        let state = if plugged { "up" } else { "down" };
        ip(&self.source, &format!("link set source {state}"))
    }

    /// Drops every packet in this direction, until [`mend`](Self::mend). The interfaces stay up,
    /// and neither side is notified.
    ///
    /// # Errors
    /// Errors of `tc`, also if the direction already drops packets.
    pub fn black_hole(&self, direction: Direction) -> anyhow::Result<()> {
        for (namespace, interface) in self.senders(direction) {
            run(namespace, "tc", &format!("qdisc add dev {interface} root blackhole"))?;
        }
        Ok(())
    }

    /// Limits this direction to a rate in kilobits per second.
    ///
    /// # Errors
    /// Errors of `tc`.
    pub fn slow_down(&self, direction: Direction, kbit_per_s: u32) -> anyhow::Result<()> {
        for (namespace, interface) in self.senders(direction) {
            let rate = format!(
                "qdisc replace dev {interface} root tbf rate {kbit_per_s}kbit burst 16kb latency \
                 200ms"
            );
            run(namespace, "tc", &rate)?;
        }
        Ok(())
    }

    /// Removes a black hole.
    ///
    /// # Errors
    /// Errors of `tc`, also if there is no black hole.
    pub fn mend(&self, direction: Direction) -> anyhow::Result<()> {
        for (namespace, interface) in self.senders(direction) {
            run(namespace, "tc", &format!("qdisc del dev {interface} root"))?;
        }
        Ok(())
    }

    /// The interfaces that send packets in this direction.
    fn senders(&self, direction: Direction) -> impl Iterator<Item = (&File, &'static str)> {
        let source = (direction != Direction::ToSource).then_some((&self.source, "source"));
        let destination =
            (direction != Direction::ToDestination).then_some((&self.destination, "destination"));
        source.into_iter().chain(destination)
    }

    /// The source's namespace, by a path that processes of the same user can open while this
    /// exists.
    pub fn source_path(&self) -> PathBuf {
        path_of(&self.source)
    }

    /// The destination's namespace.
    pub fn destination_path(&self) -> PathBuf {
        path_of(&self.destination)
    }
}

/// Moves the calling thread, and the threads that it starts later, into a network namespace.
///
/// # Errors
/// If the descriptor is no network namespace, or the caller may not enter it.
pub fn enter(namespace: BorrowedFd<'_>) -> anyhow::Result<()> {
    move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))
        .context("a network namespace can't be entered")
}

/// The calling thread's network namespace.
///
/// # Errors
/// If there is no `/proc`.
pub fn own() -> anyhow::Result<File> {
    File::open("/proc/thread-self/ns/net").context("the network namespace can't be opened")
}

fn path_of(namespace: &File) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), namespace.as_raw_fd()).into()
}

/// A new network namespace.
fn unshared() -> anyhow::Result<File> {
    let make = || {
        // SAFETY: descriptors stay shared; see above.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.context("no new network namespace")?;
        own()
    };
    std::thread::spawn(make).join().map_err(|_| anyhow!("a thread has failed"))?
}

/// Runs `ip` in a namespace.
fn ip(namespace: &File, arguments: &str) -> anyhow::Result<()> {
    run(namespace, "ip", arguments)
}

/// Runs a program of iproute2 in a namespace.
fn run(namespace: &File, program: &str, arguments: &str) -> anyhow::Result<()> {
    let run = || {
        enter(namespace.as_fd())?;
        let output = Command::new(program)
            .args(arguments.split(' '))
            .output()
            .with_context(|| format!("no `{program}`"))?;
        let problem = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{program} {arguments}: {}", problem.trim());
        Ok(())
    };
    // Only this thread enters the namespace.
    std::thread::scope(|scope| scope.spawn(run).join())
        .map_err(|_| anyhow!("a thread has failed"))?
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn cable_carries_bytes_between_the_namespaces() {
        let namespaces = match Namespaces::make() {
            Ok(namespaces) => namespaces,
            Err(error) => {
                panic!("this test needs what is missing: {error:#}");
            }
        };
        let inside = |path: PathBuf, work: fn() -> Vec<u8>| {
            std::thread::spawn(move || {
                enter(File::open(path).unwrap().as_fd()).unwrap();
                work()
            })
        };
        let receiving = inside(namespaces.destination_path(), || {
            let listener = TcpListener::bind((DESTINATION_ADDRESS, 7001)).unwrap();
            let (mut stream, from) = listener.accept().unwrap();
            assert_eq!(from.ip(), SOURCE_ADDRESS);
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).unwrap();
            bytes
        });
        let sending = inside(namespaces.source_path(), || {
            // Retries until the other thread listens.
            let mut stream = loop {
                if let Ok(stream) = TcpStream::connect((DESTINATION_ADDRESS, 7001)) {
                    break stream;
                }
                std::thread::yield_now();
            };
            stream.write_all(b"by cable").unwrap();
            Vec::new()
        });
        sending.join().unwrap();
        assert_eq!(receiving.join().unwrap(), b"by cable");
    }

    #[test]
    fn black_hole_drops_packets_in_its_direction_only() {
        use std::net::UdpSocket;
        use std::time::Duration;

        let namespaces = match Namespaces::make() {
            Ok(namespaces) => namespaces,
            Err(error) => {
                panic!("this test needs what is missing: {error:#}");
            }
        };
        let socket = |path: PathBuf, address| {
            let bind = move || {
                enter(File::open(path).unwrap().as_fd()).unwrap();
                UdpSocket::bind((address, 7001)).unwrap()
            };
            std::thread::spawn(bind).join().unwrap()
        };
        let here = socket(namespaces.source_path(), SOURCE_ADDRESS);
        let there = socket(namespaces.destination_path(), DESTINATION_ADDRESS);
        here.connect((DESTINATION_ADDRESS, 7001)).unwrap();
        there.connect((SOURCE_ADDRESS, 7001)).unwrap();
        // What arrives does so in microseconds; the timeouts are for what must not arrive.
        let passes = |from: &UdpSocket, to: &UdpSocket, patience| {
            to.set_read_timeout(Some(patience)).unwrap();
            // If a packet is dropped at once, some kernels report it to the sender.
            from.send(b"x").is_ok() && to.recv(&mut [0]).is_ok()
        };
        let (sure, never) = (Duration::from_secs(5), Duration::from_millis(200));
        assert!(passes(&here, &there, sure) && passes(&there, &here, sure));
        namespaces.black_hole(Direction::ToDestination).unwrap();
        assert!(!passes(&here, &there, never) && passes(&there, &here, sure));
        namespaces.mend(Direction::ToDestination).unwrap();
        assert!(passes(&here, &there, sure));
        namespaces.black_hole(Direction::Both).unwrap();
        assert!(!passes(&here, &there, never) && !passes(&there, &here, never));
        namespaces.mend(Direction::Both).unwrap();
        assert!(passes(&here, &there, sure) && passes(&there, &here, sure));
    }
}
