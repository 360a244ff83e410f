//! The physical limits of the cable: memory is copied from one namespace to the other over one
//! connection, by a bare socket with the engine's options and by rustls.

use std::net::TcpListener;

use anyhow::anyhow;
use vmferry_net_lab::DESTINATION_ADDRESS;

use super::lab::Lab;
use crate::guest::{fill_incompressible, memory};
use crate::raw::{self, Copied, Sockets, Tls};
use crate::results::median;
use crate::socket::lab::inside;

/// Returns the throughput in MB/s of a bare socket and of rustls, each the median of three copies.
pub fn throughput(lab: &Lab, mib: u64) -> anyhow::Result<[f64; 2]> {
    let pages = mib << 8;
    let (source, destination) = (memory(pages)?, memory(pages)?);
    fill_incompressible(&source)?;
    let tls = Tls::load(&lab.destination_tls())?;
    let copy = |tls: Option<&Tls>| -> anyhow::Result<Copied> {
        let (here, there) = (lab.networks.source_path(), lab.networks.destination_path());
        let listener = inside(Some(there), || Ok(TcpListener::bind((DESTINATION_ADDRESS, 0))?))?;
        let address = listener.local_addr()?;
        let out = inside(Some(here), || raw::connect(address, 1))?;
        let into = raw::accept(&listener, 1)?;
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| raw::receive(&destination, into, tls));
            let copied = raw::send(&source, out, tls, Sockets::Tuned);
            receiving.join().map_err(|_| anyhow!("a thread panicked"))??;
            copied
        })
    };
    let mb = (mib << 20) as f64 / 1e6;
    let mut found = [0.0; 2];
    for (found, tls) in found.iter_mut().zip([None, Some(&tls)]) {
        let mut rates = Vec::new();
        for _ in 0..3 {
            rates.push(mb / copy(tls)?.total_s);
        }
        *found = median(rates);
    }
    Ok(found)
}
