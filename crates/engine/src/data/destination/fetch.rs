//! Fetching the missing pages of a guest that already runs: requests go out, and pages come in.
//!
//! ```text
//!  vCPU touches a missing page
//!  FaultHandlers reads the fault, writes a request     (one thread for each share of the memory)
//!  source's PageServer answers with a frame
//!  FetchLane's thread decodes it and places the page   (one thread for each fetch lane)
//!  vCPU continues
//! ```
//! Some fetch lanes carry only the pages that threads wait for. On the others the lane's thread
//! itself requests all other pages, and keeps a few requests outstanding.

pub mod counts;
pub mod handle;
pub mod handlers;
pub mod lane;
pub mod lanes;
mod pace;

use std::sync::Arc;

use crossbeam_channel::Sender;
use vmferry_codec::{CodecError, Decoder, Frame};

use super::missing::MissingPages;
use crate::causes::chain;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::channel_name;
use crate::machine::destination::io::Input;

/// What the threads that fetch pages report to.
#[derive(Clone)]
pub struct FetchContext {
    /// The missing pages.
    pub missing: Arc<MissingPages>,
    /// Queue for results.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
}

/// Decodes a frame that began at an offset of a lane's channel, and places its missing pages.
/// Returns whether the last missing page was one of them.
///
/// # Errors
/// A frame that is corrupt or names pages outside the guest. Nothing of it was placed.
pub fn place(
    missing: &MissingPages,
    decoder: &mut Decoder,
    frame: &Frame,
    (lane, offset): (u8, u64),
) -> Result<bool, MigrateError> {
    let decoded = decoder.decode(frame, missing.memory(), missing.hashes(), |_| true);
    let decoded = decoded.map_err(|error| match error {
        CodecError::Memory(error) => error.into(),
        error => MigrateError::protocol(channel_name(Some(lane)), offset, chain(&error)),
    })?;
    decoded.map_or(Ok(false), |decoded| missing.place(decoded))
}

#[cfg(test)]
mod tests;
