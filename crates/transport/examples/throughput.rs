//! Measures one channel over loopback with one thread per side: plain TCP against TLS.
//!
//! `cargo run --release -p vmferry-transport --example throughput [GIB]`

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_transport::pki::{self, IssueRequest, Validity};
use vmferry_transport::{Address, Dialer, Listener, TlsIdentity};

/// The size of the engine's writes: a frame.
const FRAME_BYTES: usize = 512 << 10;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gib: usize = std::env::args().nth(1).map_or(Ok(4), |text| text.parse())?;
    let directory = std::env::temp_dir().join(format!("vmferry-throughput-{}", std::process::id()));
    let (ca, host) = (directory.join("ca"), directory.join("host"));
    pki::init(&ca, "throughput", Validity::days(1))?;
    pki::issue(&ca, &host, &IssueRequest::new("localhost", Validity::days(1)))?;
    let identity =
        TlsIdentity::load(&host.join("ca.pem"), &host.join("host.pem"), &host.join("host.key"));
    std::fs::remove_dir_all(&directory)?;
    let identity = Arc::new(identity?);
    for _ in 0..3 {
        for scheme in ["tcp", "tls"] {
            let address: Address = format!("{scheme}:localhost:0").parse()?;
            let rate = measure(&address, &identity, gib * (1 << 30) / FRAME_BYTES)?;
            println!("{scheme}: {rate:.2} GB/s");
        }
    }
    Ok(())
}

fn measure(
    address: &Address,
    identity: &Arc<TlsIdentity>,
    frames: usize,
) -> Result<f64, Box<dyn std::error::Error>> {
    let listener = Listener::bind(address, Some(Arc::clone(identity)))?;
    let dialer = Dialer::new(listener.local_address().clone(), Some(Arc::clone(identity)));
    let receiver = std::thread::spawn(move || -> Result<u64, String> {
        let pending = listener.accept().map_err(|error| error.to_string())?.ok_or("closed")?;
        let channel =
            pending.handshake(Duration::from_secs(5)).map_err(|error| error.to_string())?;
        let (mut reader, _writer) = channel.split();
        let (mut frame, mut total) = (vec![0; FRAME_BYTES], 0);
        loop {
            match reader.read(&mut frame).map_err(|error| error.to_string())? {
                0 => return Ok(total),
                read => total += read as u64,
            }
        }
    });
    let (_reader, mut writer) = dialer.connect()?.split();
    let frame: Vec<u8> = (0..FRAME_BYTES).map(|index| (index * 31) as u8).collect();
    let begun = Instant::now();
    for _ in 0..frames {
        writer.write_all(&frame)?;
    }
    writer.finish()?;
    let total = receiver.join().map_err(|_| "the receiver panicked")??;
    Ok(total as f64 / begun.elapsed().as_secs_f64() / 1e9)
}
