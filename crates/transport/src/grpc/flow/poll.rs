//! The part of a flow for tasks: these functions never block, and wake tasks instead.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use bytes::Bytes;
use tonic::Status;

use super::{
    CHUNK_BYTES, Flow, KEPT_BYTES, Message, RECEIVED_BYTES, RECEIVED_PIECES, UNSENT_BYTES,
};
use crate::grpc::failure::Failure;
use crate::grpc::message;

/// What the call sends next.
#[derive(Debug)]
pub enum Outgoing {
    /// A message.
    Message(Bytes),
    /// The regular end. A response has this status.
    End(Status),
    /// The end because of the peer's behavior. A response has this status.
    Refused(Status),
    /// An end that shows the peer that data is missing.
    Cut(Failure),
}

impl Flow {
    /// Passes received bytes to the reader once there is room.
    pub fn poll_put(&self, context: &mut Context<'_>, piece: &mut Bytes) -> Poll<()> {
        let mut state = self.state.lock();
        if state.reader_gone || state.failure.is_some() {
            return Poll::Ready(());
        }
        if state.received_bytes >= RECEIVED_BYTES || state.received.len() >= RECEIVED_PIECES {
            state.pump = Some(context.waker().clone());
            return Poll::Pending;
        }
        state.received_bytes += piece.len();
        state.received.push_back(std::mem::take(piece));
        drop(state);
        self.readable.notify_one();
        Poll::Ready(())
    }

    /// Records the total that the peer's reader has consumed. Returns `false` if it exceeds the
    /// data sent, or is less than before.
    pub fn note_taken(&self, bytes: u64) -> bool {
        let mut state = self.state.lock();
        let plausible = (state.taken_bytes..=state.written_bytes).contains(&bytes);
        if plausible {
            state.taken_bytes = bytes;
        }
        drop(state);
        self.writable.notify_all();
        plausible
    }

    /// The peer has announced that no more data follows.
    pub fn note_end(&self) {
        self.change(|state| state.peer_ended = true);
    }

    /// Whether the peer has announced its end.
    pub fn has_peer_ended(&self) -> bool {
        self.state.lock().peer_ended
    }

    /// The next message to send.
    pub fn poll_next(self: &Arc<Self>, context: &mut Context<'_>) -> Poll<Outgoing> {
        let mut state = self.state.lock();
        if let Some(failure) = &state.failure {
            let failure = failure.clone();
            return Poll::Ready(match state.refusal.take() {
                Some(status) => Outgoing::Refused(status),
                None => Outgoing::Cut(failure),
            });
        }
        if let Some(bytes) = state.owed.take() {
            return Poll::Ready(Outgoing::Message(message::taken(bytes).into()));
        }
        if let Some(message) = state.queue.pop_front() {
            drop(state);
            let sent = Sent { message, flow: Arc::clone(self) };
            return Poll::Ready(Outgoing::Message(Bytes::from_owner(sent)));
        }
        if state.finished && state.peer_ended && (!state.acknowledged || state.received.is_empty())
        {
            return Poll::Ready(Outgoing::End(Status::ok("")));
        }
        if state.finished && state.reader_gone {
            let text = "the channel was closed before the end was announced";
            return Poll::Ready(Outgoing::End(Status::aborted(text)));
        }
        state.body = Some(context.waker().clone());
        Poll::Pending
    }

    /// Ready when both halves are dropped or the channel has failed.
    pub fn poll_over(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if (state.reader_gone && state.writer_gone) || state.failure.is_some() {
            return Poll::Ready(());
        }
        state.driver = Some(context.waker().clone());
        Poll::Pending
    }

    /// The socket holds unsent data.
    pub fn note_unflushed(&self) {
        self.unflushed.store(true, Ordering::Relaxed);
    }

    /// The operating system has accepted all data of the socket.
    pub fn note_flushed(&self) {
        if self.unflushed.swap(false, Ordering::Relaxed) {
            // A thread that has just read the flag holds the lock until it waits.
            drop(self.state.lock());
            self.writable.notify_all();
        }
    }
}

/// A message inside HTTP/2, which drops it when the socket has accepted the last byte.
struct Sent {
    message: Message,
    flow: Arc<Flow>,
}

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        &self.message.bytes
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let mut bytes = std::mem::take(&mut self.message.bytes);
        let mut state = self.flow.state.lock();
        state.unsent_bytes -= self.message.data_bytes;
        state.unsent_messages -= 1;
        if bytes.capacity() >= KEPT_BYTES && state.spare.len() < UNSENT_BYTES / CHUNK_BYTES {
            bytes.clear();
            state.spare.push(bytes);
        }
        drop(state);
        self.flow.writable.notify_all();
    }
}
