//! Carried guests: their VMM runs its own migration, whose byte streams this engine transports.
//!
//! Such a VMM reads its guest's memory itself and decides what to send again and when to stop the
//! guest. The engine reads the bytes from local sockets, recognizes the pages in them to encode
//! them, transports them over the lanes of a session, and writes exactly the same bytes into the
//! sockets of a VMM at the destination. The handover is the same as for any guest: the VMM waits
//! when it has paused the guest, and the VMM at the destination does not run it before COMMIT.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use vmferry_handover::{Reconnect, Resume, VmError};

use super::storage::SourceStorage;
use super::{GuestDescription, StateEstimate};

pub use vmferry_codec::PageMark;

/// What a [`Recogniser`] finds in a part of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Pages with content, in the order of the stream.
    pub pages: Vec<PageMark>,
    /// Pages that the stream marks as zero.
    pub zero_pages: u64,
}

impl Marks {
    /// Removes everything.
    pub fn clear(&mut self) {
        self.pages.clear();
        self.zero_pages = 0;
    }
}

/// Finds the pages in a VMM's stream. The stream arrives at the destination byte by byte unchanged,
/// whatever is found: a page that is not recognized is transported as plain bytes.
pub trait Recogniser: Send + 'static {
    /// Parses the next bytes of the stream, starting after those that earlier calls consumed.
    /// Appends the pages found to `marks`, with offsets from the beginning of `bytes`, and returns
    /// the number of bytes consumed, which is a number of whole records. Bytes that are not
    /// consumed are passed again with more data after them. Of [`LONGEST_RECORD`] bytes at least
    /// one must be consumed. A recognizer that consumes nothing of far more bytes is not called
    /// again, and the rest of its stream is transported as plain bytes.
    fn look(&mut self, bytes: &[u8], marks: &mut Marks) -> usize;
}

/// Upper limit of the bytes that a recognizer leaves unconsumed.
pub const LONGEST_RECORD: usize = 16 << 10;

/// One of the byte streams of a VMM.
pub struct OutgoingStream {
    /// The socket to read from. The VMM closes its end after the last byte.
    pub socket: UnixStream,
    /// Finds the pages in the stream.
    pub recogniser: Box<dyn Recogniser>,
}

/// How a VMM follows the order to begin its post-copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostCopyStart {
    /// It does.
    Begun,
    /// It has just stopped the guest by itself, because little enough memory is left, and sends
    /// that before the guest runs at the destination.
    TooLate,
}

/// Streams of a VMM that begin, or go on, when the guest has been stopped with post-copy.
pub struct LateStreams {
    /// The main stream in its other direction. At the source: takes the requests for pages that the
    /// destination's VMM writes. At the destination: those requests are read from here, to the end
    /// that the VMM makes when it has every page.
    pub requests: UnixStream,
    /// Pages that threads of the guest wait for: read at the source, and written at the
    /// destination. `None` if the VMM has sent everything before it stopped the guest.
    pub urgent: Option<UnixStream>,
    /// Why the streams have ended, if they have failed.
    pub failure: LateFailure,
}

impl LateStreams {
    /// Streams of a VMM, which reports its failures itself.
    #[must_use]
    pub fn new(requests: UnixStream, urgent: Option<UnixStream>) -> Self {
        Self { requests, urgent, failure: LateFailure::default() }
    }
}

/// Where the sender of late streams leaves the reason if it ends them because it has failed. A VMM
/// reports its failures in another way.
#[derive(Clone, Debug, Default)]
pub struct LateFailure(Arc<Mutex<Option<VmError>>>);

impl LateFailure {
    /// Sets the reason. Must be called before the streams end.
    pub fn set(&self, reason: VmError) {
        *self.0.lock() = Some(reason);
    }

    /// The reason, once.
    #[must_use]
    pub fn take(&self) -> Option<VmError> {
        self.0.lock().take()
    }
}

/// The state of a VMM's own post-copy at the destination, whose requests have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LateEnd {
    /// The guest has every page.
    Complete,
    /// The VMM still awaits pages, in some other way: an operator has connected both VMMs.
    Awaited,
    /// The VMM has ended, and the guest with it.
    GuestEnded,
}

/// An event of a VMM's own migration.
#[derive(Debug)]
pub enum StreamEvent {
    /// A pass over the guest's memory begins: the first one, or one over the pages written since.
    Pass {
        /// Its number, from 1.
        number: u32,
        /// Pages to send.
        pages: u64,
        /// The rate at which the guest dirties pages, in pages per second; 0 if it is not known
        /// yet.
        dirty_pages_per_s: f64,
    },
    /// The guest is paused, and the VMM waits for [`StreamedVm::finish`].
    Stopped {
        /// For how long the guest has been paused.
        stood_still: Duration,
        /// The downtime that the VMM expects.
        expected_downtime: Duration,
        /// Pages that were not sent yet.
        pages: u64,
    },
    /// The VMM has sent the last byte.
    Completed,
    /// The VMM has aborted its migration: the guest runs, or can be resumed. With post-copy, it
    /// can't send pages for now, and if [its post-copy has failed](crate::PostCopyFailed) it has to
    /// be connected again.
    Failed(VmError),
    /// The VMM has ended, and the guest's memory here with it.
    Ended(VmError),
}

/// Callback for a VMM's events. May be called from any thread.
pub type StreamEvents = Box<dyn Fn(StreamEvent) + Send + Sync>;

/// A running carried guest at the source, as the engine uses it.
///
/// The engine never shuts down the sockets of the streams. When it aborts a migration it stops
/// reading them and calls [`resume`](Resume::resume). If the VMM blocks on its output, `resume`
/// must drain it through its own duplicates of the sockets.
pub trait StreamedVm: Resume + Reconnect<Streams = LateStreams> {
    /// Describes the guest. Called once, before anything is sent. The layout is that of the VMM's
    /// memory blocks, which [`PageMark`]s refer to.
    fn describe(&self) -> GuestDescription;

    /// The VMM and its release, such as `QEMU 10.0.2`, for messages about incompatible releases.
    /// Empty by default.
    fn release(&self) -> String {
        String::new()
    }

    /// The number of streams. Each is transported on one lane.
    fn streams(&self) -> u8;

    /// The cost of stopping and starting the guest, without memory.
    fn state_estimate(&self) -> StateEstimate {
        StateEstimate::default()
    }

    /// Starts the VMM's own migration and returns its streams, in the order in which the
    /// destination's VMM expects them. The VMM must stop the guest when the remaining data can be
    /// sent within `downtime`, and then wait.
    ///
    /// # Errors
    /// The VMM refuses. The guest runs on.
    fn begin(
        &mut self,
        downtime: Duration,
        events: StreamEvents,
    ) -> Result<Vec<OutgoingStream>, VmError>;

    /// Changes the downtime limit: from now on the VMM stops the guest when the remaining data can
    /// be sent within `downtime`.
    ///
    /// # Errors
    /// The VMM's error. Nothing has changed then.
    fn set_downtime(&mut self, downtime: Duration) -> Result<(), VmError>;

    /// Lets the VMM, which has stopped the guest, send the remaining data.
    /// [`StreamEvent::Completed`] follows.
    ///
    /// # Errors
    /// The VMM's error. The guest stays paused.
    fn finish(&mut self) -> Result<(), VmError>;

    /// The guest's storage, if this VMM can read it.
    fn storage(&mut self) -> Option<&mut dyn SourceStorage> {
        None
    }

    /// Permits the VMM's own post-copy. Called before [`describe`](Self::describe), which then
    /// announces it to the destination's VMM.
    ///
    /// # Errors
    /// Why this guest can't be moved so, as in the default.
    fn allow_post_copy(&mut self) -> Result<(), VmError> {
        Err("its VMM has no post-copy that can be carried".into())
    }

    /// The destination does not accept post-copy. Called before [`begin`](Self::begin), if it was
    /// permitted.
    fn forbid_post_copy(&mut self) {}

    /// Has the VMM stop the guest soon, whatever remains, and send the rest after
    /// [`finish`](Self::finish) while the guest runs at the destination.
    /// [`StreamEvent::Stopped`] follows.
    ///
    /// # Errors
    /// The VMM's error. The guest may be paused then, and the migration ends.
    fn begin_post_copy(&mut self) -> Result<PostCopyStart, VmError> {
        Err("its VMM has no post-copy that can be carried".into())
    }

    /// The streams that begin when the guest has been stopped with post-copy. Called once, after
    /// [`finish`](Self::finish). The first stream of [`begin`](Self::begin) goes on. The engine may
    /// read and write until the VMM is [resumed](Resume::resume) or dropped.
    ///
    /// # Errors
    /// The VMM's error.
    fn late_streams(&mut self) -> Result<LateStreams, VmError> {
        Err("its VMM has no post-copy that can be carried".into())
    }

    /// Allows the VMM to throttle the guest's vCPUs by its own means, down to `100 - percent` per
    /// cent of their time, while the guest writes faster than the link can send. Called before
    /// [`begin`](Self::begin).
    ///
    /// # Errors
    /// This VMM can't throttle.
    fn allow_throttling(&mut self, percent: u8) -> Result<(), VmError>;
}
