//! Guests whose VMM moves them by a migration of its own, as byte streams that this engine carries.
//!
//! Such a VMM reads its guest's memory itself, decides what is sent again and when the guest is
//! stopped. The engine takes the bytes from local sockets, recognises the pages in them to encode
//! them, carries them over the lanes of a session, and writes the very same bytes into the sockets
//! of a VMM at the destination. The handover is the same as for any guest: the VMM holds its
//! migration when the guest is paused, and the VMM at the destination does not run it before
//! COMMIT.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::vm::{GuestDescription, Resume, StateEstimate, VmError};

pub use vmferry_codec::PageMark;

/// What a [`Recogniser`] finds in a piece of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Pages with content, in the order of the stream.
    pub pages: Vec<PageMark>,
    /// Pages that the stream says are zero.
    pub zero_pages: u64,
}

impl Marks {
    /// Forgets all.
    pub fn clear(&mut self) {
        self.pages.clear();
        self.zero_pages = 0;
    }
}

/// Finds the pages in a VMM's stream. The stream arrives at the destination byte by byte as it is whatever is
/// found: a page that is not recognised is carried as bytes like any others.
pub trait Recogniser: Send + 'static {
    /// Looks at the next bytes of the stream: those that follow on what the calls before have taken. Appends what
    /// it finds to `marks`, with places counted from the beginning of `bytes`, and returns how many bytes it has
    /// taken: as many as make whole records. What it leaves comes again with more behind it; of
    /// [`LONGEST_RECORD`] bytes it takes at least one. One that takes nothing of far more is not asked again, and the
    /// rest of its stream goes as bytes.
    fn look(&mut self, bytes: &[u8], marks: &mut Marks) -> usize;
}

/// No recogniser leaves as many bytes as this.
pub const LONGEST_RECORD: usize = 16 << 10;

/// One of the byte streams that come out of a VMM.
pub struct OutgoingStream {
    /// Where its bytes are read. The VMM closes its end behind the last one.
    pub socket: UnixStream,
    /// What finds the pages in it.
    pub recogniser: Box<dyn Recogniser>,
}

/// What a VMM says of its own migration.
#[derive(Debug)]
pub enum StreamEvent {
    /// A pass over the guest's memory begins: the first one, or one over what was written since.
    Pass {
        /// Its number, from 1.
        number: u32,
        /// Pages that are to be sent.
        pages: u64,
        /// What the guest writes, in pages per second; 0 if it is not known yet.
        dirty_pages_per_s: f64,
    },
    /// The guest stands still, and the VMM waits for [`StreamedVm::finish`].
    Stopped {
        /// For how long it has stood still.
        stood_still: Duration,
        /// The downtime that the VMM expects.
        expected_downtime: Duration,
    },
    /// The last byte has left the VMM.
    Completed,
    /// The VMM has given its migration up. The guest runs, or can be resumed.
    Failed(VmError),
}

/// Where a VMM's events go. May be called from any thread.
pub type StreamEvents = Box<dyn Fn(StreamEvent) + Send + Sync>;

/// A running guest that its VMM streams, as the engine needs it at the source.
///
/// The engine never shuts the sockets of the streams. When it gives a migration up it reads them no more and calls
/// [`resume`](Resume::resume), which must get rid of what the VMM still writes, by copies of its own, if the VMM waits for that.
pub trait StreamedVm: Resume {
    /// Describes the guest. Called once, before anything is sent. The layout is that of the VMM's
    /// memory blocks, which [`PageMark`]s refer to.
    fn describe(&self) -> GuestDescription;

    /// The VMM and its release, such as `QEMU 10.0.2`: for people, where two releases do not fit. Empty by default.
    fn release(&self) -> String {
        String::new()
    }

    /// How many streams it makes: one lane carries each.
    fn streams(&self) -> u8;

    /// What stopping and starting the guest will cost, beside memory.
    fn state_estimate(&self) -> StateEstimate {
        StateEstimate::default()
    }

    /// Begins the VMM's own migration and returns its streams, in the order in which the destination's VMM wants
    /// them. The VMM is to stop the guest when what is left can be sent within `downtime`, and to wait then.
    ///
    /// # Errors
    /// What the VMM refuses. The guest runs on.
    fn begin(
        &mut self,
        downtime: Duration,
        events: StreamEvents,
    ) -> Result<Vec<OutgoingStream>, VmError>;

    /// Lets the VMM stop the guest when what is left can be sent within `downtime`, from now on.
    ///
    /// # Errors
    /// What the VMM says; nothing has changed then.
    fn set_downtime(&mut self, downtime: Duration) -> Result<(), VmError>;

    /// Lets the VMM, which has stopped the guest, send what is left. [`StreamEvent::Completed`] follows.
    ///
    /// # Errors
    /// What the VMM says; the guest stands still.
    fn finish(&mut self) -> Result<(), VmError>;

    /// Leaves the guest's vCPUs at least `100 - percent` hundredths of their time, by what means the VMM has, while
    /// the guest writes faster than it is sent. Called before [`begin`](Self::begin).
    ///
    /// # Errors
    /// If this VMM can't.
    fn allow_throttling(&mut self, percent: u8) -> Result<(), VmError>;
}
