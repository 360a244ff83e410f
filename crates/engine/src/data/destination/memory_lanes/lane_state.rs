//! What a lane's receiving thread and the placers share: the lane's frame buffers and its progress.

use parking_lot::{Condvar, Mutex};
use vmferry_codec::Frame;
use vmferry_wire::FrameHeader;

use crate::data::destination::place::{LaneProgress, MOST_IN_MAKING, Placed};

/// State shared by a lane's receiving thread and the placers.
pub struct LaneState {
    number: u8,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    progress: LaneProgress,
    free: Vec<Frame>,
    /// The number of frame buffers, in use or free.
    frames: usize,
    /// Receiving has stopped: the channel is being replaced, or the session ends.
    closed: bool,
    /// A frame could not be placed, and no later frame may be placed.
    failed: bool,
}

impl LaneState {
    /// The lane's number.
    pub fn number(&self) -> u8 {
        self.number
    }

    /// Lane `number`, with this number of frame buffers.
    pub fn new(number: u8, frames: usize) -> Self {
        let frames = frames.min(MOST_IN_MAKING as usize);
        let state = State {
            progress: LaneProgress::default(),
            free: (0..frames).map(|_| Frame::new()).collect(),
            frames,
            closed: false,
            failed: false,
        };
        Self { number, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits until the placers have finished everything that was read, and allows a new channel.
    /// Returns the last frame up to which all frames are placed, or `None` if a frame could not be
    /// placed.
    pub fn reopen(&self) -> Option<u64> {
        let mut state = self.state.lock();
        while state.free.len() < state.frames && !state.failed {
            self.changed.wait(&mut state);
        }
        if state.failed {
            return None;
        }
        state.closed = false;
        Some(state.progress.placed())
    }

    /// Returns a frame buffer that is no longer needed.
    pub fn free(&self, frame: Frame) {
        self.state.lock().free.push(frame);
        self.changed.notify_all();
    }

    /// A frame could not be placed, so no later frame is placed either.
    pub fn fail(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.failed = true;
        drop(state);
        self.changed.notify_all();
    }

    /// A frame buffer to read into. Blocks until one is free; `None` at the end.
    pub fn acquire(&self) -> Option<Frame> {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(frame) = state.free.pop() {
                return Some(frame);
            }
            self.changed.wait(&mut state);
        }
    }

    /// Blocks until all frames up to `sequence` are placed; `false` at the end.
    pub fn await_placed(&self, sequence: u64) -> bool {
        let mut state = self.state.lock();
        while state.progress.placed() < sequence && !state.closed {
            self.changed.wait(&mut state);
        }
        !state.closed
    }

    /// Blocks until a frame may be passed to the placers; `false` at the end. Frames after a slow
    /// one are tracked in a bitmap of limited size. A source that respects its window never reaches
    /// this limit.
    pub fn await_room(&self, sequence: u64) -> bool {
        self.await_placed(sequence.saturating_sub(MOST_IN_MAKING))
    }

    /// Records a placed frame. Returns what to report to the source and the session.
    pub fn finished(&self, header: &FrameHeader) -> Placed {
        self.state.lock().progress.finished(header)
    }

    /// The last frame up to which all frames are placed.
    pub fn placed(&self) -> u64 {
        self.state.lock().progress.placed()
    }

    /// Whether a frame is placed already. Such a frame must not be placed again.
    pub fn is_placed(&self, sequence: u64) -> bool {
        self.state.lock().progress.is_placed(sequence)
    }

    /// Stops receiving.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use vmferry_wire::FrameKind;

    use super::*;

    #[test]
    fn frames_after_a_slow_one_are_limited() {
        let lane = LaneState::new(0, 4);
        let finish = |sequence| {
            let header =
                FrameHeader { kind: FrameKind::Pages, ..FrameHeader::end_of_round(1, sequence) };
            lane.finished(&header);
            lane.changed.notify_all();
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(lane.await_room(MOST_IN_MAKING + 1));
                finish(MOST_IN_MAKING + 1);
            });
            (2..=MOST_IN_MAKING).for_each(finish);
            finish(1);
        });
        assert_eq!(lane.placed(), MOST_IN_MAKING + 1);
    }

    #[test]
    fn close_ends_the_wait_for_room() {
        let lane = LaneState::new(0, 4);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lane.await_room(MOST_IN_MAKING + 1));
            lane.close();
            assert!(!waiting.join().unwrap());
        });
    }
}
