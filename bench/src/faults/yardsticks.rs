//! The limits: placing pages that no thread waits for, and fetching a page over rustls.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, anyhow, ensure};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use vmferry_faults::{FaultRanges, Placement, Wake};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout};

use super::handlers::CONTENT;
use crate::place::warm_up;
use crate::raw::{self, Tls};
use crate::results::median;
use crate::transport::certificates;

/// Pages in a batch: as many as in a frame.
const BATCH_PAGES: u64 = 64;

/// Bytes of a request for a page: a slot, a page number and a checksum have room.
const REQUEST_BYTES: usize = 16;

/// Pages per second that one thread places, one after the other.
#[derive(Default)]
pub struct Copies {
    single: Vec<f64>,
    batches: Vec<f64>,
}

impl Copies {
    /// Places this number of pages in both ways.
    ///
    /// # Errors
    /// Pages could not be placed.
    pub fn measure(&mut self, pages: u64) -> anyhow::Result<()> {
        self.single.push(copy(pages, 1)?);
        self.batches.push(copy(pages, BATCH_PAGES)?);
        Ok(())
    }

    pub fn pages_per_s(&self) -> f64 {
        median(self.single.iter().copied())
    }

    pub fn pages_per_s_in_batches(&self) -> f64 {
        median(self.batches.iter().copied())
    }
}

/// Places pages by `UFFDIO_COPY`, this number in each call, in this process.
fn copy(pages: u64, batch: u64) -> anyhow::Result<f64> {
    warm_up(pages)?;
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Memfd)?;
    let ranges = FaultRanges::register(&memory, 1)?;
    let content = vec![CONTENT; batch as usize * PAGE_SIZE];
    let mut placed_bytes = 0;
    let begun = Instant::now();
    for first in (0..pages).step_by(batch as usize) {
        let run = PageRun { slot: SlotId(0), first, pages: batch };
        let placement: Placement = ranges.place(run, &content, Wake::Later)?;
        placed_bytes += placement.placed_bytes;
    }
    let total_s = begun.elapsed().as_secs_f64();
    ensure!(placed_bytes == pages * PAGE_SIZE as u64, "only {placed_bytes} bytes were placed");
    Ok(pages as f64 / total_s)
}

/// Median time in microseconds from a request to the page that answers it, over raw rustls on
/// loopback, between two threads.
pub fn fetch_p50_us(round_trips: usize) -> anyhow::Result<f64> {
    let directory = tempfile::tempdir()?;
    certificates::make(directory.path())?;
    let tls = Tls::load(&certificates::host(directory.path()))?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let out = raw::connect(listener.local_addr()?, 1)?.pop().context("no connection")?;
    let into = raw::accept(&listener, 1)?.pop().context("no connection")?;
    let name = ServerName::IpAddress(out.peer_addr()?.ip().into());
    let client = ClientConnection::new(Arc::clone(&tls.client), name)?;
    let server = ServerConnection::new(Arc::clone(&tls.server))?;
    let mut client = StreamOwned::new(client, out);
    let mut server = StreamOwned::new(server, into);
    // The first round trips make the handshake and warm up.
    let all = round_trips + round_trips / 10 + 1;
    std::thread::scope(|scope| {
        let answering = scope.spawn(move || {
            let page = [CONTENT; PAGE_SIZE];
            for _ in 0..all {
                server.read_exact(&mut [0; REQUEST_BYTES])?;
                server.write_all(&page)?;
                server.flush()?;
            }
            std::io::Result::Ok(())
        });
        let mut page = [0; PAGE_SIZE];
        let mut us = Vec::with_capacity(all);
        for _ in 0..all {
            let begun = Instant::now();
            client.write_all(&[1; REQUEST_BYTES])?;
            client.flush()?;
            client.read_exact(&mut page)?;
            us.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        answering.join().map_err(|_| anyhow!("a thread panicked"))??;
        Ok(median(us.split_off(all - round_trips)))
    })
}
