//! The announcements of a guest on its network after a migration: as soon as it runs, on either
//! side.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmferry_net_lab::{Namespaces, TAP, TapGuest, enter};
use vmferry_qemu_lab::{Backend, Machine, Version};

use crate::support::proxy::{Message, Proxy};
use crate::support::scene::{Scene, Way};
use crate::support::{Running, in_parallel};

const MAC: &str = "52:54:00:77:07:03";
const MAC_BYTES: [u8; 6] = [0x52, 0x54, 0, 0x77, 7, 3];

/// Bounds the wait for a frame: reaching it is a failure.
const PATIENCE_S: u64 = 60;

/// After loading a guest, QEMU announces it five times within a second. A silence of this length
/// means that it is done.
const SILENCE_S: u64 = 3;

/// The announcements that QEMU itself sends for a guest it has loaded.
const OF_A_LOAD: u32 = 5;

/// The frames that leave a guest's tap device.
struct Tap(OwnedFd);

impl Tap {
    /// Listens in a network namespace.
    fn listen(namespace: &Path) -> Self {
        let namespace = File::open(namespace).unwrap();
        // A thread of its own, because it enters the namespace.
        std::thread::spawn(move || {
            enter(namespace.as_fd()).unwrap();
            Self::open().unwrap()
        })
        .join()
        .unwrap()
    }

    fn open() -> io::Result<Self> {
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: a system call without pointers.
        let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, i32::from(protocol)) };
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just created, and nothing else owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let name = std::ffi::CString::new(TAP).unwrap();
        // SAFETY: the name ends with a zero and outlives the call.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        // SAFETY: an all-zero address is valid.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = index as i32;
        let length = size_of::<libc::sockaddr_ll>() as u32;
        // SAFETY: the address has this length and outlives the call.
        let bound = unsafe {
            libc::bind(
                std::os::fd::AsRawFd::as_raw_fd(&socket),
                (&raw const address).cast(),
                length,
            )
        };
        if bound < 0 { Err(io::Error::last_os_error()) } else { Ok(Self(socket)) }
    }

    /// The guest's next announcement, a RARP frame with its own address. `None` if none arrives
    /// within `seconds`.
    fn announcement(&self, seconds: u64) -> Option<()> {
        let mut frame = [0; 2048];
        let until = Instant::now() + Duration::from_secs(seconds);
        loop {
            let mut polled = [PollFd::new(&self.0, PollFlags::IN)];
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).unwrap();
            if poll(&mut polled, Some(&left)).unwrap() == 0 {
                return None;
            }
            let (read, is_from_guest) = self.frame(&mut frame);
            if is_from_guest
                && read >= 14
                && frame[6..12] == MAC_BYTES
                && frame[12..14] == [0x80, 0x35]
            {
                return Some(());
            }
        }
    }

    /// The next frame, and whether it is from the guest: the bridge also forwards frames of other
    /// machines.
    fn frame(&self, into: &mut [u8]) -> (usize, bool) {
        // SAFETY: an all-zero address is valid.
        let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut length = size_of::<libc::sockaddr_ll>() as u32;
        // SAFETY: both buffers have the given lengths and outlive the call.
        let read = unsafe {
            libc::recvfrom(
                std::os::fd::AsRawFd::as_raw_fd(&self.0),
                into.as_mut_ptr().cast(),
                into.len(),
                0,
                (&raw mut from).cast(),
                &raw mut length,
            )
        };
        assert!(read >= 0, "{}", io::Error::last_os_error());
        (read as usize, from.sll_pkttype != libc::PACKET_OUTGOING)
    }

    /// Reads announcements until there is silence, and returns their number.
    fn drain(&self) -> u32 {
        let mut count = 0;
        while self.announcement(SILENCE_S).is_some() {
            count += 1;
        }
        count
    }
}

/// A guest with a tap in the first of two networks.
fn network_of(way: Way) -> (Scene, Namespaces, [Tap; 2]) {
    let network = Namespaces::make().unwrap();
    network.add_taps(&TapGuest { address: [10, 77, 7, 3].into(), mac: MAC }).unwrap();
    let taps = [network.source_path(), network.destination_path()].map(|path| Tap::listen(&path));
    let netdev = format!("tap,id=net,ifname={TAP},script=no,downscript=no");
    let device = format!("virtio-net-pci,netdev=net,mac={MAC}");
    let machine = Machine {
        backend: Backend::File,
        namespace: Some(network.source_path()),
        ..Machine::on_kvm(Version::V10_0, "freed=40 hot=8,rate=40000")
    };
    let machine = machine.with(&["-netdev", &netdev, "-device", &device]);
    let mut scene = Scene::of(machine, way);
    scene.machine.namespace = Some(network.destination_path());
    (scene, network, taps)
}

#[test]
fn guest_is_announced_at_the_destination_once_it_runs() {
    let (mut scene, _network, [_, there_tap]) = network_of(Way::Attached);
    let (mut there, mut receiving, address) = scene.receive_plain();
    let proxy = Proxy::holding(&address, "127.0.0.1", Some(Message::Ready));
    let send = scene.send(&proxy.address, &["--plain"]);
    proxy.await_held();
    // The guest may never run here. The frames that QEMU sends after loading the guest wait until
    // the guest runs.
    assert_eq!(there_tap.drain(), 0, "a paused guest was announced");
    proxy.release();
    send.finish().exited(0);
    receiving.event("received");
    there_tap.announcement(PATIENCE_S).expect("the guest's arrival was not announced");
    let announced = 1 + there_tap.drain();
    println!("{announced} announcements of a guest that runs");
    assert!(announced > OF_A_LOAD, "{announced}: only those that QEMU sends after a load");
    there.check_guest();
}

/// `end` ends the migration of a guest that was loaded at the destination: the guest runs on at the
/// source.
fn is_announced_here_after(way: Way, end: impl FnOnce(Running, &Proxy)) {
    let (mut scene, _network, [here_tap, _]) = network_of(way);
    let (_there, mut receiving, address) = scene.receive_plain();
    let proxy = Proxy::holding(&address, "127.0.0.1", Some(Message::Ready));
    let send = scene.send(&proxy.address, &["--plain", "--reconnect-timeout", "1s"]);
    proxy.await_held();
    // Announcements from before the guest was paused do not count.
    here_tap.drain();
    end(send, &proxy);
    here_tap.announcement(PATIENCE_S).expect("the switches still forward to the destination");
    // It would wait for COMMIT.
    receiving.kill();
    scene.here.check_guest();
}

#[test]
fn guest_is_announced_at_the_source_after_a_late_failure() {
    in_parallel(vec![Way::Attached, Way::Carried], |way| {
        is_announced_here_after(way, |send, proxy| {
            proxy.cut();
            assert_ne!(send.finish().code, Some(0));
        });
    });
}

#[test]
fn guest_is_announced_at_the_source_by_the_guardian() {
    is_announced_here_after(Way::Attached, |mut send, _| send.kill());
}
