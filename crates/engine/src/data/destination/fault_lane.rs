//! The fault lanes of a destination whose guest already runs: requests for the pages that it
//! touches go out, and the pages come in.
//!
//! ```text
//!  vCPU touches a missing page
//!  FaultHandlers reads the fault, writes a request     (one thread for each share of the memory)
//!  source's PageServer answers with a frame
//!  FaultLane's thread decodes it and places the page  (one thread for each fault lane)
//!  vCPU continues
//! ```

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use vmferry_codec::{CodecError, Decoder, Decompressors, Frame};
use vmferry_faults::Waited;
use vmferry_memory::{PageRun, SlotId};
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};
use vmferry_wire::PageRequest;

use super::missing::{Fetched, MissingPages, Wanted};
use super::place::FrameReader;
use crate::causes::chain;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::{DataChannel, channel_name, lost};
use crate::machine::destination::io::Input;

/// What fault lanes report to.
#[derive(Clone)]
pub struct FaultContext {
    /// The missing pages.
    pub missing: Arc<MissingPages>,
    /// Queue for results.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
}

/// One fault lane. Dropping it closes the channel and waits for the thread.
pub struct FaultLane {
    asking: Arc<Asking>,
    thread: Option<JoinHandle<()>>,
}

/// The half of a fault lane that sends requests.
struct Asking {
    writer: Mutex<ChannelWriter>,
    closer: ChannelCloser,
}

impl FaultLane {
    /// Starts the lane on a greeted channel that was dialed `attempt` times before.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(
        lane: u8,
        attempt: u64,
        channel: DataChannel,
        context: FaultContext,
    ) -> io::Result<Self> {
        let DataChannel { reader, writer, closer } = channel;
        let asking = Arc::new(Asking { writer: Mutex::new(writer), closer: closer.clone() });
        let thread =
            std::thread::Builder::new().name(format!("lane{lane}-fetch")).spawn(move || {
                let _cpu = context.cpu.count_this_thread();
                let error = fetch(lane, reader, &context);
                // If only one direction is broken, the source would not notice the loss otherwise.
                closer.close();
                let _ = context.results.send(match error {
                    error @ MigrateError::LinkLost { .. } => {
                        Input::LaneLost { lane, attempt, error }
                    }
                    error => Input::Failed(error),
                });
            })?;
        Ok(Self { asking, thread: Some(thread) })
    }

    /// Requests pages. A channel that fails is closed, which its reader reports.
    pub fn request(&self, pages: impl IntoIterator<Item = (SlotId, u64)>) {
        let mut writer = self.asking.writer.lock();
        let mut written = Ok(());
        for (slot, page) in pages {
            let run = PageRun { slot, first: page, pages: 1 };
            if let Some(request) = PageRequest::new(run) {
                written = written.and_then(|()| writer.write_all(&request.encode()));
            }
        }
        if written.and_then(|()| writer.flush()).is_err() {
            self.asking.closer.close();
        }
    }
}

impl Drop for FaultLane {
    fn drop(&mut self) {
        self.asking.closer.close();
        if let Some(thread) = self.thread.take() {
            // A panic there was noticed as a lane that no longer answers.
            let _ = thread.join();
        }
    }
}

/// Places what arrives until the channel ends, and returns why it did.
fn fetch(lane: u8, mut reader: ChannelReader, context: &FaultContext) -> MigrateError {
    if let Err(error) = reader.set_timeout(None) {
        return lost(&channel_name(Some(lane)), "fetching pages", &io::Error::other(error));
    }
    let mut frames = FrameReader::new(lane, reader);
    let (mut frame, mut decoder) = (Frame::new(), Decoder::new(Decompressors::default()));
    loop {
        let offset = frames.offset();
        if let Err(error) = frames.receive(&mut frame) {
            return error;
        }
        let FaultContext { missing, results, .. } = context;
        match place(missing, &mut decoder, &frame, (lane, offset)) {
            Ok(Some(Fetched { is_complete: true, .. })) => {
                let _ = results.send(Input::Fetched);
            }
            Ok(_) => {}
            Err(error) => return error,
        }
    }
}

/// Decodes a frame that began at an offset of a lane's channel, and places its missing pages.
///
/// # Errors
/// A frame that is corrupt or names pages outside the guest. Nothing of it was placed.
pub fn place(
    missing: &MissingPages,
    decoder: &mut Decoder,
    frame: &Frame,
    (lane, offset): (u8, u64),
) -> Result<Option<Fetched>, MigrateError> {
    let decoded = decoder.decode(frame, missing.memory(), missing.hashes(), |_| true);
    let decoded = decoded.map_err(|error| match error {
        CodecError::Memory(error) => error.into(),
        error => MigrateError::protocol(channel_name(Some(lane)), offset, chain(&error)),
    })?;
    decoded.map(|decoded| missing.place(decoded)).transpose()
}

/// The threads that read the guest's faults. Dropping it ends them.
pub struct FaultHandlers {
    stop: Option<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

impl FaultHandlers {
    /// Starts a thread for each share of the memory. `request` is called with the pages to request,
    /// and with the share's number.
    ///
    /// # Errors
    /// The system can't create a pipe or a thread.
    pub fn start(
        context: &FaultContext,
        request: impl Fn(usize, &[(SlotId, u64)]) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let (stopped, stop) = rustix::pipe::pipe()?;
        let mut handlers = Self { stop: Some(stop), threads: Vec::new() };
        for share in 0..context.missing.ranges().shares() {
            let (context, request) = (context.clone(), request.clone());
            let stopped = stopped.try_clone()?;
            let thread =
                std::thread::Builder::new().name(format!("faults{share}")).spawn(move || {
                    let _cpu = context.cpu.count_this_thread();
                    let handled = handle(&context.missing, share, &stopped, |pages| {
                        request(share, pages);
                    });
                    if let Err(error) = handled {
                        let _ = context.results.send(Input::Failed(error));
                    }
                })?;
            handlers.threads.push(thread);
        }
        Ok(handlers)
    }
}

impl Drop for FaultHandlers {
    fn drop(&mut self) {
        // The threads see the end of the pipe.
        self.stop = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Handles the faults of a share until the pipe ends.
fn handle(
    missing: &MissingPages,
    share: usize,
    stopped: &OwnedFd,
    mut request: impl FnMut(&[(SlotId, u64)]),
) -> Result<(), MigrateError> {
    let mut waiting = missing.ranges().share(share, stopped.as_fd());
    let (mut faults, mut pages) = (Vec::new(), Vec::new());
    while waiting.wait(&mut faults)? == Waited::Faults {
        for fault in faults.drain(..) {
            if let Wanted::Page(slot, page) = missing.fault(fault.address)? {
                pages.push((slot, page));
            }
        }
        if !pages.is_empty() {
            request(&pages);
            pages.clear();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
