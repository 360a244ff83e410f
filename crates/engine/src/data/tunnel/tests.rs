//! Streams in both directions over real sockets that are cut again and again.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use vmferry_transport::{Address, Channel as Transport, ChannelCloser, Dialer, Listener};

use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

/// Two tunnels that are connected by one channel after the other.
struct Scene {
    here: Tunnel,
    there: Tunnel,
    listener: Listener,
    dialer: Dialer,
    losses: (Sender<String>, Receiver<String>),
}

fn data_channel(channel: Transport) -> DataChannel {
    let closer = channel.closer();
    let (reader, writer) = channel.split();
    DataChannel { reader, writer, closer }
}

impl Scene {
    fn new(way: &TunnelWay) -> Self {
        let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = Listener::bind(&address, None).unwrap();
        let address = listener.local_address().clone();
        let tunnel = || Tunnel::new(3, way.clone(), CpuMeter::default());
        let (dialer, losses) = (Dialer::new(address, None), channel());
        let (here, there) = (tunnel(), tunnel());
        Self { here, there, listener, dialer, losses }
    }

    fn channels(&self) -> [Transport; 2] {
        std::thread::scope(|scope| {
            let dialer = &self.dialer;
            let dialed = scope.spawn(move || dialer.connect().unwrap());
            let pending = self.listener.accept().unwrap().unwrap();
            let accepted = pending.handshake(Duration::from_secs(10)).unwrap();
            [dialed.join().unwrap(), accepted]
        })
    }

    /// Connects both sides with a new channel. Returns what cuts the channel.
    fn connect(&mut self) -> ChannelCloser {
        let [ours, theirs] = self.channels();
        let closer = ours.closer();
        let told = || {
            let losses = self.losses.0.clone();
            Box::new(move |error: MigrateError| {
                let _ = losses.send(error.to_string());
            })
        };
        let (here, there) = (told(), told());
        self.here.attach(data_channel(ours), here).unwrap();
        self.there.attach(data_channel(theirs), there).unwrap();
        closer
    }
}

fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Writes all bytes into a VMM's socket, and closes its sending half.
fn write_all(socket: UnixStream, bytes: Vec<u8>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        (&socket).write_all(&bytes).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
    })
}

fn read(mut socket: &UnixStream, count: usize) -> Vec<u8> {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = vec![0; count];
    socket.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn both_directions_arrive_over_channels_that_break() {
    for background in [None, Some(RateLimiter::new(None))] {
        let mut scene = Scene::new(&TunnelWay { background, on_sent: None });
        let ((here, vmm_here), (there, vmm_there)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let (ended, ends) = channel();
        let first = bytes(1, 5000);
        let end =
            |socket: &UnixStream, first: Option<&[u8]>, ended: Option<Sender<()>>| TunnelEnd {
                into_vmm: Some(socket.try_clone().unwrap()),
                from_vmm: Some(socket.try_clone().unwrap()),
                first: first.map(GuestBytes::from),
                on_end: ended.map(|ended| Box::new(move || ended.send(()).unwrap()) as Box<_>),
            };
        scene.here.begin(end(&here, Some(&first), None)).unwrap();
        scene.there.begin(end(&there, None, Some(ended))).unwrap();
        let (forth, back) = (bytes(2, 60 << 20), bytes(3, 20 << 20));
        let (reading, count) = (vmm_there.try_clone().unwrap(), first.len() + forth.len());
        let forth_arrives = std::thread::spawn(move || read(&reading, count));
        let (reading, count) = (vmm_here.try_clone().unwrap(), back.len());
        let back_arrives = std::thread::spawn(move || read(&reading, count));
        let writers = [write_all(vmm_here, forth.clone()), write_all(vmm_there, back.clone())];
        let mut cuts = 0;
        while !forth_arrives.is_finished() || !back_arrives.is_finished() {
            let closer = scene.connect();
            // The fault is a channel that lives for so long.
            std::thread::sleep(Duration::from_millis(5 + cuts * 3));
            if cuts < 20 {
                cuts += 1;
                closer.close();
                scene.losses.1.recv_timeout(PATIENCE).unwrap();
            } else {
                scene.losses.1.try_iter().for_each(drop);
                std::thread::sleep(Duration::from_millis(200));
            }
        }
        assert!(cuts >= 5, "{cuts}");
        let arrived = forth_arrives.join().unwrap();
        assert!(arrived[..first.len()] == first[..] && arrived[first.len()..] == forth[..]);
        assert!(back_arrives.join().unwrap() == back);
        scene.connect();
        ends.recv_timeout(PATIENCE).unwrap();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    }
}

#[test]
fn bytes_that_no_vmm_takes_wait_at_their_source() {
    let mut scene = Scene::new(&TunnelWay::default());
    let (socket, vmm) = UnixStream::pair().unwrap();
    let from_vmm = Some(socket);
    scene.here.begin(TunnelEnd { from_vmm, ..TunnelEnd::default() }).unwrap();
    let all = bytes(7, 3 * BUFFER_BYTES);
    let writer = write_all(vmm, all.clone());
    scene.connect();
    let is_full = || scene.there.shared.state.lock().incoming.room() < 64 << 10;
    while !is_full() {
        std::thread::yield_now();
    }
    assert!(!writer.is_finished(), "the VMM waits");
    let (socket, vmm) = UnixStream::pair().unwrap();
    let into_vmm = Some(socket);
    scene.there.begin(TunnelEnd { into_vmm, ..TunnelEnd::default() }).unwrap();
    assert!(read(&vmm, all.len()) == all);
    writer.join().unwrap();
}

/// A VMM that has all it needs closes its sockets early.
#[test]
fn bytes_after_the_vmm_has_closed_its_socket_are_discarded() {
    let mut scene = Scene::new(&TunnelWay::default());
    let (from_vmm, source) = UnixStream::pair().unwrap();
    let (into_vmm, vmm) = UnixStream::pair().unwrap();
    drop(vmm);
    let (ended, ends) = channel();
    let on_end = Some(Box::new(move || ended.send(()).unwrap()) as Box<_>);
    let end = TunnelEnd { from_vmm: Some(from_vmm), on_end, ..TunnelEnd::default() };
    scene.here.begin(end).unwrap();
    scene.there.begin(TunnelEnd { into_vmm: Some(into_vmm), ..TunnelEnd::default() }).unwrap();
    scene.connect();
    write_all(source, bytes(1, 3 * BUFFER_BYTES)).join().unwrap();
    ends.recv_timeout(PATIENCE).unwrap();
}

/// The part is already there when the channel is attached: the thread that sends has hardly begun,
/// and fails because the other one closes the channel. The error is the bad part's, each time.
#[test]
fn part_that_does_not_continue_the_stream_ends_the_channel() {
    use vmferry_wire::TunnelHeader;

    let data = |offset, bytes| TunnelHeader::Data { offset, bytes }.encode().to_vec();
    let received = |offset| TunnelHeader::Received { offset }.encode().to_vec();
    let bad = [
        ([received(0), data(1, 1)].concat(), "bytes from 1 on instead of 0"),
        (received(1), "1 bytes were received, of 0 to 0"),
        (vec![9; 16], "bad part of a tunnel's stream"),
    ];
    for (sent, expected) in bad.iter().cycle().take(300) {
        let mut scene = Scene::new(&TunnelWay::default());
        let [ours, theirs] = scene.channels();
        let losses = scene.losses.0.clone();
        let on_loss = Box::new(move |error: MigrateError| {
            let _ = losses.send(crate::causes::chain(&error));
        });
        let (_reader, mut writer) = ours.split();
        writer.write_all(&[&sent[..], &[0]].concat()).unwrap();
        writer.flush().unwrap();
        scene.there.attach(data_channel(theirs), on_loss).unwrap();
        let said = scene.losses.1.recv_timeout(PATIENCE).unwrap();
        assert!(said.contains(expected), "{said}");
    }
}
