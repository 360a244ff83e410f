//! The sending loop of a channel. A frame's buffer is used again after the receiver has
//! acknowledged the frame and the kernel has released the buffer.

use anyhow::{Context, ensure};
use vmferry_memory::{GuestMemory, PageRun};

use super::frame::Frame;
use super::outlet::Outlet;
use super::way::Way;

/// Makes the buffers of one channel.
pub fn buffers(way: &Way) -> Vec<Frame> {
    (0..way.most_out).map(|_| Frame::new(way.frame_pages)).collect()
}

/// Sends these pages and waits for all acknowledgements. Returns the mean number of unacknowledged
/// frames right after sending one.
///
/// # Errors
/// The socket failed.
pub fn send(
    memory: &GuestMemory,
    outlet: &mut dyn Outlet,
    mut idle: Vec<Frame>,
    runs: impl Iterator<Item = PageRun>,
) -> anyhow::Result<f64> {
    let mut acknowledged = Acknowledged { frames: 0, bytes: [0; 128], filled: 0 };
    let (mut sent, mut out_sum) = (0, 0);
    for run in runs {
        let mut frame = loop {
            outlet.give_back(&mut idle)?;
            acknowledged.hear(outlet, false)?;
            if let Some(frame) = free(&mut idle, acknowledged.frames) {
                break frame;
            }
            if !outlet.wait()? {
                acknowledged.hear(outlet, true)?;
            }
        };
        frame.fill(memory, sent, run)?;
        outlet.send(frame)?;
        sent += 1;
        out_sum += sent - acknowledged.frames;
    }
    while acknowledged.frames < sent {
        if !outlet.wait()? {
            acknowledged.hear(outlet, true)?;
        }
        outlet.give_back(&mut idle)?;
    }
    ensure!(
        acknowledged.frames == sent,
        "the receiver acknowledged {} of {sent} frames",
        acknowledged.frames
    );
    Ok(out_sum as f64 / sent as f64)
}

/// Takes a buffer whose frame was acknowledged. The most recently used one is the most likely to be
/// in the cache.
fn free(idle: &mut Vec<Frame>, acknowledged: u64) -> Option<Frame> {
    let is_free = |frame: &Frame| frame.sequence.is_none_or(|sequence| sequence < acknowledged);
    let frames = idle.iter().enumerate().filter(|(_, frame)| is_free(frame));
    let (index, _) = frames.max_by_key(|(_, frame)| frame.sequence)?;
    Some(idle.swap_remove(index))
}

/// The acknowledgements of the receiver.
struct Acknowledged {
    frames: u64,
    bytes: [u8; 128],
    filled: usize,
}

impl Acknowledged {
    fn hear(&mut self, outlet: &mut dyn Outlet, wait: bool) -> anyhow::Result<()> {
        let heard = outlet.hear(&mut self.bytes[self.filled..], wait);
        self.filled += heard.context("could not read an acknowledgement")?;
        let (counts, rest) = self.bytes[..self.filled].as_chunks();
        if let Some(last) = counts.last() {
            self.frames = u64::from_le_bytes(*last);
            let rest = self.filled - rest.len()..self.filled;
            self.filled = rest.len();
            self.bytes.copy_within(rest, 0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(sequence: Option<u64>) -> Frame {
        let mut frame = Frame::new(1);
        frame.sequence = sequence;
        frame
    }

    #[test]
    fn free_prefers_the_most_recently_used_buffer() {
        let mut idle = [None, Some(3), Some(5), Some(4)].map(used).into();
        let mut next = || free(&mut idle, 5).map(|frame| frame.sequence);
        assert_eq!(
            [next(), next(), next(), next()],
            [Some(Some(4)), Some(Some(3)), Some(None), None]
        );
    }
}
