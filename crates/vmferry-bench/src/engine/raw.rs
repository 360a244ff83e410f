//! The yardsticks: [`raw`] between two threads of this process.

use std::net::TcpListener;

use anyhow::anyhow;
use vmferry_memory::GuestMemory;

use super::Sample;
use crate::raw::{self, Tls};

/// Over plain TCP, or over rustls; with sockets as the system has them, or as the engine does.
pub fn copy(
    source: &GuestMemory,
    destination: &GuestMemory,
    channels: u8,
    tls: Option<&Tls>,
    tuned: bool,
) -> anyhow::Result<Sample> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let out = raw::connect(listener.local_addr()?, channels)?;
    let into = raw::accept(&listener, channels)?;
    let copied = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| raw::receive(destination, into, tls));
        let copied = raw::send(source, out, tls, tuned);
        receiving.join().map_err(|_| anyhow!("a thread has failed"))??;
        copied
    })?;
    // Both sides are this process.
    Ok(Sample { total_s: copied.total_s, cpu_s: copied.cpu_s, sides_cpu_s: None })
}
