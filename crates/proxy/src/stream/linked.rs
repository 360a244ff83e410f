//! What a link does with its stream.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vmferry_codec::{EncodedFrame, Frame};
use vmferry_transport::ChannelCloser;

use super::inbox::InboxError;
use super::window::ImpossibleNumber;
use super::{SPARE_BUFFERS, State, Stream};

/// What a link's sender has to do next.
#[expect(clippy::large_enum_variant, reason = "it is moved once for each frame")]
pub(super) enum Next {
    Frame(u64, EncodedFrame),
    Placed(u64),
    Unread,
    Reset(String),
    Alive,
    /// This link is not the present one any more, or the stream is complete.
    Stop,
}

/// A received record that can't be right.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReceiveError {
    #[error("another link has taken over")]
    Superseded,
    #[error(transparent)]
    Number(#[from] ImpossibleNumber),
    #[error(transparent)]
    Inbox(#[from] InboxError),
}

impl Stream {
    /// Takes over from the present link, if there is one. Returns the new link's number, and the
    /// frames received until now: no earlier link adds to them.
    pub fn next_link(&self, closer: ChannelCloser) -> (u64, u64) {
        let mut state = self.state.lock();
        state.link += 1;
        if let Some(earlier) = state.closer.replace(closer) {
            earlier.close();
        }
        let (link, received) = (state.link, state.inbox.received());
        drop(state);
        self.counters.links.fetch_add(1, Ordering::Relaxed);
        self.wake_all();
        (link, received)
    }

    /// The link is ready, and the peer has received these frames on earlier ones.
    pub(super) fn resume(&self, link: u64, received: u64) -> Result<(), ReceiveError> {
        let mut state = self.state.lock();
        state.is_present(link)?;
        state.window.resume(received)?;
        (state.unlinked, state.was_linked) = (None, true);
        // An acknowledgement may have been lost with the last link.
        state.placed_due = state.inbox.placed() > 0;
        drop(state);
        self.wake_all();
        Ok(())
    }

    pub(super) fn end_link(&self, link: u64) {
        let mut state = self.state.lock();
        if state.link == link {
            state.closer = None;
            state.unlinked = Some(Instant::now());
            state.pace.interrupted();
        }
        drop(state);
        self.wake_all();
    }

    /// Waits until the peer has connected the stream to its program, the stream is over, or the
    /// time has come.
    pub fn await_first_link(&self, deadline: Instant) {
        let mut state = self.state.lock();
        while !state.was_linked && state.failure.is_none() && !state.is_complete() {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return;
            }
        }
    }

    /// Waits until a link after this one has begun, the stream is over, or the time has come.
    pub fn await_next_link(&self, link: u64, deadline: Instant) {
        let mut state = self.state.lock();
        while state.link == link && state.failure.is_none() && !state.is_complete() {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return;
            }
        }
    }

    /// Whether this is the last link that was begun.
    pub fn is_last_link(&self, link: u64) -> bool {
        self.state.lock().link == link
    }

    /// Waits for something to send on this link, at most for `silence`.
    pub(super) fn next(&self, link: u64, silence: Duration) -> Next {
        let deadline = Instant::now() + silence;
        let mut state = self.state.lock();
        loop {
            // A complete stream may still owe the last acknowledgement.
            if state.link != link || state.unlinked.is_some() && !state.is_complete() {
                return Next::Stop;
            }
            if let Some(failure) = &state.failure {
                let reason = failure.to_string();
                return match std::mem::take(&mut state.reset_due) {
                    true => Next::Reset(reason),
                    false => Next::Stop,
                };
            }
            if std::mem::take(&mut state.unread_due) {
                return Next::Unread;
            }
            if std::mem::take(&mut state.placed_due) {
                state.told_placed = state.inbox.placed();
                return Next::Placed(state.told_placed);
            }
            let alone = state.window.is_idle();
            if let Some((number, frame)) = state.window.take() {
                state.pace.sent(Instant::now(), number, alone);
                return Next::Frame(number, frame);
            }
            if state.is_complete() {
                return Next::Stop;
            }
            state.sender_idle = true;
            let timed_out = self.to_send.wait_until(&mut state, deadline).timed_out();
            state.sender_idle = false;
            if timed_out {
                return Next::Alive;
            }
        }
    }

    /// A buffer to receive into.
    pub(super) fn spare_received(&self) -> Frame {
        self.state.lock().spare_received.pop().unwrap_or_default()
    }

    /// A frame has come on this link.
    pub(super) fn received(
        &self,
        link: u64,
        number: u64,
        frame: Frame,
        bytes: usize,
    ) -> Result<(), ReceiveError> {
        let mut state = self.state.lock();
        state.is_present(link)?;
        state.inbox.push(number, frame, bytes)?;
        drop(state);
        self.to_write.notify_all();
        Ok(())
    }

    /// The peer has placed all frames up to `number`.
    pub(super) fn placed(&self, link: u64, number: u64) -> Result<(), ReceiveError> {
        let mut state = self.state.lock();
        state.is_present(link)?;
        let State { window, spare, .. } = &mut *state;
        let bytes = window.placed(number, |frame| {
            if spare.len() < SPARE_BUFFERS {
                spare.push(frame);
            }
        })?;
        state.pace.placed(Instant::now(), number, bytes);
        let complete = state.is_complete();
        drop(state);
        self.room.notify_all();
        if complete {
            self.wake_all();
        }
        Ok(())
    }
}
