//! Guests of QEMUs on KVM that continuously use the network, by virtio-net and taps in two network
//! namespaces. The guest checks data that QEMU, or the kernel for it (vhost-net), writes into guest
//! memory, both when the data arrives and later.

use std::fs::File;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::support::{all, carry, hop, versions};
use vmferry_net_lab::{Namespaces, SOURCE_ADDRESS, TAP, TapGuest};
use vmferry_qemu_lab::{Machine, Qemu, Said, Version, World};

/// The guest of `crates/microvm/guest/network.c`.
const GUEST: TapGuest = TapGuest { address: Ipv4Addr::new(10, 77, 7, 9), mac: "52:54:00:77:07:09" };
const PORT: u16 = 7007;

/// Echoes all datagrams, in the source's namespace.
struct Echo {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Echo {
    fn start(network: &Namespaces) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let (namespace, end) = (File::open(network.source_path()).unwrap(), Arc::clone(&over));
        let echo = move || {
            vmferry_net_lab::enter(namespace.as_fd()).unwrap();
            let socket = UdpSocket::bind((SOURCE_ADDRESS, PORT)).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let mut datagram = [0; 2048];
            while !end.load(Ordering::Acquire) {
                if let Ok((bytes, from)) = socket.recv_from(&mut datagram) {
                    socket.send_to(&datagram[..bytes], from).unwrap();
                }
            }
        };
        Self { over, thread: Some(std::thread::spawn(echo)) }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        // If it has failed, its message is on standard error.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Waits until more datagrams have been echoed, without corruption.
fn talks(qemu: &mut Qemu) -> Said {
    let before = qemu.check_guest();
    let said = qemu
        .wait_for("has answers", |said| said.get("net_replies") >= before.get("net_replies") + 100);
    assert_eq!(said.get("corruptions"), 0, "{said:?}");
    said
}

/// Moves such a guest back and forth between the namespaces.
fn travel(version: Version, vhost: &str, attached: bool) {
    let network = Namespaces::make().unwrap();
    network.add_taps(&GUEST).unwrap();
    let _echo = Echo::start(&network);
    let world = World::new();
    let backend = format!("tap,id=net,ifname={TAP},script=no,downscript=no,vhost={vhost}");
    let device = format!("virtio-net-device,netdev=net,mac={}", GUEST.mac);
    let workload = format!("fill=8,incompressible hot=8,rate=40000 net={PORT}");
    let machine = Machine { kind: "microvm", vcpus: 2, ..Machine::on_kvm(version, &workload) };
    let modern = ["-global", "virtio-mmio.force-legacy=false"];
    let machine = machine.with(&modern).with(&["-netdev", &backend, "-device", &device]);
    let paths = [network.source_path(), network.destination_path()];
    let on_host = |number: u32| Machine {
        namespace: Some(paths[number as usize % 2].clone()),
        ..machine.clone()
    };
    let mut here = on_host(0).start(&world, "qemu-0");
    talks(&mut here);
    for number in 1..=if all() { 5 } else { 2 } {
        let mut there = on_host(number).incoming(&world, &format!("qemu-{number}"));
        if attached {
            let stats = hop(&world, number, &here, &there);
            assert_eq!((stats.digest_match, stats.verify_match), (Some(true), Some(true)));
        } else {
            let stats = carry(&world, number, &here, &there, 0, |_| {}).unwrap();
            assert_eq!(stats.digest_match, Some(true));
        }
        here.child.wait().unwrap();
        let said = talks(&mut there);
        println!("{version:?}: {} answers, {} lost", said.get("net_replies"), said.get("net_lost"));
        here = there;
    }
}

#[test]
fn attached_guests_with_taps_move() {
    for &version in versions() {
        travel(version, "off", true);
    }
}

#[test]
fn carried_guests_with_taps_move() {
    travel(Version::V7_2, "off", false);
}

/// The kernel's vhost threads write the guest's memory in this case.
#[test]
#[ignore = "needs /dev/vhost-net: a kernel with CONFIG_VHOST_NET"]
fn guests_with_vhost_net_move() {
    for version in Version::ALL {
        for attached in [true, false] {
            travel(version, "on", attached);
        }
    }
}
