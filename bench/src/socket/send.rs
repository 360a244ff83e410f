//! The sending end of a channel: a frame's buffer is used again when the receiver has said that it has the frame,
//! and the kernel that it reads the buffer no more.

use anyhow::{Context, ensure};
use vmferry_memory::{GuestMemory, PageRun};

use super::frame::Frame;
use super::outlet::Outlet;
use super::way::Way;

/// Buffers of one channel.
pub fn buffers(way: &Way) -> Vec<Frame> {
    (0..way.most_out).map(|_| Frame::new(way.frame_pages)).collect()
}

/// Sends these pages, and waits until the receiver has them all. Returns how many frames were out in the mean, when
/// one had just been sent.
///
/// # Errors
/// The socket's.
pub fn send(
    memory: &GuestMemory,
    outlet: &mut dyn Outlet,
    mut idle: Vec<Frame>,
    runs: impl Iterator<Item = PageRun>,
) -> anyhow::Result<f64> {
    let mut placed = Placed { frames: 0, bytes: [0; 128], filled: 0 };
    let (mut sent, mut out_sum) = (0, 0);
    for run in runs {
        let mut frame = loop {
            outlet.give_back(&mut idle)?;
            placed.hear(outlet, false)?;
            if let Some(frame) = free(&mut idle, placed.frames) {
                break frame;
            }
            if !outlet.wait()? {
                placed.hear(outlet, true)?;
            }
        };
        frame.fill(memory, sent, run)?;
        outlet.send(frame)?;
        sent += 1;
        out_sum += sent - placed.frames;
    }
    while placed.frames < sent {
        if !outlet.wait()? {
            placed.hear(outlet, true)?;
        }
        outlet.give_back(&mut idle)?;
    }
    ensure!(placed.frames == sent, "{} of {sent} frames have come", placed.frames);
    Ok(out_sum as f64 / sent as f64)
}

/// The one of the buffers whose frame has come that is most likely to be in the cache: the last one used.
fn free(idle: &mut Vec<Frame>, placed: u64) -> Option<Frame> {
    let is_free = |frame: &Frame| frame.sequence.is_none_or(|sequence| sequence < placed);
    let frames = idle.iter().enumerate().filter(|(_, frame)| is_free(frame));
    let (index, _) = frames.max_by_key(|(_, frame)| frame.sequence)?;
    Some(idle.swap_remove(index))
}

/// What the receiver has said.
struct Placed {
    frames: u64,
    bytes: [u8; 128],
    filled: usize,
}

impl Placed {
    fn hear(&mut self, outlet: &mut dyn Outlet, wait: bool) -> anyhow::Result<()> {
        let heard = outlet.hear(&mut self.bytes[self.filled..], wait);
        self.filled += heard.context("the receiver says no more")?;
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
    fn the_last_buffer_whose_frame_has_come_is_used_again() {
        let mut idle = [None, Some(3), Some(5), Some(4)].map(used).into();
        let mut next = || free(&mut idle, 5).map(|frame| frame.sequence);
        assert_eq!(
            [next(), next(), next(), next()],
            [Some(Some(4)), Some(Some(3)), Some(None), None]
        );
    }
}
