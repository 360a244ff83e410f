//! A process that fills the memory of another process's guest cannot connect by TCP in any way.

use std::io::{ErrorKind, IoSlice};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, connect_unspec, send, sendmsg_addr, sendto};
use vmferry_sandbox::{Files, Sandbox, SandboxMode, Work, apply};

/// Tells the child whether to restrict itself.
const CHILD: &str = "VMFERRY_TEST_REACHING_OUT";

/// This test has no harness, because only a process with one thread can be restricted. The
/// unrestricted child is the control.
fn main() {
    if std::env::args().any(|argument| argument == "--list") {
        // Test runners ask for the ignored tests in a call of their own.
        if !std::env::args().any(|argument| argument == "--ignored") {
            println!("accepted_connections_cannot_be_reconnected: test");
        }
        return;
    }
    if let Ok(how) = std::env::var(CHILD) {
        return try_to_connect(how == "restricted");
    }
    for how in ["restricted", "free"] {
        let this = std::env::current_exe().unwrap();
        let status = Command::new(this).env(CHILD, how).status().unwrap();
        assert!(status.success(), "{how}: {status}");
    }
    println!("accepted connections cannot be reconnected: ok");
}

/// Two accepted connections, and a listener that must not be reached.
struct Scene {
    accepted: [TcpStream; 2],
    _peers: [TcpStream; 2],
    outside: TcpListener,
    address: SocketAddr,
}

impl Scene {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        let peers = [(); 2].map(|()| TcpStream::connect(here).unwrap());
        let accepted = [(); 2].map(|()| listener.accept().unwrap().0);
        let outside = TcpListener::bind("127.0.0.1:0").unwrap();
        outside.set_nonblocking(true).unwrap();
        let address = outside.local_addr().unwrap();
        Self { accepted, _peers: peers, outside, address }
    }
}

fn try_to_connect(restricted: bool) {
    let Scene { accepted: [first, second], _peers, outside, address } = Scene::new();
    let mut landlock = 0;
    if restricted {
        let sandbox =
            Sandbox { work: Work::MemoryOnly, files: Files::default(), others_sockets: false };
        let restrictions = apply(&sandbox, SandboxMode::Auto).unwrap();
        assert!(restrictions.seccomp);
        landlock = restrictions.landlock_abi;
    }
    // The connection itself still works.
    assert_eq!(send(&first, b"x", SendFlags::NOSIGNAL), Ok(1));

    // Landlock refuses `connect`.
    for socket in [&first, &second] {
        connect_unspec(socket).unwrap();
    }
    if landlock >= 4 {
        assert_eq!(rustix::net::connect(&first, &address), Err(Errno::ACCESS));
    } else if restricted {
        panic!("this test needs Landlock 4, and this kernel has {landlock}");
    }

    // `MSG_FASTOPEN` connects a socket with its first packet, and `connect` is not called.
    let fast_open = SendFlags::from_bits_retain(libc::MSG_FASTOPEN as u32) | SendFlags::NOSIGNAL;
    let data = [IoSlice::new(b"secret")];
    let nothing = &mut SendAncillaryBuffer::default();
    let sent = [
        sendto(&first, b"secret", fast_open, &address),
        sendmsg_addr(&second, &address, &data, nothing, fast_open),
    ];
    let arrived = outside.accept();
    if restricted {
        assert_eq!(sent, [Err(Errno::NOSYS); 2]);
        assert_eq!(arrived.unwrap_err().kind(), ErrorKind::WouldBlock);
    } else if sent == [Err(Errno::OPNOTSUPP); 2] {
        panic!("this test needs net.ipv4.tcp_fastopen");
    } else {
        assert_eq!(sent, [Ok(6); 2]);
        arrived.unwrap();
    }
}
