//! The sending half of a stream: frames in order, from when they are encoded until the peer has
//! placed them.
//!
//! A frame is kept until it is placed, so that exactly the same bytes can be sent again on the next
//! link. The bytes of all kept frames are bounded, which bounds the memory of both sides, and slows
//! the local process down to the speed of the link and of the process at the other end.

use std::collections::VecDeque;

/// A peer's number that cannot be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer says that it has frame {number}, and frames {least} to {most} are possible")]
pub struct ImpossibleNumber {
    /// The number.
    pub number: u64,
    /// The least possible number.
    pub least: u64,
    /// The highest possible number.
    pub most: u64,
}

/// Frames from encoding to placing. The first frame is number 1.
#[derive(Debug)]
pub struct SendWindow<F> {
    /// Frames that are not placed, in order.
    frames: VecDeque<Kept<F>>,
    /// All frames up to this number are placed.
    placed: u64,
    /// The last frame that was begun on the present link.
    begun: u64,
    /// The last frame that was begun on any link.
    reached: u64,
    bytes: usize,
}

#[derive(Debug)]
struct Kept<F> {
    /// `None` until the frame is encoded, and while a sender writes it.
    frame: Option<F>,
    bytes: usize,
}

impl<F> Default for SendWindow<F> {
    fn default() -> Self {
        Self { frames: VecDeque::new(), placed: 0, begun: 0, reached: 0, bytes: 0 }
    }
}

impl<F> SendWindow<F> {
    /// Bytes of all frames that are not placed.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of frames that are not placed.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether every frame is placed.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Whether the peer has placed every frame that was begun on the present link.
    pub fn is_idle(&self) -> bool {
        self.begun == self.placed
    }

    /// Adds the next frame, which counts as this number of bytes, and returns its number. The frame
    /// itself follows with [`put`](Self::put) once it is encoded.
    pub fn reserve(&mut self, bytes: usize) -> u64 {
        self.bytes += bytes;
        self.frames.push_back(Kept { frame: None, bytes });
        self.placed + self.frames.len() as u64
    }

    /// The next frame for the present link, to write. It must be passed to [`put`](Self::put),
    /// written or not. `None` if every frame has been written, if this one is not encoded yet, or
    /// if the sender of the previous link still has it.
    pub fn take(&mut self) -> Option<(u64, F)> {
        let index = usize::try_from(self.begun - self.placed).ok()?;
        let frame = self.frames.get_mut(index)?.frame.take()?;
        self.begun += 1;
        self.reached = self.reached.max(self.begun);
        Some((self.begun, frame))
    }

    /// Keeps a frame that was encoded or written. Returns it if the peer has placed it meanwhile.
    pub fn put(&mut self, number: u64, frame: F) -> Option<F> {
        if number <= self.placed {
            return Some(frame);
        }
        let index = usize::try_from(number - self.placed - 1).ok()?;
        if let Some(kept) = self.frames.get_mut(index) {
            kept.frame = Some(frame);
        }
        None
    }

    /// The peer has placed all frames up to `number`. Passes their buffers to `free`, and returns
    /// the number of bytes that they counted.
    ///
    /// # Errors
    /// Frames that were never sent.
    pub fn placed(
        &mut self,
        number: u64,
        mut free: impl FnMut(F),
    ) -> Result<usize, ImpossibleNumber> {
        if number > self.reached {
            return Err(ImpossibleNumber { number, least: self.placed, most: self.reached });
        }
        let before = self.bytes;
        while self.placed < number {
            let Some(kept) = self.frames.pop_front() else { break };
            self.placed += 1;
            self.bytes -= kept.bytes;
            kept.frame.map(&mut free);
        }
        self.begun = self.begun.max(self.placed);
        Ok(before - self.bytes)
    }

    /// A new link begins. The peer has received all frames up to `received` on earlier links, and
    /// the frames after it are sent again.
    ///
    /// # Errors
    /// Frames that were never sent, or fewer than were placed.
    pub fn resume(&mut self, received: u64) -> Result<(), ImpossibleNumber> {
        if received < self.placed || received > self.reached {
            let (least, most) = (self.placed, self.reached);
            return Err(ImpossibleNumber { number: received, least, most });
        }
        self.begun = received;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(frames: &str) -> SendWindow<char> {
        let mut window = SendWindow::default();
        for frame in frames.chars() {
            let number = window.reserve(10);
            assert_eq!(window.put(number, frame), None);
        }
        window
    }

    #[test]
    fn window_sends_in_order_and_frees_what_is_placed() {
        let mut window = window("abc");
        for expected in [(1, 'a'), (2, 'b')] {
            let (number, frame) = window.take().unwrap();
            assert_eq!((number, frame), expected);
            assert_eq!(window.put(number, frame), None);
        }
        let mut freed = String::new();
        assert_eq!(window.placed(1, |frame| freed.push(frame)), Ok(10));
        assert_eq!((freed.as_str(), window.bytes(), window.len()), ("a", 20, 2));
        assert_eq!(window.take(), Some((3, 'c')));
        assert_eq!(window.take(), None);
    }

    #[test]
    fn window_resends_what_the_peer_has_not_received() {
        let mut window = window("abcd");
        for _ in 0..3 {
            let (number, frame) = window.take().unwrap();
            window.put(number, frame);
        }
        window.placed(1, drop).unwrap();
        window.resume(2).unwrap();
        assert_eq!(window.take(), Some((3, 'c')));
        assert!(window.take().is_some(), "and what was never sent");
    }

    #[test]
    fn frame_that_is_placed_while_it_is_written_is_returned() {
        let mut window = window("a");
        let (number, frame) = window.take().unwrap();
        assert_eq!(window.placed(1, |_| panic!("the sender has it")), Ok(10));
        assert_eq!(window.put(number, frame), Some('a'));
        assert!(window.is_empty());
    }

    #[test]
    fn frame_that_a_sender_still_has_is_not_taken_twice() {
        let mut window = window("ab");
        let (number, frame) = window.take().unwrap();
        window.resume(0).unwrap();
        assert_eq!(window.take(), None);
        window.put(number, frame);
        assert_eq!(window.take(), Some((1, 'a')));
    }

    #[test]
    fn frames_leave_in_order_however_they_are_encoded() {
        let mut window = SendWindow::default();
        let numbers = [(); 3].map(|()| window.reserve(10));
        assert_eq!((numbers, window.bytes(), window.take()), ([1, 2, 3], 30, None));
        window.put(2, 'b');
        assert_eq!(window.take(), None, "the first one is due");
        window.put(1, 'a');
        assert_eq!((window.take(), window.take()), (Some((1, 'a')), Some((2, 'b'))));
        assert_eq!(window.take(), None);
        assert!(!window.is_idle());
        window.put(1, 'a');
        window.put(2, 'b');
        window.placed(2, drop).unwrap();
        assert!(window.is_idle());
        window.put(3, 'c');
        assert_eq!(window.take(), Some((3, 'c')));
    }

    #[test]
    fn impossible_numbers_are_refused() {
        let mut window = window("abc");
        let (number, frame) = window.take().unwrap();
        window.put(number, frame);
        let most = |error: ImpossibleNumber| (error.number, error.least, error.most);
        assert_eq!(window.placed(2, drop).map_err(most), Err((2, 0, 1)), "never sent");
        assert_eq!(window.resume(2).map_err(most), Err((2, 0, 1)));
        window.placed(1, drop).unwrap();
        assert_eq!(window.resume(0).map_err(most), Err((0, 1, 1)), "placed and then not received");
    }
}
