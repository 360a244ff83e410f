//! `socket`: ways to send frames of 256 KiB over a TCP socket. Compares system calls, socket
//! options, frame lengths and, with TLS, batch lengths.
//!
//! There are two channels, with one thread per side and channel, as in the engine. The sender
//! copies the pages of a frame from the memory into one of (usually) 16 buffers and writes head and
//! pages. The receiver reads the head through a small buffer and the pages into populated memory.
//! It acknowledges the frame on the same socket, and only then is the sender's buffer used again.
//! Pages are not tested or hashed. The raw socket is the limit: it copies nothing and does not wait
//! for acknowledgements.

mod frame;
mod kernel;
pub mod lab;
mod outlet;
mod plain;
mod receive;
mod rows;
mod send;
mod tls;
mod way;
mod zero_copy;

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use rustix::net::sockopt::{socket_recv_buffer_size, socket_send_buffer_size, tcp_congestion};
use vmferry_memory::{GuestMemory, whole_hash};

use crate::guest::{clear, fill_incompressible, memory, whole};
use crate::machine::process_cpu_s;
use crate::raw::{self, Sockets, Tls};
use crate::results::Results;
use crate::transport::certificates;
use kernel::Ring;
use lab::{Lab, Place};
use outlet::{Notices, Outlet};
use receive::Inlet;
use way::{Call, Tuning, WAYS, Way};

/// The command's default number of channels.
const CHANNELS: u64 = 2;

/// Timeout for every wait on a socket.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The cost of one run.
#[derive(Clone, Debug, Default)]
struct Sample {
    /// Wall time in seconds.
    total_s: f64,
    /// CPU time of this process in seconds.
    cpu_s: f64,
    /// Mean number of unacknowledged frames over all channels.
    frames_out: f64,
    /// Mean `SO_SNDBUF` and `SO_RCVBUF` per channel at the end, in bytes. The kernel may have
    /// enlarged them.
    buffers: BufferBytes,
    /// See [`Outlet::notices`].
    notices: Option<Notices>,
}

/// Sizes of the socket buffers of one channel.
#[derive(Clone, Copy, Debug, Default)]
struct BufferBytes {
    send: f64,
    receive: f64,
}

/// All runs by place and method number.
type Samples = BTreeMap<(Place, usize), Vec<Sample>>;

/// Runs the benchmark. `quick` moves 32 MiB once; otherwise 1 GiB is moved five times.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let (mib, repetitions) = if quick { (32, 1) } else { (1024, 5) };
    let pages = mib << 8;
    let (source, destination) = (memory(pages)?, memory(pages)?);
    fill_incompressible(&source)?;
    let expected = whole_hash(&source)?;
    let lab = Lab::new();
    let directory = tempfile::tempdir()?;
    certificates::make(directory.path())?;
    let tls = Tls::load(&certificates::host(directory.path()))?;
    let missing: Vec<_> = WAYS.iter().map(|way| missing(way, &lab)).collect();

    let check = |what: &str| {
        ensure!(whole_hash(&destination)? == expected, "{what}: the destination's memory differs");
        Ok(())
    };
    let mut samples = Samples::new();
    let mut limits: BTreeMap<Place, Vec<f64>> = BTreeMap::new();
    // The first pass warms up and is not counted.
    for pass in usize::from(quick)..=repetitions {
        for place in lab.places() {
            clear(&destination)?;
            let total_s = raw_socket(&source, &destination, &lab, place)?;
            check("a raw socket")?;
            if pass > 0 {
                limits.entry(place).or_default().push(total_s);
            }
            for (number, way) in WAYS.iter().enumerate().filter(|way| missing[way.0].is_none()) {
                clear(&destination)?;
                let sample = copy(way, &source, &destination, &lab, place, &tls)
                    .with_context(|| format!("{}, {}", way.name, place.name()))?;
                check(way.name)?;
                if pass > 0 {
                    samples.entry((place, number)).or_default().push(sample);
                }
            }
        }
        eprintln!("socket: pass {pass} of {repetitions}");
    }
    let copied = crate::engine::copy_bandwidth(&source, &destination, whole(&source))?;
    let mut results = rows::results(&samples, &missing, &limits, pages, copied)?;
    let places = lab.places().into_iter().map(|place| {
        let streams = lab.connect(place, Tuning::NONE, 1)?;
        let (out, _) = streams.first().context("there is no connection")?;
        rows::place(place, tcp_congestion(out)?)
    });
    results.more.insert("places", places.collect::<anyhow::Result<_>>()?);
    Ok(results)
}

/// Why this kernel cannot run the method, if it cannot.
fn missing(way: &Way, lab: &Lab) -> Option<String> {
    let tried = match way.call {
        Call::Ring { zero_copy } => Ring::new(zero_copy).map(drop).map_err(Into::into),
        Call::ZeroCopy => lab.connect(Place::Loopback, Tuning::NONE, 1).and_then(|streams| {
            streams.into_iter().try_for_each(|(out, _)| plain::outlet(way, out).map(drop))
        }),
        _ => lab.connect(Place::Loopback, way.tuning, 1).map(drop),
    };
    tried.err().map(|error| format!("not here: {error:#}"))
}

/// Runs the yardstick. Returns the wall time in seconds.
fn raw_socket(
    source: &GuestMemory,
    destination: &GuestMemory,
    lab: &Lab,
    place: Place,
) -> anyhow::Result<f64> {
    let (out, into) = lab.connect(place, Tuning::NONE, CHANNELS)?.into_iter().unzip();
    let copied = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| raw::receive(destination, into, None));
        let copied = raw::send(source, out, None, Sockets::Default);
        receiving.join().map_err(|_| anyhow!("a thread panicked"))??;
        copied
    });
    Ok(copied?.total_s)
}

/// Both ends of a channel.
struct Channel {
    outlet: Box<dyn Outlet>,
    inlet: Box<dyn Inlet>,
    /// Clones of the sockets, to read their buffer sizes.
    streams: (TcpStream, TcpStream),
}

fn channel(way: &Way, tls: &Tls, streams: (TcpStream, TcpStream)) -> anyhow::Result<Channel> {
    let asked = (streams.0.try_clone()?, streams.1.try_clone()?);
    let (outlet, inlet): (Box<dyn Outlet>, Box<dyn Inlet>) = match way.call {
        Call::Tls(batch) => {
            let (out, into) = tls::channel(tls, batch, streams)?;
            (Box::new(out), Box::new(into))
        }
        _ => (plain::outlet(way, streams.0)?, receive::plain(streams.1)),
    };
    Ok(Channel { outlet, inlet, streams: asked })
}

/// Moves the memory with this method.
fn copy(
    way: &Way,
    source: &GuestMemory,
    destination: &GuestMemory,
    lab: &Lab,
    place: Place,
    tls: &Tls,
) -> anyhow::Result<Sample> {
    let streams = lab.connect(place, way.tuning, CHANNELS)?;
    let channels = streams.into_iter().map(|streams| channel(way, tls, streams));
    let mut channels = channels.collect::<anyhow::Result<Vec<_>>>()?;
    let buffers: Vec<_> = channels.iter().map(|_| send::buffers(way)).collect();
    let (cpu_before, begun) = (process_cpu_s(), Instant::now());
    let frames_out = std::thread::scope(|scope| {
        let mut sides = Vec::new();
        for (number, (channel, buffers)) in channels.iter_mut().zip(buffers).enumerate() {
            let runs =
                || frame::runs(source.total_pages(), way.frame_pages, (number as u64, CHANNELS));
            let (runs, frames) = (runs(), runs().count() as u64);
            let Channel { outlet, inlet, streams } = channel;
            let streams = &*streams;
            let receiving = scope.spawn(move || {
                let received = receive::receive(destination, &mut **inlet, frames);
                close_on_error(streams, received)
            });
            let sending = scope.spawn(move || {
                let sent = send::send(source, &mut **outlet, buffers, runs);
                close_on_error(streams, sent)
            });
            sides.push((sending, receiving));
        }
        let mut frames_out = 0.0;
        for (sending, receiving) in sides {
            let (sent, received) = (sending.join(), receiving.join());
            let failed = |_| anyhow!("a thread panicked");
            match (sent.map_err(failed)?, received.map_err(failed)?) {
                (Ok(out), Ok(())) => frames_out += out,
                (Err(error), Ok(())) => return Err(error.context("the sender")),
                (Ok(_), Err(error)) => return Err(error.context("the receiver")),
                (Err(one), Err(other)) => {
                    return Err(anyhow!("the sender: {one:#}; the receiver: {other:#}"));
                }
            }
        }
        Ok(frames_out)
    })?;
    let (total_s, cpu_s) = (begun.elapsed().as_secs_f64(), process_cpu_s() - cpu_before);
    let mut sample = Sample { total_s, cpu_s, frames_out, ..Sample::default() };
    for Channel { outlet, streams, .. } in &channels {
        sample.buffers.send += socket_send_buffer_size(&streams.0)? as f64 / CHANNELS as f64;
        sample.buffers.receive += socket_recv_buffer_size(&streams.1)? as f64 / CHANNELS as f64;
        if let Some(notices) = outlet.notices() {
            *sample.notices.get_or_insert_default() += notices;
        }
    }
    Ok(sample)
}

/// If one side fails, closes the sockets so that the other side does not wait for it.
fn close_on_error<T>(
    (out, into): &(TcpStream, TcpStream),
    result: anyhow::Result<T>,
) -> anyhow::Result<T> {
    if result.is_err() {
        for stream in [out, into] {
            // The socket may be closed already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
    result
}
